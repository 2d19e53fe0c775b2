"""The supervisor of one session: it starts the session's first process, passes commands to it, watches their limits
and ends them. Standard library only.

    client ══ frames ══ supervisor ══ messages and file descriptors ══ init ── commands
     closed channel:     reads outputs, counts processes and memory,
     session ends       ends processes that exceed a limit

The host process (host.py) forks one supervisor for each session. The session's file system is described in
:mod:`~headrace.wings.sandboxes.local.root`, its first process (init) in :mod:`~headrace.wings.sandboxes.local.init`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import kernel, processes
    from headrace.wings.sandboxes.local import frames
else:  # the host's program imports this as a top-level module
    import frames
    import kernel
    import processes

POLL_MS = 30
"""The interval in milliseconds at which the processes of a session are counted while there are any."""
IDLE_MS = 1000
"""The interval in milliseconds at which a session without processes checks its deadline."""
CHUNK_BYTES = 1 << 20
"""The largest number of bytes of one read or write, and the size of large pipes and of socket buffers."""
SMALL_BYTES = 1 << 16
"""The kernel's default size of a pipe in bytes; larger contents get a larger pipe."""
STATE_BYTES = 1 << 20
"""The largest number of bytes that are read from a shell's state pipe."""
SEND_S = 30
"""The timeout of sending a result to a client that does not read it, in seconds."""
Order = dict[str, Any]


