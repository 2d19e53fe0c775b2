"""One server: started by us or found, and whether it is still there."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.clock import Clock
from headrace.base.environ import program_environment
from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit, HeadraceError
from headrace.wings.servers.client.dialect import ServerDialect, ServerInfo
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.wire import Address, Wire

if TYPE_CHECKING:
    import httpx

HEALTH_S = 20.0
"""Longest that a server may take to say that it is well."""
KNOCK_S = 0.25
"""Between two questions whether it is there."""
GRACE_S = 10.0
"""What a server that was started gets to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a server is started."""

    argv: Sequence[str]
    variables: Mapping[str, str]
    """Of its environment, beside what a program of a run has."""
    hint: str = ""
    """What to look at where it ends before it serves, beside its log."""

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.argv])


class Server:
    """What is known of it; its process too where we have started it."""

    def __init__(self, dialect: ServerDialect, address: Address, handover: Handover, command: Command) -> None:
        self.dialect, self.address, self.handover, self._command = dialect, address, handover, command
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return f"{self.dialect.name} at {self.address}"

    def start(self) -> None:
        """Start its process. What it prints goes where this process prints."""
        try:
            self._process = subprocess.Popen(
                list(self._command.argv),
                env=program_environment(self._command.variables),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(
                f"{self.dialect.name} cannot be started with {self._command.argv[0]}: {error}",
                remedy="set engine.server.python to the interpreter of the environment that it is installed in",
            ) from None

    def meet(self, wire: Wire, wait_s: float, clock: Clock) -> ServerInfo:
        """Who answers, within ``wait_s``. Raises :class:`~headrace.base.errors.ConfigError` if nobody does."""
        return wire.call(self._meet(wire.client, wait_s, clock), wait_s + HEALTH_S)

    async def refuse_dead(self, client: httpx.AsyncClient, *, ask: bool = True) -> None:
        """Raise :class:`~headrace.base.errors.ComponentDied` if it is not there any more; ``ask`` it, or look only."""
        import httpx

        if words := self._ended():
            raise ComponentDied(words, remedy="its last words are in the engine's log")
        if not ask:
            return
        try:
            answer = await client.get("/health", timeout=HEALTH_S)
            words = "" if answer.status_code == 200 else f"answers {answer.status_code}"
        except httpx.HTTPError as error:
            words = f"does not answer: {type(error).__name__}: {error}"
        if words:
            await asyncio.sleep(0.5)  # its process may be about to end
            raise ComponentDied(self._ended() or f"{self} {words}", remedy="look at its log")

    def silent(self, what: str) -> EngineUnfit:
        """It does not tell ``what`` it has to: no answer of it can be used."""
        return EngineUnfit(
            f"{self} tells no {what} of its tokens",
            remedy=f"start it so: {self._command}",
        )

    def close(self) -> None:
        """End what we have started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> str:
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"{self.dialect.name} ended with exit code {code}"

    async def _who(self, client: httpx.AsyncClient) -> ServerInfo:
        try:
            return await self.dialect.meet(client)
        except HeadraceError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"what answers at {self.address} is no {self.dialect.name}: asked who it is, it says nothing that "
                f"{self.dialect.name} would ({type(error).__name__}: {error})",
                remedy="name a server of that kind in engine.server.urls, or its kind in engine.kind",
            ) from None

    async def _meet(self, client: httpx.AsyncClient, wait_s: float, clock: Clock) -> ServerInfo:
        import httpx

        until_s, last = clock.now() + wait_s, "nobody has answered"
        while clock.now() < until_s:
            if words := self._ended():
                raise ConfigError(
                    f"{words} before it served: {self._command}",
                    remedy=f"its last words are in the engine's log{self._command.hint}",
                )
            try:
                answer = await client.get("/health", timeout=HEALTH_S)
                if answer.status_code == 200:
                    return await self._who(client)
                last = f"it answers {answer.status_code}"
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(KNOCK_S)
        raise ConfigError(
            f"{self.dialect.name} at {self.address} does not answer, after {wait_s:g} s ({last})",
            remedy=f"start it: {self._command}\n  or raise engine.server.wait_s",
        )
