"""Sessions of containers and remote machines. In them ``server.sh``, a program of bash, runs the commands.

    ServedSession ══ channel ══ server.sh ── command, with its limits
      requests: a line and bytes     │
      answers:  a line and bytes     └── the end of the channel ends the server

The server needs no file of Headrace and no Python, only programs that images of Linux usually contain. Each answer
repeats the random nonce of its request, so that other output is not mistaken for an answer.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox import Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.run import reason_for_signal
from headrace.wings.sandboxes.base import Execution, SandboxSession, SandboxSpec, remove_own_variables

STARTED_S = 120.0
"""The longest time until a server sends its greeting, in seconds; it includes the download of an image."""
GRACE_S = 15.0
"""The time after the deadline of a command within which its answer must arrive, in seconds; then the session is
ended."""
SHORTEST_S = 0.001
"""The shortest timeout of a call in seconds, so that a call after the end of the lifetime raises the right error."""
LINE_BYTES = 1 << 20
"""The maximum length of a line from the server in bytes; the greeting contains the variables of the image."""
_CONTAINER_VARIABLES = frozenset({"LC_ALL", "container", "HOSTNAME", "TERM"})
"""Variables that containers set in addition to the variables of their image; commands do not receive them."""
_PROGRAMS = ("bash", "cat", "mkdir", "tar")


class ServerChannel(ABC):
    """The contract of a connection to a session's server: :meth:`send` writes to its standard input, :meth:`line` and
    :meth:`exactly` read its standard output."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send the bytes ``data``. Raises ``OSError`` if the server has ended."""

    @abstractmethod
    async def line(self) -> bytes:
        """Return the next line with its line end. At the end of the stream, return the rest, which may be empty."""

    @abstractmethod
    async def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises ``EOFError`` if the stream ends before."""

    @abstractmethod
    async def close(self) -> None:
        """Close the server's input, and wait until the server has ended."""

    async def kill(self) -> None:
        """Kill the server at once, with all other processes of the session."""
        await self.close()

    async def exit_reason(self) -> str:
        """Return in words why a server ended before its greeting; empty if the reason is unknown."""
        return ""


