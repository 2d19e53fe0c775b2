"""The server of one engine: its process, if the engine started it, and the checks whether it is alive. A server that
was already running has no process object here."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.clock import Clock
from headrace.base.environ import program_environment
from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit, HeadraceError
from headrace.engine.config import EngineConfig
from headrace.wings.servers.client.carrier import CallWorkers
from headrace.wings.servers.client.dialect import ServerDialect, ServerInfo
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.wire import Address, Wire

if TYPE_CHECKING:
    import httpx

HEALTH_S = 20.0
"""Longest wait for the answer to a health check, in seconds."""
POLL_S = 0.25
"""Seconds between two attempts to reach a server that is starting."""
GRACE_S = 10.0
"""Seconds between the request to exit (SIGTERM) and the kill of a server that an engine started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that starts a server. The engine runs it, or shows it to the user in an error; ``str`` returns it as a
    line for a shell."""

    argv: Sequence[str]
    """The program and its arguments."""
    variables: Mapping[str, str]
    """Environment variables in addition to the variables of every program of a run."""
    hint: str = ""
    """Advice, besides the log, for a server that exits before it serves."""

    def __str__(self) -> str:
        """Return the command as a line for a shell, with its environment variables."""
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.argv])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """The parts of the implementation of one kind of server."""

    dialect: ServerDialect
    """The API of such a server."""
    own_address: Callable[[Path], Address]
    """A function that returns the address at which a server that the engine starts will listen. Its argument is a
    directory for the server's files."""
    command: Callable[[EngineConfig, ServeRequirements, Address], Command]
    """A function that returns the command that starts a server, from the settings of the engine, the required model and
    the address."""
    call_workers: CallWorkers | None = None
    """A function that calls methods of the server's workers; ``None`` if versions cannot be sent to its machines."""


class Server:
    """The server of one engine, and its process if the engine started it. ``handover`` has the versions that the server
    will load."""

    def __init__(self, dialect: ServerDialect, address: Address, handover: Handover, command: Command) -> None:
        """Create the object, without starting a process. ``command`` is the command that starts the server, or that the
        user should have used for a server that was already running."""
        self.dialect, self.address, self.handover, self._command = dialect, address, handover, command
        self._process: subprocess.Popen[bytes] | None = None
        """The process that the engine started; ``None`` for a server that was already running."""

    def __str__(self) -> str:
        """Return the name and the address of the server, for messages."""
        return f"{self.dialect.name} at {self.address}"

    def start(self) -> None:
        """Start the server's process, which prints to the output of this process. Raises
        :class:`~headrace.base.errors.ConfigError` if the program cannot be run."""
        try:
            self._process = subprocess.Popen(
                list(self._command.argv), env=program_environment(self._command.variables), stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise ConfigError(
                f"{self.dialect.name} cannot be started with {self._command.argv[0]}: {error}",
                remedy="set engine.server.python to the interpreter of the environment that it is installed in",
            ) from None

    def wait_until_serving(self, wire: Wire, wait_s: float, clock: Clock) -> ServerInfo:
        """Wait until the server answers, and return the facts that it reports about itself. Raises
        :class:`~headrace.base.errors.ConfigError` if it does not answer within ``wait_s`` seconds, or if its process
        ends."""
        return wire.call(self._wait_until_serving(wire.client, wait_s, clock), wait_s + HEALTH_S)

    async def check_health(self, client: httpx.AsyncClient, *, probe: bool = True) -> None:
        """Raise :class:`~headrace.base.errors.ComponentDied` if the server's process has ended or, with ``probe``, if
        the server does not answer a health check."""
        import httpx

        if words := self._ended():
            raise ComponentDied(words, remedy="look at the end of the engine's log")
        if not probe:
            return
        try:
            answer = await client.get("/health", timeout=HEALTH_S)
            words = "" if answer.status_code == 200 else f"answers {answer.status_code}"
        except httpx.HTTPError as error:
            words = f"does not answer: {type(error).__name__}: {error}"
        if words:
            await asyncio.sleep(0.5)  # its process may be about to end, and the exit code is the better reason
            raise ComponentDied(self._ended() or f"{self} {words}", remedy="look at its log")

    def make_missing_record_error(self, what: str) -> EngineUnfit:
        """Return the error for a server that does not report a required record of each token, so that its answers
        cannot be used. ``what`` is the name of the record, such as ``experts``."""
        return EngineUnfit(
            f"{self} does not report the {what} of its tokens", remedy=f"start it with this command: {self._command}"
        )

    def close(self) -> None:
        """End the process that the engine started, if any; it is killed after :data:`GRACE_S`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> str:
        """Return a sentence with the exit code of the server's process; empty while the process runs, and for a server
        without a process here."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"{self.dialect.name} ended with exit code {code}"

    async def _identify(self, client: httpx.AsyncClient) -> ServerInfo:
        """Return the facts that the server reports about itself. Raises :class:`~headrace.base.errors.ConfigError` if
        its answer does not come from a server of this kind."""
        try:
            return await self.dialect.identify(client)
        except HeadraceError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"what answers at {self.address} is not {self.dialect.name}: asked who it is, it says nothing that "
                f"{self.dialect.name} would ({type(error).__name__}: {error})",
                remedy="name a server of that kind in engine.server.urls, or its kind in engine.kind",
            ) from None

    async def _wait_until_serving(self, client: httpx.AsyncClient, wait_s: float, clock: Clock) -> ServerInfo:
        """Wait until the server answers a health check, and return the facts that it reports about itself. Raises
        :class:`~headrace.base.errors.ConfigError` after ``wait_s`` seconds, or if its process has ended."""
        import httpx

        until_s, last = clock.now() + wait_s, "nobody has answered"
        while clock.now() < until_s:
            if words := self._ended():
                raise ConfigError(
                    f"{words} before it served: {self._command}",
                    remedy=f"look at the end of the engine's log{self._command.hint}",
                )
            try:
                answer = await client.get("/health", timeout=HEALTH_S)
                if answer.status_code == 200:
                    return await self._identify(client)
                last = f"it answers {answer.status_code}"
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(POLL_S)
        raise ConfigError(
            f"{self.dialect.name} at {self.address} does not answer, after {wait_s:g} s ({last})",
            remedy=f"start it: {self._command}\n  or raise engine.server.wait_s",
        )
