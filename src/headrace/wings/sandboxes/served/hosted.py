"""What the drivers of sandbox services have in common: sessions that are machines of a provider.

    HostedDriver ── create, keep, remove ── the service's client
         │ HostedSession ══ HostedChannel ══ launcher ── server.sh

A launcher starts the server: where the machine allows it, as the first process of a process space of its own, so that
no command can end it, and without the rights of root. The service ends each machine when the session's time is over;
machines and snapshots carry the name of their owner, and the next driver removes what belongs to processes that died.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

from headrace.base.clock import RealClock
from headrace.base.errors import EnvError, EpisodeError
from headrace.wings.sandboxes.base import (
    SandboxSpec,
)
from headrace.wings.sandboxes.served.containers import LINE_BYTES
from headrace.wings.sandboxes.served.keeping import KeepingDriver, KeptFiles, KeptSession
from headrace.wings.sandboxes.served.owners import LABEL
from headrace.wings.sandboxes.served.session import ServerChannel, server_program

T = TypeVar("T")
CALL_S = 120.0
"""The longest time of a call of a service."""
LATE_S = 2 * CALL_S
"""How long the creation of a machine that is no longer needed may take; then it can be ended."""
END_S = 20.0
"""How long the end of a machine is waited for. One that is not confirmed by then ends at its time."""
MOST_GREETINGS = 100
"""How many lines may come before the launcher's."""
_LAUNCHER = """
program=$1 encoded=$2 lined=$3 rights=$4
shift 4
space=(unshare --pid --fork --mount-proc --kill-child) lock=(setpriv --bounding-set=-all --inh-caps=-all --no-new-privs)
said=headrace-launcher
"${space[@]}" true 2> /dev/null || { space=() && said+=' first-process'; }
[[ $rights ]] && lock=()
[[ $rights ]] || "${lock[@]}" true 2> /dev/null || { lock=() && said+=' rights'; }
echo "$said"
end='\\n'
[[ $lined ]] && end='\\n\\n'
lines='while part=$(dd bs=49152 count=1 status=none | base64 -w 0) && [[ $part ]]; do printf "%s'$end'" "$part"; done'
bytes='while read -r size; do head -c "$size" | base64 -d; done'
if [[ $encoded && $space ]]; then
  [[ $lined ]] && exec < <(eval "$bytes")
  "${space[@]}" "${lock[@]}" setsid --wait bash -c "$program" server "$@" | eval "$lines"
  exit
fi
[[ $encoded ]] && program="exec > >($lines)"$'\n'$program
[[ $lined ]] && program="exec < <($bytes)"$'\n'$program
exec "${space[@]}" "${lock[@]}" setsid --wait bash -c "$program" server "$@"
"""
"""A program of bash that says which guards it lacks, and becomes the server. What turns its output into lines of
base64, and such lines into its input, runs outside the server's process space, where no command can end it; where there
is none, in the server's session."""
_LACKS = {
    "first process": "the server is no first process here (unshare is refused): a `kill -1` ends the session",
    "rights": "commands keep the rights of their user here (setpriv is refused)",
}
"""What is said of a guard that a launcher lacks."""


def launcher_arguments(spec: SandboxSpec, *, encoded: bool, rights: bool, lined: bool = False) -> list[str]:
    """Return the arguments of ``bash`` that serve a session on a hosted machine. ``encoded`` sends the server's output
    as lines of base64, for clients that only pass text; with ``rights``, commands keep those of root. ``lined`` is for
    services that pass input as text, too, and output by way of a log, whose last bytes may wait for the next ones: the
    input comes as :func:`encoded_input` writes it, and each line of output is followed by an empty one."""
    numbers = (int(spec.life_s * 1e6), spec.limits.processes, spec.limits.memory_bytes)
    flags = ("1" if flag else "" for flag in (encoded, lined, rights))
    return ["-c", _LAUNCHER, "launcher", server_program(), *flags, *map(str, numbers)]


def is_of_launcher(line: bytes) -> bool:
    """Return whether a line is the first one of the launcher, and not what an image's profile says to its users."""
    return line.startswith(b"headrace-launcher")


def encoded_input(data: bytes) -> str:
    """Return the lines of text that a launcher with ``lined`` turns into these bytes.

    >>> encoded_input(b"hello")
    '9\\naGVsbG8=\\n'
    """
    text = base64.b64encode(data).decode() + "\n"
    return f"{len(text)}\n{text}"