class BufferedChannel(ServerChannel):
    """A channel whose output arrives in pieces of any size, which are stored until they are read."""

    def __init__(self) -> None:
        """Create a channel with an empty buffer."""
        self._read = bytearray()
        """Output that was received and not read."""
        self._over = False
        """Whether the stream has ended."""

    @abstractmethod
    async def piece(self) -> bytes:
        """Return the next bytes of the server's output; empty at the end of the stream."""

    async def line(self) -> bytes:
        """Return the next line, or the rest of the output at the end of the stream. Raises ``ValueError`` for a line of
        more than :data:`LINE_BYTES`."""
        start = 0
        while (end := self._read.find(b"\n", start)) < 0:
            start = len(self._read)
            if start > LINE_BYTES:
                raise ValueError("a line has no end")
            if not await self._receive():
                return self._taken(start)
        return self._taken(end + 1)

    async def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the server."""
        while len(self._read) < size:
            if not await self._receive():
                raise EOFError("the server has gone")
        return self._taken(size)

    async def _receive(self) -> bool:
        """Append the next bytes of the server to the buffer. Return ``False`` at the end of the stream and in every
        later call."""
        more = b"" if self._over else await self.piece()
        self._over = not more
        self._read += more
        return bool(more)

    def _taken(self, size: int) -> bytes:
        """Remove the first ``size`` bytes of the buffer, and return them."""
        data = bytes(self._read[:size])
        del self._read[:size]
        return data


@cache
def server_program() -> str:
    """Return the text of ``server.sh``."""
    return Path(__file__).with_name("server.sh").read_text(encoding="utf-8")


def server_arguments(spec: SandboxSpec) -> list[str]:
    """Return the arguments of ``bash`` that run the server for a session as ``spec`` describes it."""
    limits = spec.limits
    numbers = (int(spec.life_s * 1e6), limits.processes, limits.memory_bytes)
    return ["-c", server_program(), "server", *map(str, numbers)]


class ServedSession(SandboxSession):
    """A session whose server is at the other end of a :class:`ServerChannel`."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Create a session with the settings ``spec``; :meth:`attach` connects it to its server. Raises
        :class:`~headrace.base.errors.EpisodeError` for a spec with forwards, because they would need a listening
        program in the image."""
        if spec.forwards:
            raise EpisodeError(
                f"forwards={dict(spec.forwards)!r} cannot be served by this kind of sandbox",
                remedy="choose the kind 'jail' or 'bubblewrap', or give the sandboxes a network by their settings",
                reason="session_start",
            )
        super().__init__(spec)
        self._channel: ServerChannel | None = None
        """The connection to the server; ``None`` before :meth:`attach` and after the end."""
        self._until_s = 0.0
        """Time at which the session's lifetime is over."""

    async def attach(self, channel: ServerChannel) -> None:
        """Wait for the greeting of the server at the other end of ``channel``, and read the programs and variables of
        the image from it. The lifetime of the session begins now. Raises :class:`~headrace.base.errors.EpisodeError`
        with the reason why the server ended if it does not start."""
        self._channel = channel
        try:
            async with asyncio.timeout(STARTED_S):
                greeting = (await channel.line()).decode("utf-8", "replace").split()
        except TimeoutError:
            greeting = []
        except BaseException:
            await self.give_up("its start was cut off")
            raise
        if len(greeting) != len(_PROGRAMS) + 2 or greeting[0] != "+":
            words = await channel.exit_reason() or f"nothing has greeted within {STARTED_S:g} s"
            remedy = "look at what its service says, and name an image that is there"
            if greeting[:1] == ["-"]:
                words = f"its image lacks {' '.join(greeting[1:])}"
                remedy = "name an image with bash 5, coreutils, grep, tar and setsid"
            await self.give_up("it could not start")
            raise EpisodeError(f"a session cannot start: {words}", remedy=remedy, reason="session_start")
        self._until_s = RealClock().now() + self.spec.life_s
        entries = base64.b64decode(greeting[1]).decode("utf-8", "replace").split("\0")
        found = remove_own_variables(dict(entry.partition("=")[::2] for entry in entries if entry))
        self.base_variables = {name: value for name, value in found.items() if name not in _CONTAINER_VARIABLES}
        self.programs = dict(zip(_PROGRAMS, greeting[2:], strict=True))
        self.variables = self.first_variables()

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes, directory: str, variables: Mapping[str, str], limits: SandboxLimits
    ) -> Execution:
        """Run the program ``argv`` in the session, with the parameters ``stdin``, ``directory``, ``variables`` and
        ``limits`` of :meth:`~headrace.wings.sandboxes.base.SandboxSession.execute`."""
        assignments = [f"{name}={value}" for name, value in variables.items() if not name.startswith("-")]
        words = [directory, *assignments, *argv]
        data = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words) + stdin
        numbers = (
            len(data), len(words) - 1, int(limits.wall_s * 1e6), limits.output_bytes, limits.cpu_s,
            limits.address_bytes or limits.memory_bytes,
            limits.file_bytes, limits.open_files,
        )  # fmt: skip
        nonce = secrets.token_hex(16)
        answer, outputs = await self._call(
            "run", nonce, " ".join(map(str, numbers)), data, timeout_s=limits.wall_s + GRACE_S
        )
        return _make_execution(answer, outputs, limits)

    async def end_background(self) -> int:
        """Kill all processes of the session, and return their number."""
        (number,), _ = await self._call("end", secrets.token_hex(16), timeout_s=GRACE_S)
        return int(number)

    async def count_background(self) -> int:
        """Return the number of background processes."""
        (number,), _ = await self._call("count", secrets.token_hex(16), timeout_s=GRACE_S)
        return int(number)

    async def stop(self) -> None:
        """End the session, and wait until its server has ended."""
        if not self.ended:
            self.ended = "it was stopped"
            try:
                if self._channel is not None:
                    await self._channel.close()
            finally:
                await self.forget()

    async def give_up(self, reason: str) -> None:
        """Kill the session at once, because of ``reason``."""
        if not self.ended:
            self.ended = reason
            if self._channel is not None:
                await asyncio.shield(self._channel.kill())
            await self.forget()

    async def forget(self) -> None:
        """Remove the ended session from its driver's records. Subclasses override this; here it does nothing."""

    async def _call(
        self, what: str, nonce: str, numbers: str = "", data: bytes = b"", *, timeout_s: float
    ) -> tuple[list[str], list[bytes]]:
        """Send the server the request ``what`` (run, end or count), and return the words and the outputs of its answer,
        which repeats ``nonce``. ``numbers`` are the request's further words, and ``data`` its bytes. End the session if
        no answer arrives within ``timeout_s`` seconds, or if the call is cancelled. Raises
        :class:`~headrace.wings.sandboxes.base.SessionEnded` if the session has ended."""
        assert self._channel is not None
        left_s = self._until_s - RealClock().now()
        try:
            async with asyncio.timeout(max(SHORTEST_S, min(timeout_s, left_s))):
                await self._channel.send(f"{what} {nonce} {numbers}".rstrip().encode() + b"\n" + data)
                return await self._answer(what, nonce)
        except TimeoutError:
            over = left_s < timeout_s
            await self.give_up(f"its time of {self.spec.life_s:g} s is over" if over else "it did not answer in time")
        except (EOFError, OSError):
            over = RealClock().now() >= self._until_s
            await self.give_up(f"its time of {self.spec.life_s:g} s is over" if over else "its processes were killed")
        except ValueError:
            await self.give_up("its server has answered something else than it was asked")
        except asyncio.CancelledError:
            await self.give_up("a call was cancelled")
            raise
        self.refuse_ended()
        raise AssertionError("a session that was given up has ended")

    async def _answer(self, what: str, nonce: str) -> tuple[list[str], list[bytes]]:
        """Return the words and the outputs of the next answer. Raises ``ValueError`` if it does not repeat ``nonce``,
        and ``EOFError`` if the server has ended."""
        assert self._channel is not None
        line = await self._channel.line()
        if not line.endswith(b"\n"):
            raise EOFError("the server has gone")
        words = line.decode("ascii").split()
        if words[:1] != [nonce] or len(words) != (8 if what == "run" else 2):
            raise ValueError(words)
        if what != "run":
            return words[1:], []
        return words[1:5], [_remove_mark(await self._channel.exactly(int(size)), nonce) for size in words[5:]]


