"""Sessions in sandboxes of E2B, by its own client (``pip install 'headrace[e2b]'``).

    E2BDriver ── AsyncSandbox.create ── machine of a template ── commands.run(stdin) ══ server.sh
              ── create_snapshot: a template of its files, a fork a machine of it

The client gives the output of commands as text, in which bytes do not survive, so that the server's output travels as
lines of base64. Its input is bytes. The key is read by the client from ``E2B_API_KEY``.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.base.config import Section
from headrace.base.errors import EnvError, EpisodeError, HeadraceError
from headrace.wings.sandboxes.served.hosted import (
    END_S,
    EncodedOutput,
    HostedChannel,
    HostedDriver,
    HostedSession,
    launcher_arguments,
    quietly,
    refuse_missing,
    whole_seconds,
    words_of,
)
from headrace.wings.sandboxes.served.keeping import KeptSession
from headrace.wings.sandboxes.served.owners import LABEL, is_dead
from headrace.wings.sandboxes.served.settings import driver_settings, refuse_readable

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

SENT_BYTES = 1 << 20
"""The most bytes of one call that sends input: as base64 they stay below the 4 MiB that services of Connect take."""
PREFIX = "headrace-snapshot-"
"""How the names of snapshots begin."""
PIECES = 64
"""How many pieces of output wait to be read before the stream is held up."""
_MISSING = {
    "disk": "E2B cannot bound the files of a session: they may fill the disk of the template",
}
"""What the service does not hold."""
_ONLY_WHOLE = (400, 409)
"""How the service refuses snapshots of files alone: it cannot make them for this team, or on this machine."""


class E2BSettings(Section):
    """The settings of sandboxes of E2B: ``env.options.driver``."""

    image: str = ""
    """The template of sessions whose task names none, by name or id."""
    network: bool = False
    """Whether sessions reach the internet."""
    user: str = "root"
    """The user of the template that runs the server and the commands."""
    rights: bool = False
    """Whether commands keep the rights of that user, such as those of root in the sandbox; else they have none."""


class E2BChannel(HostedChannel):
    """The standard streams of the server in a sandbox."""

    def __init__(self, driver: E2BDriver, sandbox: AsyncSandbox) -> None:
        """Use a sandbox; :meth:`run` starts the server."""
        super().__init__()
        self._driver = driver
        self._sandbox = sandbox
        self._handle: AsyncCommandHandle[Any] | None = None
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(PIECES)
        self._output = EncodedOutput()
        self._ended = ""

    async def run(self, session: HostedSession, settings: E2BSettings) -> None:
        """Start the launcher."""
        words = launcher_arguments(session.spec, encoded=True, rights=settings.rights)
        self._handle = await self._sandbox.commands.run(
            f"exec bash {shlex.join(words)}", background=True, user=settings.user, cwd="/", stdin=True, timeout=0,
            on_stdout=self._take, retain_output=False,
        )  # fmt: skip
        self._driver.watch(self._watch(self._handle))

    async def send(self, data: bytes) -> None:
        """Send bytes to the server."""
        assert self._handle is not None
        try:
            for start in range(0, len(data), SENT_BYTES):
                await self._handle.send_stdin(data[start : start + SENT_BYTES])
        except Exception as error:  # the client raises many kinds of errors, without one base
            self._ended = self._ended or words_of(error)
            raise OSError(f"input cannot be sent: {error}") from error

    async def piece(self) -> bytes:
        """Return the next bytes of the server."""
        return await self._pieces.get()

    async def close(self) -> None:
        """End the sandbox."""
        await quietly(self._sandbox.kill(request_timeout=END_S))
        if self._handle is not None:
            await quietly(self._handle.disconnect())
        while not self._pieces.empty():  # they are not read any more, and the end needs room
            self._pieces.get_nowait()

    async def last_words(self) -> str:
        """Return what the client has said of the end of the server; empty if nothing."""
        return self._ended

    async def _take(self, text: str) -> None:
        """Take text of the server's output."""
        for piece in self._output.take(text):
            await self._pieces.put(piece)

    async def _watch(self, handle: AsyncCommandHandle[Any]) -> None:
        """Wait for the end of the server, and pass it on."""
        try:
            await handle.wait()
        except Exception as error:  # noqa: BLE001 - a boundary: the session reports how it ended
            self._ended = self._ended or words_of(error)
        await self._pieces.put(b"")