class EncodedOutput:
    """The output of a launcher with ``encoded``: lines up to the launcher's own, then lines of base64."""

    def __init__(self) -> None:
        """Begin with nothing taken."""
        self._text = ""
        self._plain = True

    def take(self, text: str) -> list[bytes]:
        """Take the next text, and return the pieces that have come with it. A line that is no base64 is a piece as it
        is, for which no answer is taken; an empty one is none."""
        *lines, self._text = (self._text + text).split("\n")
        pieces = []
        for line in lines:
            pieces.append(_unencoded(line) if self._plain else _decoded(line))
            self._plain = self._plain and not is_of_launcher(line.encode("utf-8", "surrogateescape"))
        if len(self._text) > 2 * LINE_BYTES:  # no line of the server's
            pieces.append(_unencoded(self._text))
            self._text = ""
        return [piece for piece in pieces if piece]


def _unencoded(line: str) -> bytes:
    """Return a line as it is."""
    return line.encode("utf-8", "surrogateescape") + b"\n"


def _decoded(line: str) -> bytes:
    """Return the bytes that a line of base64 stands for; one that is none as it is."""
    with suppress(binascii.Error, ValueError):
        return base64.b64decode(line, validate=True)
    return _unencoded(line)


def whole_seconds(spec: SandboxSpec) -> int:
    """Return the time after which a service ends the machine of a session."""
    return max(1, math.ceil(spec.life_s))


def refuse_missing(kind: str) -> None:
    """Raise :class:`~headrace.base.errors.EnvError` if the client package of a kind, of the same name, is missing."""
    if find_spec(kind) is None:
        raise EnvError(
            f"sandboxes of kind {kind!r} need the package {kind!r}, which is not installed",
            remedy=f"pip install 'headrace[{kind}]'",
        )


def words_of(error: BaseException) -> str:
    """Return the words of a client's error, in one line and not without end."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


class HostedChannel(ServerChannel):
    """The standard streams of a launcher, read piece by piece."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self.lacks: dict[str, str] = {}
        """The guards that the launcher lacks, each with the cause; known after the first line."""
        self._said = False
        self._over = False
        self._read = bytearray()

    @abstractmethod
    async def piece(self) -> bytes:
        """Return the next bytes of the server; empty at the end of the stream."""

    @abstractmethod
    async def close(self) -> None:
        """End the machine; an error is swallowed, since the service ends it at its time."""

    async def kill(self) -> None:
        """End the machine."""
        await self.close()

    async def line(self) -> bytes:
        """Return the next line of the server."""
        if not self._said:
            self._said = True
            said = b""
            for _ in range(MOST_GREETINGS):
                if is_of_launcher(said := await self._line()):
                    break
            self.lacks = {name: why for name, why in _LACKS.items() if name.replace(" ", "-").encode() in said.split()}
        return await self._line()

    async def exactly(self, size: int) -> bytes:
        """Return the next bytes of the server."""
        while len(self._read) < size:
            if not (more := await self._more()):
                raise EOFError("the server has gone")
            self._read += more
        return self._taken(size)

    async def _line(self) -> bytes:
        """Return the next line, or what there is of one at the end. Raises ``ValueError`` for a line without end."""
        start = 0
        while (end := self._read.find(b"\n", start)) < 0:
            start = len(self._read)
            if start > LINE_BYTES:
                raise ValueError("a line has no end")
            if not (more := await self._more()):
                return self._taken(start)
            self._read += more
        return self._taken(end + 1)

    async def _more(self) -> bytes:
        """Return the next bytes of the server; empty at the end of the stream, and ever after."""
        more = b"" if self._over else await self.piece()
        self._over = not more
        return more

    def _taken(self, size: int) -> bytes:
        """Take the first bytes of what was read."""
        data = bytes(self._read[:size])
        del self._read[:size]
        return data


class HostedSession(KeptSession):
    """A session on a machine of a service."""

    async def join(self, channel: HostedChannel, missing: Mapping[str, str], begun_s: float) -> None:
        """Attach the server of a machine whose time began at ``begun_s``, or soon after it."""
        await self.attach(channel)
        self.missing = {**missing, **channel.lacks}
        self._until_s = begun_s + self.spec.life_s

    async def give_up(self, reason: str) -> None:
        """End the session at once; what the client says of the end is part of the reason."""
        if not self.ended and self._channel is not None and (words := await self._channel.last_words()):
            reason = f"{reason} ({words})"
        await super().give_up(reason)


