"""The file system of a jailed session: writable layers over the readable paths of the machine. Standard library only.

    /            overlay: the session's present layer │ layers of snapshots │ skeleton
    /usr, ...    readable paths of the machine, bound read-only on mount points of the skeleton
    /dev, /proc  a few devices; the session's own processes

The skeleton is a tree of empty folders and files that every session has, with a mount point for each readable path. A
store is a file system in memory for the layers of one session. Only the host and its processes see these mounts, so
the kernel frees them when the last of these processes ends.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import jail, kernel
else:  # the host's program imports this as a top-level module
    import jail
    import kernel

PLACES = ("/mnt", "/media", "/srv", "/run")
"""Folders of the machine on which the host can mount its files; the first without a readable path in it is used."""
PLAIN = kernel.NO_SUID | kernel.NO_DEVICES
SKELETON_BYTES = 4 << 20
"""The size of the skeleton's file system in bytes; it contains folders and empty files."""
PROBED = "/probed"
"""A folder of a lower layer that the probe replaces, to test whether overlays work."""
FILE_BYTES = 1 << 12
"""The average space of a file from which the limit of the number of files follows, in bytes."""
PROGRAM = "/.headrace"
"""The folder of a bubblewrap session that contains the program of its first process."""
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
"""Symbolic links in /dev, as target by name."""


WRITABLE = ("/", "/tmp")
"""Folders of the skeleton in which a session may create files; other folders of the skeleton are read-only."""


