"""The controller's side of the fork server: a process that has imported the heavy libraries, and from which parts of a
run are forked.

    controller ──"be this part", its lifeline, its log──▶ fork server ──fork──▶ part, a session of its own
               ◀──── its pid and a pidfd · later its exit code ────             │
               └── holds the pipe that keeps it alive ──────────────────────────┘

A new interpreter needs seconds of processor time to import torch and transformers, and hundreds of megabytes that it
shares with no other process. A fork needs milliseconds, and shares every page that neither process writes. A program
that makes several runs sequentially can use one server for all of them (:func:`keep_fork_server`).

Only the parent of a process receives its exit code, so the fork server reports the exit codes of its parts. The
alternative, that the controller adopts the parts (``PR_SET_CHILD_SUBREAPER``), would change a process of the user,
which would then have to reap all processes that parts leave behind. If the fork server dies, its parts continue, each
with its own lifeline. Their pidfds still show when they end, but not their exit codes. Later parts are started as new
interpreters, as without a fork server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import IO

import msgspec
import psutil

from headrace.base.environ import PROCESS_GONE, fork_server_environment
from headrace.launch.config import LaunchConfig

MODULE = "headrace.launch.hosts.forkserver"
"""The module that the fork server runs."""
EXIT_UNKNOWN = 256
"""The value in place of an unknown exit code. No process can end with this code."""
LOOK_S = 3.0
"""Seconds between two checks whether a fork server that does not answer is stopped."""
EXIT_CODE_WAIT_S = 1.0
"""Seconds to wait for the exit code of a part that has ended."""
MAX_BYTES = 1 << 16
"""Largest message to or from the fork server, in bytes."""
TITLE_BYTES = 400
"""Bytes reserved in the command line of the fork server. A forked part later writes its own title there."""
LOG_BYTES, LOG_LINES = 4000, 8
"""Bytes and lines at the end of a lost fork server's log that a warning quotes."""


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order from the controller to fork a part. Two file descriptors are sent with it: the part's end of its
    lifeline, a pipe whose closing ends the part, and its log."""

    call: int
    """The number of the order. The answer repeats it."""
    name: str
    """The name of the part."""
    directory: str
    """The directory with the part's briefing, the file that contains its settings."""
    environment: Mapping[str, str]
    """Environment variables of the part, in addition to the variables of the fork server."""


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an order that was carried out. One file descriptor is sent with it: a pidfd of the part, which
    becomes readable when the part ends."""

    call: int
    """The number of the order."""
    pid: int
    """The process id of the part."""


class ForkRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an order whose fork the operating system has refused."""

    call: int
    """The number of the order."""
    number: int
    """The error number (``errno``) of the operating system."""


