"""The base of drivers of sandbox services (Daytona, E2B, Modal): each session is a machine of the provider.

    HostedDriver ── create, keep, remove ── the service's client
         │ HostedSession ══ HostedChannel ══ launcher ── server.sh

The launcher is a program of bash that starts the server: if the machine allows it, as the first process of a new
process namespace, so that no command can kill it, and without the rights of root. The service ends each machine at the
end of the session's lifetime. Machines and snapshots are labelled with their owner's name (owners.py); the next driver
deletes what dead owners have left.
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
from headrace.wings.sandboxes.base import SandboxSpec
from headrace.wings.sandboxes.served.keeping import KeepingDriver, KeptFiles, KeptSession
from headrace.wings.sandboxes.served.owners import LABEL
from headrace.wings.sandboxes.served.session import LINE_BYTES, BufferedChannel, server_program

T = TypeVar("T")
CALL_S = 120.0
"""The longest time of one call of a service, in seconds."""
LATE_S = 2 * CALL_S
"""The longest time in seconds to wait for the creation of a machine that is no longer needed, in order to end it."""
END_S = 20.0
"""The longest time to wait for the end of a machine, in seconds. If it does not end by then, it ends at its
lifetime."""
MOST_GREETINGS = 100
"""The largest number of lines before the launcher's line, such as greetings of the image's shell profile."""
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
"""A program of bash that prints the guards it lacks, and then becomes the server. The loops that encode the
server's output as lines of base64, and decode its input, run outside the server's process namespace, where no command
can kill them; without such a namespace they run in the server's session."""
_LACKS = {
    "first process": "the server is no first process here (unshare is refused): a `kill -1` ends the session",
    "rights": "commands keep the rights of their user here (setpriv is refused)",
}
"""The message for each guard that a launcher may lack, by name."""


def make_launcher_arguments(spec: SandboxSpec, *, encoded: bool, rights: bool, lined: bool = False) -> list[str]:
    """Return the arguments of ``bash`` that run the launcher for a session on a provider's machine. ``encoded``: the
    server's output is sent as lines of base64, for clients that accept only text. ``rights``: commands keep the rights
    of root. ``lined``: the input is text as :func:`encode_input` writes it, and each output line is followed by an
    empty line, for services that return the output through a log, which may delay the last bytes. ``spec`` describes
    the session."""
    numbers = (int(spec.life_s * 1e6), spec.limits.processes, spec.limits.memory_bytes)
    flags = ("1" if flag else "" for flag in (encoded, lined, rights))
    return ["-c", _LAUNCHER, "launcher", server_program(), *flags, *map(str, numbers)]


def is_launcher_line(line: bytes) -> bool:
    """Return whether a line is the launcher's first line, and not a greeting of the image's shell profile."""
    return line.startswith(b"headrace-launcher")


def encode_input(data: bytes) -> str:
    """Return the lines of text that a launcher with ``lined`` decodes to ``data``."""
    text = base64.b64encode(data).decode() + "\n"
    return f"{len(text)}\n{text}"


class EncodedOutput:
    """A decoder for the output of a launcher with ``encoded``: plain lines up to the launcher's line, then lines of
    base64."""

    def __init__(self) -> None:
        """Create a decoder at the start of the output."""
        self._text = ""
        """Text whose line has not ended."""
        self._plain = True
        """Whether the launcher's line has not arrived, so that lines are plain."""

    def take(self, text: str) -> list[bytes]:
        """Decode the next text, and return the pieces of bytes that it completes; empty lines give none. A line that is
        not valid base64 is returned undecoded; the session does not accept it as an answer."""
        *lines, self._text = (self._text + text).split("\n")
        pieces = []
        for line in lines:
            pieces.append(_encode_line(line) if self._plain else _decode(line))
            self._plain = self._plain and not is_launcher_line(line.encode("utf-8", "surrogateescape"))
        if len(self._text) > 2 * LINE_BYTES:  # the server writes no line of this length
            pieces.append(_encode_line(self._text))
            self._text = ""
        return [piece for piece in pieces if piece]