class Layers:
    """The files of all sessions of a host: the skeleton, and one store of limited size for each session."""

    def __init__(self, readable: list[str]) -> None:
        """Mount the host's files in a new mount namespace of this process, and write the skeleton with a mount point
        for each of the ``readable`` paths."""
        jail.enter_mount_namespace()
        self.place = _free_place(readable)
        """The folder of the machine on which the files are mounted."""
        kernel.mount("tmpfs", self.place, "tmpfs", PLAIN, f"size={SKELETON_BYTES},mode=755")
        self.readable = readable
        self.fixed = sorted({_outermost(path) for path in (*readable, "/etc/x", "/dev/x")} - set(readable))
        """Folders of the skeleton with mount points in them. They are mounted read-only, because the session's user may
        own them; no process in the session can move a mount."""
        self._programs: list[str] = []
        """Paths of the folders that bubblewrap binds in every session, such as that of its first process's program."""
        self.overlays = True
        """Whether the root of a session is an overlay; if not, each session has one layer, which contains a copy of the
        skeleton."""
        for name in ("skeleton", "root"):
            os.mkdir(f"{self.place}/{name}")
        self._write_skeleton(f"{self.place}/skeleton")

    def _write_skeleton(self, root: str) -> None:
        """Write the folders and files that every session has, and the mount points of the readable paths, below the
        folder ``root``."""
        for path in self.readable:
            _make_mount_point(path, root + path)
        for folder in ("/dev", "/proc", "/etc", "/tmp"):
            os.makedirs(root + folder, exist_ok=True)
        for name in jail.DEVICES:
            _touch(f"{root}/dev/{name}")
        for name, target in LINKS.items():
            os.symlink(target, f"{root}/dev/{name}")
        os.chmod(f"{root}/tmp", 0o1777)

    def show_machine(self, programs: dict[str, str]) -> None:
        """Bind the readable paths on the skeleton's mount points, and the folders of ``programs`` (path by name) beside
        the skeleton. bubblewrap binds them from there, because it runs as a user that may not reach the original
        paths."""
        self._programs = list(programs)
        for name, path in programs.items():
            os.mkdir(f"{self.place}/{name}")
            kernel.mount(path, f"{self.place}/{name}", flags=kernel.BIND)
        for path in self.readable:
            if not _stays_link(path):
                kernel.mount(path, f"{self.place}/skeleton{path}", flags=kernel.BIND | kernel.RECURSIVE)

    def bubblewrap_words(self, names: dict[str, int]) -> list[str]:
        """Return the arguments with which bubblewrap mounts the readable paths, /dev and /proc. ``names`` are files to
        write in /etc, as file descriptor of the content by name."""
        words = [word for path in self.fixed for word in ("--perms", "0755", "--tmpfs", path)]
        for name in self._programs:
            words += ["--ro-bind", f"{self.place}/{name}", f"{PROGRAM}/{name}"]
        for path in self.readable:
            if _stays_link(path):
                words += ["--symlink", os.readlink(path), path]
            else:
                words += ["--ro-bind", f"{self.place}/skeleton{path}", path]
        for name in jail.DEVICES:
            words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for name, target in LINKS.items():
            words += ["--symlink", target, f"/dev/{name}"]
        for name, descriptor in names.items():
            if not {"/etc", f"/etc/{name}"} & set(self.readable):
                words += ["--perms", "0644", "--file", str(descriptor), f"/etc/{name}"]
        words += [word for path in self.fixed for word in ("--remount-ro", path)]
        return [*words, "--proc", "/proc"]

    def add_store(self, store: str, disk_bytes: int) -> None:
        """Mount a store for the files of one session, whose layers may have ``disk_bytes`` bytes in total."""
        path = f"{self.place}/{store}"
        os.mkdir(path)
        options = f"size={disk_bytes},nr_inodes={max(1 << 10, disk_bytes // FILE_BYTES)},mode=755"
        try:
            kernel.mount("tmpfs", path, "tmpfs", PLAIN, options)
        except OSError:
            os.rmdir(path)
            raise

    def remove_store(self, store: str) -> None:
        """Free a store and all its layers. Do nothing if it does not exist."""
        path = f"{self.place}/{store}"
        if os.path.isdir(path):
            kernel.unmount(path)
            os.rmdir(path)

    def files(self, layer: str) -> str:
        """Return the folder that contains the files of ``layer``."""
        return f"{self.place}/{layer}/files"

    def add_layer(self, layer: str, *, bare: bool = False) -> None:
        """Make the folders of a layer (``STORE/NUMBER``), which a session will write. Without overlays, the skeleton is
        copied into the layer unless it is ``bare``. Every user may write to the layer's root, and remove only its own
        files."""
        for name in ("files", "work"):
            os.makedirs(f"{self.place}/{layer}/{name}")
        if not self.overlays and not bare:
            self._write_skeleton(self.files(layer))
        os.chmod(self.files(layer), 0o1777)

    def give(self, layer: str, user: int) -> None:
        """Make the session's user the owner of the folders of a new layer without overlay, because this user unpacks
        copied files over them."""
        for folder, _, _ in os.walk(f"{self.place}/{layer}/files"):
            os.chown(folder, user, user)

    def enter(self, layers: list[str], names: dict[str, str]) -> None:
        """Mount ``layers`` as the root of this process, the first process of a session; the last layer is writable.
        ``names`` are files of /etc, as content by name. Raises ``OSError`` if the kernel refuses, or if the session has
        replaced a mount point."""
        jail.enter_mount_namespace()
        root = f"{self.place}/root"
        self._mount_files(layers, root)
        for path in self.fixed:
            _refuse_moved(root + path, root)
            kernel.mount(root + path, root + path, flags=kernel.BIND)
            if path == "/etc":
                _write_names(root + path, names)
            kernel.make_read_only(root + path)
        for path in self.readable:
            if not _stays_link(path):
                _bind(path, root)
                kernel.make_read_only(root + path)
        for name in jail.DEVICES:
            _bind(f"/dev/{name}", root)
        _refuse_moved(f"{root}/proc", root)
        jail.mount_proc(f"{root}/proc")
        kernel.change_root(root)

    def _mount_files(self, layers: list[str], root: str) -> None:
        """Mount the files of a session on ``root``. A host that is not root uses the overlay option ``userxattr``,
        which stores the overlay's marks in attributes that users may set."""
        if not self.overlays:
            kernel.mount(f"{self.place}/{layers[-1]}/files", root, flags=kernel.BIND)
            return
        os.chdir(self.place)  # for short paths: the mount options must fit into one page
        lower = [*(f"{layer}/files" for layer in reversed(layers[:-1])), "skeleton"]
        options = f"lowerdir={':'.join(lower)},upperdir={layers[-1]}/files,workdir={layers[-1]}/work"
        kernel.mount("overlay", root, "overlay", PLAIN, options + (",userxattr" if os.getuid() else ""))