class ForkExit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The report that a part has ended and was reaped."""

    pid: int
    """The process id of the part."""
    code: int
    """The exit code, negative for a signal."""


Report = ForkReply | ForkRefused | ForkExit
"""A message from the fork server."""


class ForkServerLost(Exception):
    """An order failed because the fork server has ended or does not answer."""


class ForkedProcess:
    """A forked part as the controller sees it. It is a child of the fork server, not of the controller: ``pidfd``
    becomes readable when the part ends, and the fork server reports the exit code."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Watch the process ``pid`` in the running event loop through its descriptor ``pidfd``. This object closes the
        descriptor when the process has ended."""
        loop = asyncio.get_running_loop()
        self.pid = pid
        self._pidfd = pidfd
        self._code: asyncio.Future[int] = loop.create_future()
        """The exit code, which is set when the process has ended."""
        loop.add_reader(pidfd, self._on_exit, loop)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; :data:`EXIT_UNKNOWN` if it could not be determined; ``None`` while the
        process runs."""
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        await asyncio.wait([self._code])  # awaiting the future itself would cancel it for other waiters
        return self._code.result()

    def record_exit(self, code: int) -> None:
        """Record that the process has ended with exit code ``code``, unless an exit code was recorded before."""
        if not self._code.done():
            self._code.set_result(code)
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _on_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait a moment for the fork server's report of the exit code, and record an unknown exit code if none arrives.
        This is called when the pidfd shows that the process has ended; the pidfd does not contain the exit code."""
        loop.remove_reader(self._pidfd)
        loop.call_later(EXIT_CODE_WAIT_S, self.record_exit, EXIT_UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCircumstances:
    """The state that a fork server inherits from the process that starts it, and that all its parts inherit."""

    parent: int
    """The process id of the controller. The command line of the fork server contains it."""
    program: list[str]
    """The first words of the command that starts the fork server."""
    environment: dict[str, str]
    """The environment variables of the fork server."""
    directory: tuple[int, int]
    """The device and the inode of the working directory, which are known even if the directory was removed."""

    @classmethod
    def current(cls) -> ForkCircumstances:
        """Return the current circumstances of this process."""
        here = os.stat(".")
        return cls(
            parent=os.getpid(),
            program=[sys.executable, "-m", MODULE],
            environment=fork_server_environment(),
            directory=(here.st_dev, here.st_ino),
        )


class ForkServer:
    """The fork server as the controller sees it. It is started before any event loop runs, so that it imports libraries
    while the controller prepares the run."""

    def __init__(self, timeout_s: float) -> None:
        """Start the fork server. ``timeout_s`` is the longest time to wait for its answer to an order, in seconds. Its
        first answer arrives after it has imported its libraries."""
        self.timeout_s = timeout_s
        self._circumstances = ForkCircumstances.current()
        """The state of this process that the fork server has inherited."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """``_control``: this end of the socket for orders and reports."""
        lifeline, self._lifeline = os.pipe()
        """``_lifeline``: this end of the pipe whose closing ends the fork server."""
        try:
            title = f"headrace-{os.getpid()}-".ljust(TITLE_BYTES, ".")
            self._process = subprocess.Popen(
                [*self._circumstances.program, str(server_end.fileno()), str(lifeline), title],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=(server_end.fileno(), lifeline),
                start_new_session=True, env=self._circumstances.environment,
            )  # fmt: skip
        except BaseException:
            self._release()
            raise
        finally:
            server_end.close()
            os.close(lifeline)
        self._control.setblocking(False)
        self.in_use = False
        """Whether a run forks its parts from this server. One server serves at most one run at a time."""
        self._call_numbers = count()
        self._pending: dict[int, asyncio.Future[ForkedProcess]] = {}
        """The future of the part that each unanswered order will fork, by the number of the order."""
        self._parts: dict[int, ForkedProcess] = {}
        """The parts that have not ended, by process id."""
        self._warn: Callable[[str], None] = lambda _: None
        """The function that receives warnings; it is set by :meth:`listening`."""
        self.lost = False
        """Whether the fork server has ended or does not answer, so that later parts must be new interpreters."""

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    def is_reusable(self) -> bool:
        """Return whether another run can use this server in place of a new one: no run uses it, and the program, the
        environment variables and the working directory are the same as when it was started."""
        return not self.in_use and self._circumstances == ForkCircumstances.current()

    def has_ended(self) -> bool:
        """Return whether the fork server has ended, or was abandoned because it did not answer."""
        return self.lost or self._process.poll() is not None

    @contextmanager
    def listening(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Receive the messages of the fork server in the running event loop, within this context. ``warn`` receives a
        text if the fork server is stopped or lost."""
        loop, self._warn = asyncio.get_running_loop(), warn
        if not self.lost:
            loop.add_reader(self._control, self._on_readable)
        try:
            yield
        finally:
            loop.remove_reader(self._control)
            for part in self._parts.values():
                part.record_exit(EXIT_UNKNOWN)  # no task waits for exit codes: the launcher has ended all parts before
            self._parts.clear()

    async def fork(
        self, name: str, directory: str, environment: Mapping[str, str], descriptors: tuple[int, int]
    ) -> ForkedProcess:
        """Order the fork server to fork the part ``name``, and return the process of the part. The part reads its
        briefing, the file with its settings, from ``directory``. ``environment`` are environment variables in addition
        to the variables of the fork server. ``descriptors`` are the part's end of its lifeline and its log; the caller
        closes them.

        Raises :class:`ForkServerLost` if the fork server has ended or does not answer in time, and ``OSError`` if the
        operating system refuses to fork.
        """
        call = next(self._call_numbers)
        order = ForkOrder(call=call, name=name, directory=directory, environment=environment)
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._pending[call] = answer
        try:
            with contextlib.suppress(ConnectionError, BlockingIOError, TimeoutError):
                socket.send_fds(self._control, [msgspec.json.encode(order)], descriptors)
                await self._wait_for_answer(answer)
            if not answer.done():
                self._mark_lost(silent=True)  # sets the error that the next line raises
            return answer.result()
        finally:
            del self._pending[call]

    async def _wait_for_answer(self, answer: asyncio.Future[ForkedProcess]) -> None:
        """Wait until ``answer`` is set. Warn once if the fork server is stopped in the meantime. Raises
        ``TimeoutError`` after the time limit."""
        has_warned = False
        async with asyncio.timeout(self.timeout_s):
            while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                if not has_warned and self._is_stopped():
                    has_warned = True
                    self._warn(
                        f"the fork server (pid {self.pid}) is stopped (SIGSTOP; kill -CONT {self.pid} lets it "
                        f"continue): nothing starts until then, or until {self.timeout_s:g} s have passed "
                        "(launch.start_timeout_s)"
                    )

    def _is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the fork server."""
        with contextlib.suppress(*PROCESS_GONE):
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def close(self) -> None:
        """End the fork server. Its parts continue until their lifelines are closed."""
        self._process.kill()
        self._process.wait()
        self._release()

    def _release(self) -> None:
        """Close the controller's ends of the socket, the lifeline and the log."""
        self._control.close()
        os.close(self._lifeline)
        self._log.close()

    def _on_readable(self) -> None:
        """Read and handle one message of the fork server: a forked part, a refusal, or the exit of a part. If the
        socket is closed instead, the fork server is lost."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._mark_lost()
            return
        report = msgspec.json.decode(data, type=Report)
        match report:
            case ForkReply(call=call, pid=pid):
                self._parts[pid] = part = ForkedProcess(pid, descriptors[0])
                if call in self._pending:  # otherwise the caller has closed its lifeline, and the part ends
                    self._pending[call].set_result(part)
            case ForkRefused(call=call, number=number):
                if call in self._pending:
                    self._pending[call].set_exception(OSError(number, os.strerror(number)))
            case ForkExit(pid=pid, code=code):
                if (ended := self._parts.pop(pid, None)) is not None:
                    ended.record_exit(code)

    def _mark_lost(self, *, silent: bool = False) -> None:
        """Record that the fork server has ended or, if ``silent``, has not answered in time; warn about it; and make
        every pending order fail with :class:`ForkServerLost`."""
        if not self.lost:
            self.lost = True
            asyncio.get_running_loop().remove_reader(self._control)
            self._warn(self._end_lost_server(silent=silent))
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ForkServerLost())

    def _end_lost_server(self, *, silent: bool) -> str:
        """Kill the process of the fork server, and return a warning with the way in which it ended, or with the fact
        that it was ``silent``, and with the last lines of its log."""
        is_stopped = self._is_stopped()
        self._process.kill()  # a silent process is still running
        code = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
        output = self._log.read().decode("utf-8", "replace").strip()
        if silent:
            ending = f"{'is stopped' if is_stopped else 'has not answered'}, and was killed after {self.timeout_s:g} s"
        else:
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = "".join(f"\n    {line}" for line in output.splitlines()[-LOG_LINES:])
        return f"the fork server (pid {self.pid}) {ending}: its parts live on, later ones are new interpreters{lines}"


@contextmanager
def open_fork_server(launch: LaunchConfig) -> Iterator[ForkServer | None]:
    """Start a fork server if parts run on this machine (``launch``) and the system supports it (Linux 5.3 or later),
    and yield it; otherwise yield ``None``. The server ends with this context, unless :func:`keep_fork_server` keeps
    it."""
    if launch.remote or not _can_fork():
        yield None
        return
    try:
        server = _get_kept_server(launch.start_timeout_s) or ForkServer(launch.start_timeout_s)
    except OSError:  # the starter will fail with the same error, and report it
        yield None
        return
    server.in_use = True
    try:
        yield server
    finally:
        server.in_use = False
        if server not in _kept:
            server.close()


_kept: list[ForkServer | None] = []
"""The fork server of each open context of :func:`keep_fork_server`, the innermost context last; ``None`` until a run
needs one."""


@contextmanager
def keep_fork_server() -> Iterator[None]:
    """Let all runs of this process within this context fork their parts from one server. The libraries are then
    imported once, for the first run, and not once per run. The server ends with the context.

    A run has its own server if another run is using the kept server, or if the kept server was started with other
    environment variables or in another working directory.
    """
    index = len(_kept)
    _kept.append(None)
    try:
        yield
    finally:
        if (server := _kept.pop(index)) is not None:
            server.close()


def _get_kept_server(timeout_s: float) -> ForkServer | None:
    """Return the kept fork server of the innermost context of :func:`keep_fork_server`; start it first if there is none
    yet or it has died. Return ``None`` without such a context, or if the server does not fit. ``timeout_s`` is the
    longest time to wait for an answer, in seconds."""
    if not _kept:
        return None
    server = _kept[-1]
    if server is not None and server.has_ended():
        _kept[-1] = None
        server.close()
        server = None
    if server is None:
        server = _kept[-1] = ForkServer(timeout_s)
    if not server.is_reusable():
        return None
    server.timeout_s = timeout_s
    return server


def _can_fork() -> bool:
    """Return whether this system can watch forked processes through pidfds."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):  # an old kernel, or a container that forbids it
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False
