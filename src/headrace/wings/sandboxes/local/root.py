"""The file system of a jailed session: layers of files over what it may read of the machine. Standard library only.

    /            overlay: the session's files of now │ layers of snapshots │ skeleton
    /usr, ...    readable paths of the machine, bound read-only on the skeleton's places for them
    /dev, /proc  a few devices; the session's own processes

The host keeps the skeleton and all layers in memory, in mounts that only its own processes see: they vanish with the
last of these processes, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import jail, kernel
else:  # a part of the host's program
    import jail
    import kernel

PLACES = ("/mnt", "/media", "/srv", "/run")
"""Folders of the machine over which the host can mount its files, unless a session reads one of them."""
PLAIN = kernel.NO_SUID | kernel.NO_DEVICES
SKELETON_BYTES = 4 << 20
"""The size of the skeleton: folders and empty files."""
PROBED = "/probed"
"""A folder of a lower layer that is replaced to find out whether overlays work."""
FILE_BYTES = 1 << 12
"""The least space that a file takes, on the average, which bounds their number."""
PROGRAM = "/.headrace"
"""The folder of a session that holds the program of its first process, where bubblewrap makes the sandbox."""
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
"""Links in /dev."""


WRITABLE = ("/", "/tmp")
"""Folders of the skeleton in which a session may make files. What the skeleton has in them is fixed."""


class Layers:
    """The files of all sessions of a host: a skeleton, and one store of limited size for each session."""

    def __init__(self, readable: list[str]) -> None:
        """Mount the place for the files and write the skeleton with a place for each of the ``readable`` paths, in a
        mount namespace of this process."""
        jail.own_mounts()
        self.place = _free_place(readable)
        """The folder of the machine over which the files are mounted."""
        kernel.mount("tmpfs", self.place, "tmpfs", PLAIN, f"size={SKELETON_BYTES},mode=755")
        self.readable = readable
        self.fixed = sorted({_outermost(path) for path in (*readable, "/etc/x", "/dev/x")} - set(readable))
        """Folders that hold places of the machine's paths. They are mounts, which no process in the session can move,
        and read-only: the session's own user may own them."""
        self._programs: list[str] = []
        self.overlays = True
        """Whether sessions have their files in overlays; if not, each has one layer, which begins as the skeleton."""
        for name in ("skeleton", "root"):
            os.mkdir(f"{self.place}/{name}")
        self._write_skeleton(f"{self.place}/skeleton")

    def _write_skeleton(self, root: str) -> None:
        """Write the folders and files that every session has, and the places of what it reads of the machine."""
        for path in self.readable:
            _make_place(path, root + path)
        for folder in ("/dev", "/proc", "/etc", "/tmp"):
            os.makedirs(root + folder, exist_ok=True)
        for name in jail.DEVICES:
            _touch(f"{root}/dev/{name}")
        for name, target in LINKS.items():
            os.symlink(target, f"{root}/dev/{name}")
        os.chmod(f"{root}/tmp", 0o1777)

    def show_machine(self, programs: dict[str, str]) -> None:
        """Bind the readable paths on the skeleton's places, and the folders of ``programs`` by their names, where every
        user can reach them: programs of another user than root bind them from there."""
        self._programs = list(programs)
        for name, path in programs.items():
            os.mkdir(f"{self.place}/{name}")
            kernel.mount(path, f"{self.place}/{name}", flags=kernel.BIND)
        for path in self.readable:
            if not _stays_link(path):
                kernel.mount(path, f"{self.place}/skeleton{path}", flags=kernel.BIND | kernel.RECURSIVE)

    def bubblewrap_words(self, names: dict[str, int]) -> list[str]:
        """Return the arguments with which bubblewrap shows the machine and makes /dev and /proc. ``names`` are files of
        /etc, each with the file descriptor of its content."""
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
        """Mount a store for the files of one session, of at most ``disk_bytes`` in all its layers."""
        path = f"{self.place}/{store}"
        os.mkdir(path)
        options = f"size={disk_bytes},nr_inodes={max(1 << 10, disk_bytes // FILE_BYTES)},mode=755"
        try:
            kernel.mount("tmpfs", path, "tmpfs", PLAIN, options)
        except OSError:
            os.rmdir(path)
            raise

    def remove_store(self, store: str) -> None:
        """Free a store and all its layers; one that was never made is no error."""
        path = f"{self.place}/{store}"
        if os.path.isdir(path):
            kernel.unmount(path)
            os.rmdir(path)

    def files(self, layer: str) -> str:
        """Return the folder with the files of a layer."""
        return f"{self.place}/{layer}/files"

    def add_layer(self, layer: str, *, bare: bool = False) -> None:
        """Make a layer, ``STORE/NUMBER``, for the files that a session will write, without anything in it if it is
        ``bare``. Every user may write to its root, and only remove what is his."""
        for name in ("files", "work"):
            os.makedirs(f"{self.place}/{layer}/{name}")
        if not self.overlays and not bare:
            self._write_skeleton(self.files(layer))
        os.chmod(self.files(layer), 0o1777)

    def give(self, layer: str, user: int) -> None:
        """Give the folders of a new layer that is no overlay to the session's user, who unpacks copies over them."""
        for folder, _, _ in os.walk(f"{self.place}/{layer}/files"):
            os.chown(folder, user, user)

    def enter(self, layers: list[str], names: dict[str, str]) -> None:
        """Make the layers the root of this process, which is the first of its session; the last of them is written to.
        ``names`` are files of /etc by their content. Raises ``OSError`` where the kernel refuses, or where the session
        has damaged the places of its mounts."""
        jail.own_mounts()
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
        """Mount the files of a session on ``root``. A host that is not root keeps the marks of its overlays in
        attributes that users may set."""
        if not self.overlays:
            kernel.mount(f"{self.place}/{layers[-1]}/files", root, flags=kernel.BIND)
            return
        os.chdir(self.place)  # short paths: the kernel reads one page of options
        lower = [*(f"{layer}/files" for layer in reversed(layers[:-1])), "skeleton"]
        options = f"lowerdir={':'.join(lower)},upperdir={layers[-1]}/files,workdir={layers[-1]}/work"
        kernel.mount("overlay", root, "overlay", PLAIN, options + (",userxattr" if os.getuid() else ""))