def _remove_mark(data: bytes, nonce: str) -> bytes:
    """Return an output without the mark that the server appends to it (the nonce in a line of its own) and without what
    follows the mark."""
    return data.rpartition(f"\n{nonce}\n".encode())[0] if f"\n{nonce}\n".encode() in data else data


def _make_execution(answer: Sequence[str], outputs: Sequence[bytes], limits: SandboxLimits) -> Execution:
    """Return the result of a program. ``answer`` is what the server reports: the reason, the status, whether a signal
    ended the program, and its processor time; ``outputs`` are standard output, standard error and the state pipe."""
    stdout, stderr, state = outputs
    most, reason, status, cpu_s = limits.output_bytes, Reason(answer[0]), int(answer[1]), _cpu_s(answer[3])
    if answer[2] == "1" and status > 128:
        status = 128 - status
    if reason is Reason.EXITED and max(len(stdout), len(stderr)) > most:
        reason = Reason.OUTPUT
    if reason is Reason.EXITED and status < 0:
        reason = reason_for_signal(-status, cpu_s, limits)
    return Execution(reason=reason, stdout=stdout[:most], stderr=stderr[:most], status=status, cpu_s=cpu_s, state=state)


def _cpu_s(text: str) -> float:
    """Return the sum of processor times in seconds, written as bash writes them."""
    total = 0.0
    for part in text.split("+"):
        minutes, _, seconds = part.rpartition("m")
        with suppress(ValueError):
            total += 60 * int(minutes or 0) + float(seconds.rstrip("s"))
    return total