class RunningCommand:
    """A running command, with the unwritten part of its input and the outputs that were read so far."""

    def __init__(self, order: Order, data: bytes, file: int) -> None:
        """Open the pipes of the command that ``order`` describes, whose standard input is ``data``. ``file`` is a file
        descriptor that replaces its stream ``order["file"]``, an input or an output; -1: no file."""
        self.order = order
        self.ended: frames.Record = {}
        """The record that says how the program ended; empty while it runs."""
        self.reason = ""
        """The limit for which the command is killed, as a value of ``Reason``; empty if it exceeded none."""
        self.until_s = now_s() + order["wall_s"]
        self._file = file
        """The file descriptor that replaces a stream of the command; -1 for none."""
        self._unsent = memoryview(data)
        """The part of the input that was not written yet."""
        self._input, *self._outputs = (os.pipe() for _ in range(4))
        self.output = {read_end: bytearray() for read_end, _ in self._outputs}
        """The bytes read from standard output, standard error and the state pipe, in this order, by file descriptor."""
        self.input = self._input[1]
        for large, (pipe, _) in ((len(data), self._input), (order["output_bytes"], self._outputs[0])):
            if large > SMALL_BYTES:
                with contextlib.suppress(OSError):  # the user's limit of pipe memory is exhausted
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        for descriptor in (self.input, *self.output):
            os.set_blocking(descriptor, False)

    def pass_ends(self, control: socket.socket, message: dict[str, Any], user: int) -> None:
        """Send through ``control`` the message that starts the command to the first process, with the command's ends of
        the pipes, which are then closed here. ``user`` becomes their owner, so that the command can open them by their
        names in /dev. The message is passed in an anonymous file, because a socket message is limited to a few hundred
        thousand bytes."""
        ends = [self._input[0], *(write_end for _, write_end in self._outputs)]
        for end in ends if user != os.getuid() else ():
            os.fchown(end, user, user)
        if self._file >= 0:
            stream = self.order["file"]
            os.close(ends[stream])
            ends[stream] = self._file
        body = os.memfd_create("command")
        with os.fdopen(body, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode())
        socket.send_fds(control, [json.dumps({"do": "run"}).encode()], [body, *ends])
        for end in (body, *ends):
            os.close(end)
        self.feed()

    def feed(self) -> None:
        """Write as much of the input as the pipe accepts. Close the pipe when all input is written or its reader has
        closed it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.input, self._unsent[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        os.close(self.input)
        self.input = -1

    def read(self, descriptor: int) -> bool:
        """Read the available bytes of the output with the file ``descriptor``. Return whether the pipe is still open.
        Output beyond the limit sets :attr:`reason`."""
        kept = self.output[descriptor]
        *_, state = self.output
        limit = STATE_BYTES if descriptor == state else self.order["output_bytes"]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, CHUNK_BYTES):
                left = limit - len(kept)
                kept += data[:left]
                if len(data) > left and descriptor != state:
                    self.reason = self.reason or "output"
                    return True
            return False
        return True

    def close(self) -> None:
        """Close this end of the pipes. Background processes cannot write to them any more."""
        for descriptor in (*self.output, *([self.input] if self.input >= 0 else [])):
            os.close(descriptor)


class SessionSupervisor:
    """The supervisor of one session, from the start of its first process to the end of its last process."""

    def __init__(self, order: Order, channel: socket.socket) -> None:
        """Create the supervisor of the session that ``order`` describes, for the client at the other end of
        ``channel``."""
        self.order = order
        self._channel = channel
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._descriptors = socket.socket(fileno=os.dup(order["way"]))
        """The socket through which the client sends and receives file descriptors."""
        self._received = bytearray()
        """Bytes from the client that are not a complete frame yet."""
        self._command: RunningCommand | None = None
        """The running command; ``None`` if there is none."""
        self._until_s = now_s() + order["life_s"]
        """Time at which the session's lifetime is over."""
        self._control, self._other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._init_pid = 0
        """Process id of the first process; 0 before its start."""
        self._poll = select.poll()
        """Waits for events of the client, the first process and the command."""
        self._checked_s = 0.0
        """Time of the last check of the limits."""
        self._ending = False
        """Whether the order to kill processes that exceed a limit was sent and not answered yet."""

    def start(self, begin: Callable[[socket.socket], None]) -> None:
        """Fork the first process of the session. It calls ``begin`` with its end of the control socket, and never
        returns from here."""
        self._init_pid = os.fork()
        if self._init_pid:
            self._other_end.close()
            return
        try:
            self._control.close()
            self._channel.close()
            with contextlib.suppress(OSError):
                kernel.die_with_parent()
            begin(self._other_end)
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            with contextlib.suppress(OSError):
                self._other_end.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)

    def introduce(self, order: Order) -> None:
        """Send ``order``, a part of the session's order, to a first process that was started by another program."""
        self._control.send(json.dumps(order).encode())

    def supervise(self) -> None:
        """Serve the client until it closes the channel, the lifetime is over, or the first process ends. Then end all
        processes of the session."""
        processes.raise_priority()
        init_fd = os.pidfd_open(self._init_pid)
        for descriptor in (init_fd, self._channel.fileno(), self._control.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        reason = ""
        try:
            while not reason:
                reason = self._handle_event(init_fd)
        finally:
            processes.kill_all(self._init_pid)
        self._send({"ended": reason})

    def _handle_event(self, init_fd: int) -> str:
        """Wait for one event or the next check of the limits, and handle it. ``init_fd`` is the process file descriptor
        of the first process, which is ready when that process has ended. Return why the session ends; empty if it
        continues."""
        ready = {descriptor for descriptor, _ in self._poll.poll(self._wait_ms())}
        if self._control.fileno() in ready:
            with contextlib.suppress(OSError):
                self._handle_record(json.loads(self._control.recv(CHUNK_BYTES) or b"{}"))
        if init_fd in ready:
            return "its first process has ended"
        if now_s() >= self._until_s:
            return "deadline"
        if self._channel.fileno() in ready and not self._carry_out_orders():
            return "stopped"
        if self._command is not None:
            self._move_bytes(self._command, ready)
        if now_s() >= self._checked_s + POLL_MS / 1000:
            self._end_excess()
            self._checked_s = now_s()
        return ""

    def _wait_ms(self) -> int:
        """Return the longest time to wait for an event before the next check of the limits, in milliseconds."""
        busy = self._command is not None or bool(self._command_pids())
        left_s = (self._until_s if self._command is None else min(self._until_s, self._command.until_s)) - now_s()
        return max(0, min(POLL_MS if busy else IDLE_MS, int(left_s * 1000) + 1))

    def _handle_record(self, record: frames.Record) -> None:
        """Handle a message of the first process: it is ready or could not start, the command has ended, or the
        processes that exceeded a limit were killed."""
        command = self._command
        if "status" in record:
            if command is not None:
                command.ended = record
                if not command.reason:
                    self._finish(command)
        elif record.get("whose") == "limit":
            self._ending = False
            if command is not None and command.ended:
                self._finish(command)
        elif record:
            self._send(record)

    def _carry_out_orders(self) -> bool:
        """Receive bytes from the client and carry out complete orders. Return ``False`` if the client has closed the
        channel."""
        try:
            data = self._channel.recv(CHUNK_BYTES)
        except OSError:
            return False
        self._received += data
        while (frame := frames.unpack_frame(self._received)) is not None:
            record, more = frame
            if record["do"] == "run":
                self._run(record, more)
            elif record["do"] == "end":
                self._tell_init({"do": "end", "since": False, "whose": "client"})
            else:
                self._tell_init({"do": "count"})
        return bool(data)

    def _run(self, order: Order, data: bytes) -> None:
        """Start a command. An archive is read from or written to a file of the client, whose descriptor arrives on the
        socket for descriptors; its bytes do not pass through this process."""
        file = socket.recv_fds(self._descriptors, 1, 1)[1][0] if "file" in order else -1
        self._command = command = RunningCommand(order, data, file)
        for descriptor in command.output:
            self._poll.register(descriptor, select.POLLIN)
        message = {name: order[name] for name in ("argv", "env", "cwd", "limits")}
        command.pass_ends(self._control, message, self.order["user"])
        if command.input >= 0:
            self._poll.register(command.input, select.POLLOUT)

    def _command_pids(self) -> list[int]:
        """Return the process ids of the session without its first process. The list is cut off one above the limit."""
        first = self.order["programs_before"]  # bubblewrap's own processes come before the commands
        found = islice(processes.descendants(self._init_pid), first + self.order["limits"]["processes"] + 1)
        return list(found)[first:]

    def _move_bytes(self, command: RunningCommand, ready: set[int]) -> None:
        """Move the bytes of the command's input and outputs, and kill the command at its deadline or at the limit of
        its output. ``ready`` are the file descriptors with an event."""
        if command.input in ready:
            fed = command.input
            command.feed()
            if command.input < 0:
                self._poll.unregister(fed)
        for descriptor in command.output.keys() & ready:
            if not command.read(descriptor):
                self._poll.unregister(descriptor)
        if not command.reason and now_s() >= command.until_s:
            command.reason = "wall_time"
        if command.reason:
            self._end(since=True)

    def _end_excess(self) -> None:
        """End all processes of the session if they exceed the limit of processes or memory together. The session
        continues with its files."""
        pids = self._command_pids()
        limits = self.order["limits"]
        reason = "processes" if len(pids) > limits["processes"] else ""
        resident = {pid: processes.resident_bytes(pid) for pid in pids}
        if not reason and sum(resident.values()) > limits["memory_bytes"]:
            resident = {pid: processes.proportional_bytes(pid, limit) for pid, limit in resident.items()}
            reason = "memory" if sum(resident.values()) > limits["memory_bytes"] else ""
        if reason:
            if self._command is not None:
                self._command.reason = self._command.reason or reason
            self._end(since=False)

    def _end(self, *, since: bool) -> None:
        """Let the first process kill all processes, or with ``since`` only processes that began with the present
        command."""
        if not self._ending:
            self._ending = True
            self._tell_init({"do": "end", "since": since, "whose": "limit"})

    def _tell_init(self, message: dict[str, Any]) -> None:
        """Send a message to the first process. An error is ignored: if that process has ended, the session ends too."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _finish(self, command: RunningCommand) -> None:
        """Send the client the result of a command that has ended, with the outputs that were read."""
        for descriptor in command.output:
            command.read(descriptor)
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
        if command.input >= 0:
            self._poll.unregister(command.input)
        command.close()
        self._command = None
        outputs = [bytes(kept) for kept in command.output.values()]
        record = {"result": command.ended, "reason": command.reason, "sizes": [len(output) for output in outputs]}
        self._send(record, b"".join(outputs))

    def _send(self, record: frames.Record, data: bytes = b"") -> None:
        """Send the client one frame with ``record``, a JSON object, and the bytes ``data`` that belong to it. An error
        is ignored, because a client that has closed the channel needs no frame."""
        with contextlib.suppress(OSError):
            self._channel.sendall(frames.pack_frame(record, data))


def now_s() -> float:
    """Return the time of the monotonic clock, in seconds."""
    return time.monotonic()  # noqa: TID251 - a program of its own, without the clock of headrace