def _free_place(readable: list[str]) -> str:
    """Return a folder over which the host can mount its files. Raises ``OSError`` if there is none."""
    for place in PLACES:
        if os.path.isdir(place) and not any(f"{path}/".startswith(f"{place}/") for path in readable):
            return place
    raise OSError(f"none of {', '.join(PLACES)} is free for the files of sessions")


def _make_place(path: str, place: str) -> None:
    """Make the place in the skeleton on which ``path`` of the machine will be bound; a link stays a link where it
    cannot be replaced."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if _stays_link(path):
        os.symlink(os.readlink(path), place)
    elif os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        _touch(place)


def _outermost(path: str) -> str:
    """Return the outermost folder above a path, or the path itself, that lies in a folder in which sessions write."""
    while os.path.dirname(path) not in WRITABLE:
        path = os.path.dirname(path)
    return path


def _stays_link(path: str) -> bool:
    """Return whether a path of the machine is a link in the skeleton too. One in a folder in which sessions write, such
    as /bin, could be replaced there: what it leads to is mounted in its place."""
    return os.path.islink(path) and not (os.path.dirname(path) in WRITABLE and os.path.exists(path))


def _write_names(folder: str, names: dict[str, str]) -> None:
    """Write the files of a new /etc; those that are there, or are the machine's, stay."""
    for name, text in names.items():
        with contextlib.suppress(OSError), open(f"{folder}/{name}", "x", encoding="ascii") as file:
            file.write(text)


def _touch(path: str) -> None:
    """Create an empty file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _bind(path: str, root: str) -> None:
    """Make ``path`` of the machine visible below ``root``, where the skeleton has a place for it."""
    _refuse_moved(root + path, root)
    kernel.mount(path, root + path, flags=kernel.BIND | kernel.RECURSIVE)


def _refuse_moved(place: str, root: str) -> None:
    """Raise ``OSError`` where a part of ``place`` below ``root`` is missing or a link: a link that a session has left
    there would lead a mount to another place of the machine."""
    while place != root:
        mode = os.lstat(place).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(f"{place[len(root) :]} has become a link")
        place = os.path.dirname(place)


def probe_overlay(layers: Layers) -> None:
    """Check in a forked process that overlays work here, deleted folders included. Raises ``OSError`` if they do
    not."""
    layers.add_store("probe", 1 << 20)
    try:
        for layer in ("probe/0", "probe/1"):
            layers.add_layer(layer)
        os.mkdir(f"{layers.place}/probe/0/files{PROBED}")
        _check_overlay(layers)
    finally:
        layers.remove_store("probe")


def _check_overlay(layers: Layers) -> None:
    """Run the check of :func:`probe_overlay` in a child, and raise its error."""
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
    """Try, as the first process of a new namespace of processes, to enter two layers and to replace a folder."""
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