class E2BDriver(HostedDriver):
    """Sessions in sandboxes of E2B. Use :func:`open_e2b`."""

    def __init__(self, settings: E2BSettings) -> None:
        """Describe a driver with these settings."""
        super().__init__("e2b", settings.image, _MISSING)
        self.settings = settings
        self._files_only = True

    async def create(self, session: HostedSession, origin: str) -> E2BChannel:
        """Make a sandbox of a template, and start the launcher in it."""
        from e2b import AsyncSandbox

        try:
            sandbox = await AsyncSandbox.create(
                origin,
                timeout=whole_seconds(session.spec),
                metadata=self.tags(session),
                allow_internet_access=self.settings.network,
            )
        except Exception as error:
            raise _refusal(error, f"a session cannot start from {origin!r}") from error
        session.machine = sandbox
        channel = E2BChannel(self, sandbox)
        try:
            if session.below and not self._files_only:
                await _end_old_servers(sandbox)
            await channel.run(session, self.settings)
        except BaseException as error:
            await asyncio.shield(channel.close())
            if isinstance(error, Exception):
                raise _refusal(error, f"a session cannot start in a sandbox of {origin!r}") from error
            raise
        return channel

    async def keep(self, session: KeptSession, name: str) -> str:
        """Make a template of a sandbox: of its files alone, or of its memory too where the service cannot."""
        try:
            return await self._snapshot(session.machine, f"{PREFIX}{name}")
        except Exception as error:
            raise _refusal(error, "the files of a session cannot be kept", reason="session_snapshot") from error

    async def _snapshot(self, sandbox: AsyncSandbox, name: str) -> str:
        """Return the id of a new template."""
        from e2b import SandboxException

        if self._files_only:
            try:
                return (await sandbox.create_snapshot(name, mode="filesystem")).snapshot_id
            except SandboxException as error:
                if error.status_code not in _ONLY_WHOLE:
                    raise
                self._files_only = False
        return (await sandbox.create_snapshot(name)).snapshot_id

    async def remove(self, kept: str) -> None:
        """Remove a template."""
        from e2b import AsyncSandbox

        await quietly(AsyncSandbox.delete_snapshot(kept, request_timeout=END_S))

    async def sweep(self) -> None:
        """End sandboxes and remove snapshots whose owner has died."""
        from e2b import AsyncSandbox, SandboxQuery

        try:
            for info in await _all(AsyncSandbox.list(SandboxQuery(metadata={"headrace": "session"}))):
                if is_dead((info.metadata or {}).get(LABEL, "")):
                    await AsyncSandbox.kill(info.sandbox_id)
            for kept in await _all(AsyncSandbox.list_snapshots()):
                if any(_is_left(name) for name in kept.names):
                    await AsyncSandbox.delete_snapshot(kept.snapshot_id)
        except Exception as error:
            raise EnvError(
                f"E2B cannot be used: {words_of(error)}",
                remedy="set E2B_API_KEY to a key of your team, and look at status.e2b.dev",
            ) from error


async def _all(pages: Any) -> list[Any]:
    """Return what all pages of a list have."""
    found: list[Any] = []
    while pages.has_next:
        found += await pages.next_items()
    return found


async def _end_old_servers(sandbox: AsyncSandbox) -> None:
    """End what a snapshot with memory has brought along: the server of the session that it was taken of."""
    for process in await sandbox.commands.list():
        await sandbox.commands.kill(process.pid)


def _is_left(name: str) -> bool:
    """Return whether the name of a snapshot, perhaps with a team and a tag, is that of an owner who has died."""
    short = name.rpartition("/")[2].partition(":")[0]
    return short.startswith(PREFIX) and is_dead(short.removeprefix(PREFIX))


def _refusal(error: Exception, what: str, *, reason: str = "session_start") -> HeadraceError:
    """Return the error of this package for one of the client, with the client's words and what helps."""
    from e2b import AuthenticationException, RateLimitException, ServiceBusyException

    words = f"{what}: {words_of(error)}"
    if isinstance(error, AuthenticationException):
        return EnvError(words, remedy="set E2B_API_KEY to a key of your team")
    if isinstance(error, RateLimitException | ServiceBusyException):
        return EpisodeError(
            words, remedy="run fewer sessions at once, or ask E2B for a higher limit", reason="session_quota"
        )
    return EpisodeError(words, remedy="name a template that is there, and look at status.e2b.dev", reason=reason)


async def open_e2b(readable: Sequence[str] = (), **options: Any) -> E2BDriver:
    """Open the driver of E2B. ``readable`` paths cannot be shown to a provider's machine: they are refused."""
    settings = driver_settings("e2b", E2BSettings, options)
    refuse_missing("e2b")
    refuse_readable("e2b", readable)
    driver = E2BDriver(settings)
    await driver.opened()
    return driver
