"""Parts that are forked from one process which has imported the heavy libraries once, and done nothing else.

    controller ──"be this part", its lifeline, its log──▶ fork server ──fork──▶ part, a session of its own
               ◀──── its pid and a pidfd · later its exit code ────             │
               └── holds the pipe that keeps it alive ──────────────────────────┘

A new interpreter spends seconds of processor time on importing torch and transformers, and hundreds of megabytes that
nobody shares; a fork spends milliseconds, and shares every page that neither side writes.

The fork server reaps its parts and tells their exit codes, for a parent alone is told those. It could hand them over to
the controller instead (as the reaper of orphans, ``PR_SET_CHILD_SUBREAPER``), but that would change a user's process,
which would have to reap whatever parts leave behind. When the fork server dies the parts live on, each by its own pipe:
their pidfds tell when they end, though nobody can say how; later parts are new interpreters, as they are where there is
no fork server.
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
from itertools import count
from typing import IO

import msgspec

from headrace.base.environ import fork_server_environment
from headrace.launch.config import LaunchConfig

MODULE = "headrace.launch.hosts.forkserver"
UNTOLD = 256
"""In place of an exit code that nobody could tell; no process ends with it."""
TELL_S = 1.0
"""How long after the end of a part its exit code may come."""
MAX_BYTES = 1 << 16
"""Of one message."""
TITLE_ROOM = 400
"""Bytes of the command line in which a part says what it is."""
LOG_BYTES, LOG_LINES = 4000, 8
"""So much of what a fork server said last is told when it is lost."""


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """To the fork server, with two descriptors: the part's end of its lifeline, and its log."""

    call: int
    name: str
    directory: str
    """Where its briefing is."""
    environment: Mapping[str, str]
    """What it has beyond the environment of the fork server."""


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server, with one descriptor: a pidfd of the part."""

    call: int
    pid: int


class Unforked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The system has refused."""

    call: int
    number: int
    """errno."""


class ForkExit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part has ended, and what it left was reaped."""

    pid: int
    code: int
    """Its exit code, negative for a signal."""


Report = ForkReply | Unforked | ForkExit


class ForkServerLost(Exception):
    """There is no fork server any more, or it does not answer."""


class ForkedProcess:
    """A part that was forked; see :class:`~headrace.launch.here.Running`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self._pidfd = pidfd
        self._code: asyncio.Future[int] = loop.create_future()
        loop.add_reader(pidfd, self._gone, loop)

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        await asyncio.wait([self._code])  # unlike awaiting it, this cancels it for nobody
        return self._code.result()

    def ended(self, code: int) -> None:
        """It has ended so."""
        if not self._code.done():
            self._code.set_result(code)
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _gone(self, loop: asyncio.AbstractEventLoop) -> None:
        """The kernel says that it has ended; how, only the fork server can say."""
        loop.remove_reader(self._pidfd)
        loop.call_later(TELL_S, self.ended, UNTOLD)


class ForkServer:
    """The controller's end. Made before any loop runs, so that it imports while the controller prepares the run."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: longest wait until it has imported, and forks."""
        self._patience_s = patience_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_program(), str(theirs.fileno()), str(lifeline), f"headrace-{os.getpid()}-".ljust(TITLE_ROOM, ".")],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True, env=fork_server_environment(),
            )  # fmt: skip
        except BaseException:
            self._let_go()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._control.setblocking(False)
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._parts: dict[int, ForkedProcess] = {}
        self._tell: Callable[[str], None] = lambda _: None
        self.lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def attended(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Within this the running loop hears what the fork server says; ``tell`` is told when it is lost."""
        loop, self._tell = asyncio.get_running_loop(), tell
        if not self.lost:
            loop.add_reader(self._control, self._hear)
        try:
            yield
        finally:
            loop.remove_reader(self._control)
            for part in self._parts.values():
                part.ended(UNTOLD)  # none is left where all were ended
            self._parts.clear()

    async def fork(
        self, name: str, directory: str, environment: Mapping[str, str], ends: tuple[int, int]
    ) -> ForkedProcess:
        """A part that reads its briefing; ``ends``: its end of the lifeline, and its log, which are the caller's to
        close.

        Raises :class:`ForkServerLost`, and ``OSError`` where the system refuses.
        """
        call = next(self._numbers)
        asked = ForkOrder(call=call, name=name, directory=directory, environment=environment)
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked[call] = answer
        try:
            with contextlib.suppress(ConnectionError, BlockingIOError):
                socket.send_fds(self._control, [msgspec.json.encode(asked)], ends)
                await asyncio.wait([answer], timeout=self._patience_s)
            if not answer.done():
                self._lose()
            return answer.result()
        finally:
            del self._asked[call]

    def close(self) -> None:
        """End it; its parts are ended by whoever holds their lifelines."""
        self._process.kill()
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        self._control.close()
        os.close(self._lifeline)
        self._log.close()

    def _hear(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._lose()
            return
        report = msgspec.json.decode(data, type=Report)
        match report:
            case ForkReply(call=call, pid=pid):
                self._parts[pid] = part = ForkedProcess(pid, descriptors[0])
                if call in self._asked:  # else its lifeline was closed, and it ends
                    self._asked[call].set_result(part)
            case Unforked(call=call, number=number):
                if call in self._asked:
                    self._asked[call].set_exception(OSError(number, os.strerror(number)))
            case ForkExit(pid=pid, code=code):
                if (ended := self._parts.pop(pid, None)) is not None:
                    ended.ended(code)

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            asyncio.get_running_loop().remove_reader(self._control)
            self._tell(self._ending())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ForkServerLost())

    def _ending(self) -> str:
        self._process.kill()  # it may hang
        code = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
        said = self._log.read().decode("utf-8", "replace").strip()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = "".join(f"\n    {line}" for line in said.splitlines()[-LOG_LINES:])
        return f"the fork server (pid {self.pid}) {how}: its parts live on, later ones are new interpreters{lines}"


@contextmanager
def forking(launch: LaunchConfig) -> Iterator[ForkServer | None]:
    """A fork server, where parts run on this machine and it has what that needs: Linux, from 5.3 on."""
    if launch.remote or not _can_fork():
        yield None
        return
    try:
        server = ForkServer(launch.start_timeout_s)
    except OSError:  # who starts the parts will hear the same, and says it
        yield None
        return
    try:
        yield server
    finally:
        server.close()


def _can_fork() -> bool:
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):  # an old kernel, or a container that forbids it
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


def _program() -> list[str]:
    return [sys.executable, "-m", MODULE]