def _free_place(readable: list[str]) -> str:
    """Return a folder on which the host can mount its files. Raises ``OSError`` if there is none."""
    for place in PLACES:
        if os.path.isdir(place) and not any(f"{path}/".startswith(f"{place}/") for path in readable):
            return place
    raise OSError(f"none of {', '.join(PLACES)} is free for the files of sessions")


def _make_mount_point(path: str, mount_point: str) -> None:
    """Make the mount point ``mount_point`` in the skeleton for ``path`` of the machine. A symbolic link is copied if
    :func:`_stays_link`."""
    os.makedirs(os.path.dirname(mount_point), exist_ok=True)
    if _stays_link(path):
        os.symlink(os.readlink(path), mount_point)
    elif os.path.isdir(path):
        os.makedirs(mount_point, exist_ok=True)
    else:
        _touch(mount_point)


def _outermost(path: str) -> str:
    """Return the path or the folder above it that lies directly in one of the folders :data:`WRITABLE`."""
    while os.path.dirname(path) not in WRITABLE:
        path = os.path.dirname(path)
    return path


def _stays_link(path: str) -> bool:
    """Return whether the skeleton copies ``path`` as a symbolic link. A link in a writable folder, such as /bin, could
    be replaced by the session, so the target of that link is mounted instead."""
    return os.path.islink(path) and not (os.path.dirname(path) in WRITABLE and os.path.exists(path))


def _write_names(folder: str, names: dict[str, str]) -> None:
    """Write small files such as passwd and group into ``folder``, the /etc of a session. ``names`` maps the name of a
    file to its content. A file that exists, or that cannot be written, is skipped."""
    for name, text in names.items():
        with contextlib.suppress(OSError), open(f"{folder}/{name}", "x", encoding="ascii") as file:
            file.write(text)


def _touch(path: str) -> None:
    """Create an empty file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _bind(path: str, root: str) -> None:
    """Mount ``path`` of the machine on its mount point below ``root``."""
    _refuse_moved(root + path, root)
    kernel.mount(path, root + path, flags=kernel.BIND | kernel.RECURSIVE)


def _refuse_moved(place: str, root: str) -> None:
    """Raise ``OSError`` if a part of ``place`` below ``root`` is missing or a symbolic link. A link that a session has
    made there would redirect a mount to another path of the machine."""
    while place != root:
        mode = os.lstat(place).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(f"{place[len(root) :]} has become a link")
        place = os.path.dirname(place)


def probe_overlay(layers: Layers) -> None:
    """Check in a forked process that overlays work here, including deletion of a lower layer's folder. Raises
    ``OSError`` if they do not."""
    layers.add_store("probe", 1 << 20)
    try:
        for layer in ("probe/0", "probe/1"):
            layers.add_layer(layer)
        os.mkdir(f"{layers.place}/probe/0/files{PROBED}")
        _check_overlay(layers)
    finally:
        layers.remove_store("probe")


def _check_overlay(layers: Layers) -> None:
    """Run the check of :func:`probe_overlay` on ``layers`` in a child process, and raise its error as ``OSError``."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kernel.unshare(kernel.NEW_PIDS)
            _exit_with_child(layers, write_end)
        except OSError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as report:
        text = report.read().decode()
    if text:
        raise OSError(text)


def _exit_with_child(layers: Layers, report: int) -> None:
    """Fork the first process of a new process namespace, which enters two layers and replaces a folder, and wait for
    it. It writes an error to the file descriptor ``report``."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        layers.enter(["probe/0", "probe/1"], {})
        os.rmdir(PROBED)
        os.mkdir(PROBED)
    except OSError as error:
        os.write(report, str(error).encode())
    finally:
        os._exit(0)
