"""The host process of the local sandboxes. It forks a supervisor for each session and mounts the files of all sessions.
It uses only the standard library, so that it starts in milliseconds: ``python -I -S -B host.py CONTROL ORDER``.

    client ── CONTROL: start, drop, kill ── host ── supervisor ── first process ── commands
           ══ a channel for each session ══════════╝

The client is the process with the driver (driver.py). It has one end of ``CONTROL`` and of every channel. When it dies,
the kernel closes them: every supervisor ends its session, the host ends, and the files vanish, because only these
processes have them mounted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import jail, kernel, processes, user_namespace
    from headrace.wings.sandboxes.local import frames, init, loopback, root, supervisor
else:  # imports only from these two folders, to start in milliseconds
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), json.loads(sys.argv[2])["sandbox"]]
    import frames
    import init
    import jail
    import kernel
    import loopback
    import processes
    import root
    import supervisor
    import user_namespace

HERE = os.path.dirname(os.path.abspath(__file__))
FIRST_USER, USERS = 40_000, 20_000
"""The user ids of sessions on a host that is root, as first id and count; no person has such an id."""
NUMBERS = 4096
"""The limit of processes for each user, where the kernel also bounds the processes of each session."""
Order = dict[str, Any]


class SandboxHost:
    """The host process of all sessions of one client: its files, its supervisors, and the guards that this machine
    lacks."""

    def __init__(self, order: Order, control: socket.socket) -> None:
        """Prepare to host sessions for the client at the other end of ``control``. ``order`` contains the settings that
        all sessions share."""
        self._order = order
        self._control = control
        self._bwrap: str = order["bwrap"]
        """The path of bubblewrap if it makes the sandboxes; empty if this program makes them."""
        self.missing: dict[str, str] = {}
        """The guards that the kernel refuses, each with the reason."""
        self._layers: root.Layers | None = None
        """The files of all sessions; ``None`` before :meth:`prepare`."""
        self._running: dict[int, tuple[str, int]] = {}
        """The running sessions, as session name and supervisor process id by process file descriptor."""
        self._poll = select.poll()
        """Waits for messages of the client and for the end of supervisors."""

    def prepare(self) -> None:
        """Test which guards the kernel offers, and mount the files. Raises ``OSError`` if sessions are impossible
        here."""
        if os.getuid() != 0 or not processes.succeeds(_use_rights):
            self.missing["user"] = "only root with all rights can start a process as another user"
            # root without rights changes its user id, because sessions must not run as root
            user_namespace.enter(FIRST_USER if os.getuid() == 0 else None)
        self._layers = root.Layers(self._order["readable"])
        if self._bwrap:
            self._layers.show_machine({"local": HERE, "sandbox": self._order["sandbox"]})
            self._try_bubblewrap()
            return
        for name, flags in (("network", kernel.NEW_NET), ("ipc", kernel.NEW_IPC)):
            if not processes.succeeds(partial(kernel.unshare, flags)):
                self.missing[name] = "the kernel refuses such a namespace"
        jail.guard(self.missing, "overlay", partial(root.probe_overlay, self._layers))
        self._layers.overlays = "overlay" not in self.missing

    @property
    def fixed(self) -> list[str]:
        """The folders that every session has from the start and cannot change."""
        assert self._layers is not None
        return self._layers.fixed

    def serve(self) -> None:
        """Carry out the client's messages, and reap supervisors, until the client closes its end of the control
        socket."""
        self._poll.register(self._control.fileno(), select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._control.fileno():
                    self._reap(descriptor)
                elif not self._carry_out_message():
                    return

    def _reap(self, descriptor: int) -> None:
        """Reap the supervisor with the process file descriptor ``descriptor``, which has ended."""
        _, pid = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.waitpid(pid, 0)

    def _carry_out_message(self) -> bool:
        """Carry out one message of the client. Return ``False`` if the client has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._control, init.MESSAGE_BYTES, 2)
        if not data:
            return False
        message = json.loads(data)
        if message["do"] == "start":
            if (
                len(descriptors) < 2
            ):  # this process has too many open files: the client's ends of the sockets are closed
                for descriptor in descriptors:
                    os.close(descriptor)
                return True
            with socket.socket(fileno=descriptors[0]) as channel, contextlib.ExitStack() as opened:
                channel.set_inheritable(False)
                os.set_inheritable(descriptors[1], False)
                opened.callback(os.close, descriptors[1])
                self._start({**message, "way": descriptors[1]}, channel)
        elif message["do"] == "kill":
            for descriptor, (name, _) in self._running.items():
                if name == message["session"]:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        elif self._layers is not None:
            with contextlib.suppress(OSError):  # the files then stay until this process ends
                self._layers.remove_store(message["store"])
        return True

    def _start(self, order: Order, channel: socket.socket) -> None:
        """Fork the supervisor of a session that ``order`` describes. If the session cannot start, the client receives
        the reason through the channel."""
        try:
            if self._layers is not None:
                self._add_files(self._layers, order)
        except OSError as error:
            channel.sendall(frames.pack_frame({"error": f"its files cannot be prepared: {error}"}))
            return
        try:
            pid = os.fork()
        except OSError as error:
            channel.sendall(frames.pack_frame({"error": f"no process can be started for it: {error}"}))
            return
        if pid:
            self._watch(order["session"], pid)
            return
        try:
            with contextlib.suppress(OSError):
                kernel.die_with_parent()
            self._control.close()
            self._supervise({**order, "missing": dict(self.missing)}, channel)
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            with contextlib.suppress(OSError):
                channel.sendall(frames.pack_frame({"error": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(0)

    def _watch(self, name: str, pid: int) -> None:
        """Register the supervisor ``pid`` of the session ``name``. Kill it if this process cannot open another file
        descriptor."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        self._running[descriptor] = (name, pid)
        self._poll.register(descriptor, select.POLLIN)

    def _add_files(self, layers: root.Layers, order: Order) -> None:
        """Make the new layer of a session, and for its first layer also its store."""
        store, _, number = order["layers"][-1].partition("/")
        if number == "0":
            layers.add_store(store, order["limits"]["disk_bytes"])
        layers.add_layer(order["layers"][-1], bare=bool(self._bwrap))

    def _supervise(self, order: Order, channel: socket.socket) -> None:
        """Supervise the session that ``order`` describes, for the client at the other end of ``channel``, until it
        ends; this runs in the forked supervisor process."""
        order["user"] = order["user"] or (FIRST_USER + os.getpid() % USERS if os.getuid() == 0 else os.getuid())
        session = supervisor.SessionSupervisor({**order, "programs_before": 1 if self._bwrap else 0}, channel)
        if self._bwrap:
            session.start(partial(self._become_bubblewrap, order))
            limits = {
                **order["limits"],
                "processes": 2 * order["limits"]["processes"],
            }  # the supervisor enforces the real limit first
            more = {name: order[name] for name in ("missing", "user", "loopback", "ports")}
            session.introduce({"limits": limits, **more})
        else:
            if order["loopback"] and "network" in self.missing:
                raise OSError(f"a loopback network needs a namespace of its own: {self.missing['network']}")
            for name, flags in (("network", kernel.NEW_NET), ("ipc", kernel.NEW_IPC)):
                if name not in self.missing:
                    kernel.unshare(flags)
            kernel.unshare(kernel.NEW_PIDS)
            session.start(partial(self._be_init, order))
        session.supervise()

    def _be_init(self, order: Order, control: socket.socket) -> None:
        """Run as the first process of the session that ``order`` describes, whose sandbox this program makes.
        ``control`` leads to the supervisor."""
        assert self._layers is not None
        os.setsid()
        _silence()
        processes.raise_priority()
        if not self._layers.overlays and order["user"] != os.getuid():
            self._layers.give(order["layers"][-1], order["user"])
        self._layers.enter(order["layers"], init.make_name_files(order["user"]))
        kernel.hide_memory()
        limits = dict(order["limits"])
        missing = dict(self.missing)
        if _limit_processes(limits["processes"]):
            limits["processes"] = NUMBERS  # RLIMIT_NPROC counts the processes of all sessions of one user
        elif os.getuid() != 0 or len(order["layers"]) > 1:
            missing["process numbers"] = "sessions of one user share one bound: it needs Linux 6.14"
        if order["loopback"]:
            loopback.bring_up()
            loopback.send_listeners(order["ports"], order["way"])
        isolation = {"limits": limits, "missing": missing, "loopback": order["loopback"]}
        first = init.Init(control, jail.Jail(isolation, order["user"]))
        first.tell({"ready": True, "missing": missing, "user": order["user"]})
        first.serve()

    def _become_bubblewrap(self, order: Order, control: socket.socket) -> None:
        """Replace this process by bubblewrap, which runs as a user other than root and starts ``init.py`` as the first
        process of its sandbox."""
        os.setsid()
        _silence()
        assert self._layers is not None
        files = self._layers.files(order["layers"][-1])
        if order["user"] != os.getuid():
            os.chown(files, order["user"], order["user"])
            _become(order["user"])
        control.set_inheritable(True)
        os.set_inheritable(order["way"], True)
        names = {name: _make_memory_file(text) for name, text in init.make_name_files(order["user"]).items()}
        words = [*self._bubblewrap(["--bind", files, "/"], names), f"{root.PROGRAM}/local/init.py"]
        os.execve(words[0], [*words, str(control.fileno()), str(order["way"])], {})

    def _bubblewrap(self, files: list[str], names: dict[str, int]) -> list[str]:
        """Return the command line with which bubblewrap makes a sandbox and starts this Python in it. ``files`` are the
        arguments that mount the root folder, and ``names`` the file descriptors of files in /etc."""
        assert self._layers is not None
        spaces = ["user", "ipc", "pid", "net", "uts", "cgroup-try"]
        words = [self._bwrap, *(f"--unshare-{space}" for space in spaces), "--die-with-parent", "--as-pid-1"]
        words += ["--cap-drop", "ALL", *files]
        words += ["--perms", "1777", "--dir", "/tmp", *self._layers.bubblewrap_words(names)]
        return [*words, "--chdir", "/", self._order["python"], "-I", "-S", "-B"]

    def _try_bubblewrap(self) -> None:
        """Start bubblewrap once. Raises ``OSError`` with its error output if it cannot make a sandbox here."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.dup2(write_end, 2)
                if os.getuid() == 0:
                    _become(FIRST_USER)
                words = self._bubblewrap(["--tmpfs", "/"], {})
                os.execve(words[0], [*words, "-c", ""], {})
            except OSError as error:
                os.write(2, str(error).encode())
            finally:
                os._exit(1)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as report:
            text = report.read().decode("utf-8", "replace")
        if os.waitpid(pid, 0)[1]:
            raise OSError(f"bubblewrap cannot make a sandbox here: {text.strip()[-300:]}")


def _become(user: int) -> None:
    """Change to the user and group id ``user``; root cannot be regained."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _use_rights() -> None:
    """Do what root does for a session: mount, and change to another user. Raises ``OSError`` if root may not do so, as
    in some containers. Run this in a child process."""
    jail.enter_mount_namespace()
    _become(FIRST_USER)


def _make_memory_file(text: str) -> int:
    """Return the descriptor of an anonymous file with the content ``text``, which child processes inherit."""
    descriptor = os.memfd_create("file", 0)
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _silence() -> None:
    """Redirect the standard streams of this process to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _limit_processes(limit: int) -> bool:
    """Limit the number of processes in this namespace to ``limit``, and return whether the kernel has accepted the
    limit."""
    before = _pid_max()
    processes.limit_process_ids(limit)
    return _pid_max() != before


def _pid_max() -> str:
    """Return the kernel's largest process id in this namespace; empty if it cannot be read."""
    try:
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def _try_lock(order: Order) -> dict[str, str]:
    """Return the guards of commands that the kernel refuses, each with the reason; a forked process tries them."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        isolation = jail.Jail({"limits": order["limits"], "missing": {}}, os.getuid())
        isolation.lock()
        os.write(write_end, json.dumps(isolation.missing).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as report:
        missing: dict[str, str] = json.loads(report.read() or b"{}")
    return missing


def main(control: socket.socket, order: Order) -> None:
    """Host sessions with the settings ``order`` until the client closes ``control``. The first message to the client
    contains the missing guards, or the error if sessions are impossible."""
    os.umask(0o022)
    control.set_inheritable(False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each session needs one; commands have their own limits
    host = SandboxHost(order, control)
    try:
        host.missing.update(_try_lock(order))
        host.prepare()
    except OSError as error:
        control.send(json.dumps({"error": error.strerror or str(error)}).encode())
        return
    control.send(json.dumps({"missing": host.missing, "fixed": host.fixed}).encode())
    host.serve()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
