"""The first process (init) inside a session: it starts commands and reaps processes. Standard library only.

    supervisor ── init ── command ── its child processes
      outside       │        └── restricted: user, limits, system calls
                    └── hidden from the commands; when it ends, the kernel ends all processes of the session

The host forks it for the kind ``jail``. For bubblewrap it is a program, ``python -I -S -B init.py CONTROL LISTENERS``,
which bubblewrap starts in its sandbox. Both arguments are inherited file descriptors of sockets: ``CONTROL`` leads to
the supervisor, and ``LISTENERS`` sends listening sockets to the client. Messages on ``CONTROL`` are JSON. The message
that starts a command has file descriptors: the first is a file that describes the command, the others are its streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import jail, kernel
    from headrace.wings.sandboxes.local import loopback
else:  # imports only from the folders of the two sandboxes, to start in milliseconds
    HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "sandbox")]
    import jail
    import kernel
    import loopback

MESSAGE_BYTES = 1 << 16
"""The maximum length of a supervisor's message in bytes."""
STATE_FD = 99
"""The file descriptor of the state pipe, to which a shell writes its directory and its variables when it ends."""
ROUNDS, ROUND_S = 2000, 0.003
"""The largest number of rounds in which processes are killed, and the time between two rounds in seconds."""
MOST_NEW = 20
"""The number of rounds with new processes after which all processes of the session are killed at once."""
NOT_STARTED = 127
"""The exit code of a command that could not be executed, as shells define it."""


class Init:
    """The first process of a session. Its children are the session's commands, and orphans of theirs."""

    def __init__(self, control: socket.socket, isolation: jail.Jail) -> None:
        """Create the process object, which serves the supervisor at the other end of ``control``. ``isolation`` is
        applied to each command."""
        self._control = control
        self._isolation = isolation
        self._command = 0
        """The process id of the running command; 0 if there is none."""
        self._before: set[int] = set()
        """The process ids of the session at the start of the last command."""

    def serve(self) -> None:
        """Start commands and reap processes until the supervisor closes its end of the socket."""
        ended, wake = os.pipe()
        for descriptor in (ended, wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal would not wake the loop
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        for watched in (self._control.fileno(), ended):
            poll.register(watched, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(ended, 1 << 12)
                self._reap()
            if self._control.fileno() in ready and not self._carry_out_message():
                return

    def _carry_out_message(self) -> bool:
        """Carry out one message of the supervisor. Return ``False`` if the supervisor has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 8)
        if not data:
            return False
        for descriptor in descriptors:  # so that the command does not inherit it
            os.set_inheritable(descriptor, False)
        message = json.loads(data)
        if message["do"] == "count":
            self.tell({"processes": len(list_processes())})
            return True
        if message["do"] == "end":
            number = self._end(self._before if message["since"] else set())
            self.tell({"gone": number, "whose": message["whose"]})
            return True
        self._before = list_processes()
        body, *streams = descriptors
        self._command = self._begin(_read_message(body), streams)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _begin(self, message: dict[str, Any], descriptors: list[int]) -> int:
        """Start the command that ``message`` describes, whose input, output, error and state streams are
        ``descriptors``, and return its process id."""
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, descriptor in zip((0, 1, 2, STATE_FD), descriptors, strict=True):
                os.dup2(descriptor, target)
            self._isolation.order["limits"].update(message["limits"])
            self._isolation.lock()
            if self._isolation.missing:  # the host has tested this: an unrestricted command must never start
                raise OSError(0, f"the kernel refuses {', '.join(self._isolation.missing)}")
            enter_directory(message["cwd"])
            os.execve(message["argv"][0], message["argv"], message["env"])
        except OSError as error:
            os.write(2, f"{message['argv'][0]} cannot be started in {message['cwd']}: {error.strerror}\n".encode())
        finally:
            os._exit(NOT_STARTED)

    def _end(self, spared: set[int]) -> int:
        """Kill all processes except those in ``spared``, and return their number at the start. If new processes
        appear in more than :data:`MOST_NEW` rounds, kill the spared processes too."""
        number = len(list_processes() - spared)
        known_pids: set[int] = set()
        times_new = 0
        for _ in range(ROUNDS):
            left = list_processes() - spared
            if not left:
                break
            times_new += not left <= known_pids
            known_pids |= left
            if times_new > MOST_NEW:
                spared, left = set(), {-1}  # all at once: no process can fork away from it
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([], [], [], ROUND_S)
            self._reap()
        return number

    def _reap(self) -> None:
        """Reap all processes that have ended. If the command is among them, report its exit status to the
        supervisor."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._command:
                self._command = 0
                cpu_s = usage.ru_utime + usage.ru_stime
                self.tell({"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s})

    def tell(self, record: dict[str, Any]) -> None:
        """Send a record to the supervisor. An error is ignored, because a supervisor that has ended needs no record."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(record).encode())


def _read_message(descriptor: int) -> dict[str, Any]:
    """Return the message that the supervisor has written to the anonymous file ``descriptor``."""
    parts: list[bytes] = []
    while part := os.pread(descriptor, 1 << 20, sum(map(len, parts))):
        parts.append(part)
    message: dict[str, Any] = json.loads(b"".join(parts))
    return message


def enter_directory(path: str) -> None:
    """Change to the directory ``path``, or to its nearest parent that exists."""
    while True:
        try:
            os.chdir(path)
            return
        except OSError:
            if path in ("/", ""):
                raise
            path = os.path.dirname(path)


def make_name_files(user: int) -> dict[str, str]:
    """Return the files of /etc in which programs look up the name of the session's user and of 127.0.0.1, as content by
    name."""
    return {
        "passwd": f"agent:x:{user}:{user}::/tmp:/bin/bash\n",
        "group": f"agent:x:{user}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    }


def list_processes() -> set[int]:
    """Return the process ids of the session without its first process."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}


def main(descriptor: int, listeners: int) -> None:
    """Serve as the first process of a sandbox that another program has made. ``descriptor`` is the control socket, and
    ``listeners`` the socket that sends listening sockets to the client."""
    with contextlib.suppress(OSError):
        kernel.hide_memory()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    order = json.loads(control.recv(MESSAGE_BYTES))
    loopback.send_listeners(order["ports"], listeners)
    init = Init(control, jail.Jail(order, os.getuid()))
    init.tell({"ready": True, "missing": order["missing"], "user": order["user"]})
    init.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