class HostedDriver(KeepingDriver):
    """Sessions on machines of a service. Drivers of services define what is abstract here."""

    def __init__(self, kind: str, image: str, missing: Mapping[str, str]) -> None:
        """Describe a driver whose sessions begin as ``image`` unless their spec names one."""
        super().__init__(kind, image, missing)
        self._tasks = asyncio.TaskGroup()

    @abstractmethod
    async def create(self, session: HostedSession, origin: str) -> HostedChannel:
        """Make a machine of an image, or of the snapshot ``session.below``, and start the launcher on it. Raises
        :class:`~headrace.base.errors.HeadraceError` without leaving a machine."""

    @abstractmethod
    async def sweep(self) -> None:
        """Remove machines and snapshots whose owner has died. Raises :class:`~headrace.base.errors.EnvError` if the
        service is not reached, or refuses the key."""

    async def opened(self) -> None:
        """Reach the service, and remove what dead owners have left."""
        await self._tasks.__aenter__()
        try:
            async with asyncio.timeout(CALL_S):
                await self.sweep()
        except TimeoutError:
            await self._tasks.__aexit__(None, None, None)
            raise EnvError(
                f"the service of sandboxes of kind {self.kind!r} does not answer within {CALL_S:g} s",
                remedy="look at the network of this machine",
            ) from None
        except BaseException:
            await self._tasks.__aexit__(None, None, None)
            raise

    async def close(self) -> None:
        """End all machines, and have all snapshots removed."""
        await super().close()
        await self._tasks.__aexit__(None, None, None)

    async def keep_files(self, session: KeptSession) -> KeptFiles:
        """Return the present files of a session as the service keeps them."""
        try:
            async with asyncio.timeout(CALL_S):
                return await super().keep_files(session)
        except TimeoutError:
            raise _late("session_snapshot") from None

    def watch(self, call: Coroutine[Any, Any, None]) -> Callable[[], object]:
        """Have a call that raises nothing run beside the sessions, and return what cancels it; :meth:`close` waits for
        its end."""
        return self._tasks.create_task(call).cancel

    def tags(self, session: HostedSession) -> dict[str, str]:
        """Return what the machine of a session carries."""
        return {"headrace": "session", LABEL: self.owner, "headrace.session": session.name}

    async def begin(self, spec: SandboxSpec, origin: str, *, below: str) -> HostedSession:
        """Make a machine, and wait until its server is ready."""
        session = self.enter(HostedSession(self, spec, self.next_name(), below))
        begun_s = RealClock().now()
        making = self._tasks.create_task(_outcome(self.create(session, origin)))
        try:
            async with asyncio.timeout(CALL_S):
                channel = await asyncio.shield(making)
        except BaseException as error:
            # the service may make the machine all the same: it is ended as soon as it is there
            self._tasks.create_task(_end_made(making))
            await session.give_up("its start was cut off")
            if isinstance(error, TimeoutError):
                raise _late("session_start") from None
            raise
        if isinstance(channel, Exception):
            await session.give_up("its machine did not start")
            raise channel
        await session.join(channel, self.missing, begun_s)
        return session


async def _outcome(call: Coroutine[Any, Any, T]) -> T | Exception:
    """Return what a call of a service returns, or the error that it raises."""
    try:
        async with asyncio.timeout(LATE_S):
            return await call
    except Exception as error:  # noqa: BLE001 - a boundary: the caller gets the error
        return error


def _late(reason: str) -> EpisodeError:
    """Return the error for a service that has not answered in time."""
    return EpisodeError(
        f"the service has not answered within {CALL_S:g} s",
        remedy="look at the network of this machine, and whether the service is up",
        reason=reason,
    )


async def _end_made(making: asyncio.Task[HostedChannel | Exception]) -> None:
    """End a machine that is no longer needed, as soon as it has been created."""
    made = await making
    if isinstance(made, HostedChannel):
        await made.kill()


async def quietly(call: Coroutine[Any, Any, Any]) -> None:
    """Wait for a call whose failure changes nothing, at most as long as an end may take."""
    with suppress(Exception):
        async with asyncio.timeout(END_S):
            await call