def _encode_line(line: str) -> bytes:
    """Return the bytes of a line, with a line end, without decoding base64."""
    return line.encode("utf-8", "surrogateescape") + b"\n"


def _decode(line: str) -> bytes:
    """Return the decoded bytes of a line of base64; the bytes of the line itself if it is not base64."""
    with suppress(binascii.Error, ValueError):
        return base64.b64decode(line, validate=True)
    return _encode_line(line)


def round_up_lifetime(spec: SandboxSpec) -> int:
    """Return the lifetime of a session with the settings ``spec`` for the service, in whole seconds, rounded up."""
    return max(1, math.ceil(spec.life_s))


def refuse_missing(kind: str) -> None:
    """Raise :class:`~headrace.base.errors.EnvError` if the client package of the service is not installed; it is named
    like ``kind``."""
    if find_spec(kind) is None:
        raise EnvError(
            f"sandboxes of kind {kind!r} need the package {kind!r}, which is not installed",
            remedy=f"pip install 'headrace[{kind}]'",
        )


def describe_error(error: BaseException) -> str:
    """Return an error of a client as one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


class HostedChannel(BufferedChannel):
    """The channel to a launcher's standard streams."""

    def __init__(self) -> None:
        """Create a channel with an empty buffer."""
        super().__init__()
        self.lacks: dict[str, str] = {}
        """The guards that the launcher lacks, each with the reason; filled by the first call of :meth:`line`."""
        self._said = False
        """Whether the launcher's line was read."""
        self._ended = ""
        """The error with which the service's client reported the end; empty if there is none."""

    async def write(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server. Raises an error of the service's client if that fails. A subclass
        that overrides :meth:`send` needs no such method."""
        raise NotImplementedError(f"{type(self).__name__} has neither write nor send")

    @abstractmethod
    async def close(self) -> None:
        """End the machine. Errors are ignored, because the service ends the machine at its lifetime."""

    async def exit_reason(self) -> str:
        """Return the error with which the service's client reported that ``server.sh`` has ended; empty if there is
        none."""
        return self._ended

    async def send(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server."""
        try:
            await self.write(data)
        except Exception as error:  # the clients' errors have no common base class
            self._ended = self._ended or describe_error(error)
            raise OSError(f"input cannot be sent: {error}") from error

    async def line(self) -> bytes:
        """Return the next line of the server. The first call reads the launcher's line before it, into
        :attr:`lacks`."""
        if not self._said:
            self._said = True
            first_line = b""
            for _ in range(MOST_GREETINGS):
                if is_launcher_line(first_line := await super().line()):
                    break
            self.lacks = {
                name: why for name, why in _LACKS.items() if name.replace(" ", "-").encode() in first_line.split()
            }
        return await super().line()


class HostedSession(KeptSession):
    """A session on a machine of a service."""

    async def join(self, channel: HostedChannel, missing: Mapping[str, str], start_s: float) -> None:
        """Attach the server at the other end of ``channel``, on a machine whose lifetime began at ``start_s``.
        ``missing`` are the guards that the driver lacks."""
        await self.attach(channel)
        self.missing = {**missing, **channel.lacks}
        self._until_s = start_s + self.spec.life_s

    async def give_up(self, reason: str) -> None:
        """End the session at once because of ``reason``, to which the client's own message about the end is added."""
        if not self.ended and self._channel is not None and (words := await self._channel.exit_reason()):
            reason = f"{reason} ({words})"
        await super().give_up(reason)


class HostedDriver(KeepingDriver):
    """A driver of sessions on machines of a service. Drivers of single services implement its abstract methods."""

    def __init__(self, kind: str, image: str, missing: Mapping[str, str]) -> None:
        """Create a driver of ``kind`` whose sessions start from ``image`` unless their spec names another image.
        ``missing`` are the guards that the service lacks."""
        super().__init__(kind, image, missing)
        self._tasks = asyncio.TaskGroup()
        """Runs the background calls of :meth:`watch`."""

    @abstractmethod
    async def create(self, session: HostedSession, origin: str) -> HostedChannel:
        """Create a machine for ``session`` from the image or snapshot ``origin``, and start the launcher on it. Raises
        :class:`~headrace.base.errors.HeadraceError`, and ends the machine, if that fails."""

    @abstractmethod
    async def sweep(self) -> None:
        """Delete machines and snapshots of dead owners. Raises :class:`~headrace.base.errors.EnvError` if the service
        cannot be reached or refuses the key."""

    async def connect(self) -> None:
        """Connect to the service, and delete what dead owners have left; the functions that open a driver call this."""
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
        """End all machines, and delete all snapshots."""
        await super().close()
        await self._tasks.__aexit__(None, None, None)

    async def keep_files(self, session: KeptSession) -> KeptFiles:
        """Let the service store the present files of a session, and return the name of the snapshot. Raises
        :class:`~headrace.base.errors.EpisodeError` if it does not answer in time."""
        try:
            async with asyncio.timeout(CALL_S):
                return await super().keep_files(session)
        except TimeoutError:
            raise _make_late_error("session_snapshot") from None

    def watch(self, call: Coroutine[Any, Any, None]) -> Callable[[], object]:
        """Run ``call``, which must not raise, in the background, and return a function that cancels it. :meth:`close`
        waits for its end."""
        return self._tasks.create_task(call).cancel

    def tags(self, session: HostedSession) -> dict[str, str]:
        """Return the tags of a session's machine, which name its owner and the session."""
        return {"headrace": "session", LABEL: self.owner, "headrace.session": session.name}

    async def begin(self, spec: SandboxSpec, origin: str, *, below: str) -> HostedSession:
        """Create a machine for a session with the settings ``spec`` from the image or snapshot ``origin``, and wait
        until its server is ready. ``below`` is the snapshot's name; empty for an image."""
        session = self.enter(HostedSession(self, spec, self.next_name(), below))
        start_s = RealClock().now()
        making = self._tasks.create_task(_capture(self.create(session, origin)))
        try:
            async with asyncio.timeout(CALL_S):
                channel = await asyncio.shield(making)
        except BaseException as error:
            # the service may still create the machine: it is ended as soon as it exists
            self._tasks.create_task(_end_made(making))
            await session.give_up("its start was cut off")
            if isinstance(error, TimeoutError):
                raise _make_late_error("session_start") from None
            raise
        if isinstance(channel, Exception):
            await session.give_up("its machine did not start")
            raise channel
        await session.join(channel, self.missing, start_s)
        return session


async def _capture(call: Coroutine[Any, Any, T]) -> T | Exception:
    """Return the result of a call to a service, or the error that it raises."""
    try:
        async with asyncio.timeout(LATE_S):
            return await call
    except Exception as error:  # noqa: BLE001 - a boundary: the caller gets the error
        return error


def _make_late_error(reason: str) -> EpisodeError:
    """Return the error for a service that has not answered in time; ``reason`` is the reason of the episode's
    failure."""
    return EpisodeError(
        f"the service has not answered within {CALL_S:g} s",
        remedy="look at the network of this machine, and whether the service is up",
        reason=reason,
    )


async def _end_made(making: asyncio.Task[HostedChannel | Exception]) -> None:
    """End a machine that is no longer needed, as soon as it has been created."""
    outcome = await making
    if isinstance(outcome, HostedChannel):
        await outcome.kill()


async def ignore_errors(call: Coroutine[Any, Any, Any]) -> None:
    """Wait for a call at most :data:`END_S` seconds, and ignore its errors."""
    with suppress(Exception):
        async with asyncio.timeout(END_S):
            await call
