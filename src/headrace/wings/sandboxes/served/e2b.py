"""The driver of sessions in sandboxes of E2B, with E2B's client (``pip install 'headrace[e2b]'``).

    E2BDriver ── AsyncSandbox.create ── machine of a template ── commands.run(stdin) ══ server.sh
              ── create_snapshot: a template of its files; a fork is a machine of that template

The client returns the output of commands as text, which cannot contain all bytes, so the server's output is sent as
lines of base64. The input is bytes. The client reads the key from ``E2B_API_KEY``.
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
    describe_error,
    ignore_errors,
    make_launcher_arguments,
    refuse_missing,
    round_up_lifetime,
)
from headrace.wings.sandboxes.served.keeping import KeptSession
from headrace.wings.sandboxes.served.owners import LABEL, is_dead
from headrace.wings.sandboxes.served.settings import refuse_readable, validate_driver_settings

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

SENT_BYTES = 1 << 20
"""The largest number of bytes of one call that sends input. As base64 they stay below 4 MiB, the limit of a Connect
message."""
PREFIX = "headrace-snapshot-"
"""The prefix of the names of snapshots."""
PIECES = 64
"""The capacity of the queue of output pieces; when it is full, reading of the output waits."""
_MISSING = {"disk": "E2B cannot bound the files of a session: they may fill the disk of the template"}
"""The guards that the service lacks."""
_ONLY_WHOLE = (400, 409)
"""The HTTP statuses with which the service refuses a snapshot of files without memory, for this team or this
machine."""


class E2BSettings(Section):
    """The settings of sandboxes of E2B: ``env.options.driver``."""

    image: str = ""
    """The template of sessions whose task does not name an image, by name or id."""
    network: bool = False
    """Whether sessions reach the internet."""
    user: str = "root"
    """The user of the template that runs the server and the commands."""
    rights: bool = False
    """Whether commands keep the rights of ``user``, such as the rights of root; if not, they have no capabilities."""


class E2BChannel(HostedChannel):
    """The standard streams of the server in a sandbox."""

    def __init__(self, driver: E2BDriver, sandbox: AsyncSandbox) -> None:
        """Create a channel to a sandbox of ``driver``, in which :meth:`run` starts the server."""
        super().__init__()
        self._driver = driver
        self._sandbox = sandbox
        self._handle: AsyncCommandHandle[Any] | None = None
        """The client's handle of the launcher; ``None`` before its start."""
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(PIECES)
        """Output that was received and not fetched; an empty piece is the end."""
        self._output = EncodedOutput()
        """The decoder of the output."""

    async def run(self, session: HostedSession, settings: E2BSettings) -> None:
        """Start the launcher for ``session`` with ``settings``, and a task that waits for its end."""
        words = make_launcher_arguments(session.spec, encoded=True, rights=settings.rights)
        self._handle = await self._sandbox.commands.run(
            f"exec bash {shlex.join(words)}", background=True, user=settings.user, cwd="/", stdin=True, timeout=0,
            on_stdout=self._take, retain_output=False,
        )  # fmt: skip
        self._driver.watch(self._watch(self._handle))

    async def write(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server, in parts."""
        assert self._handle is not None
        for start in range(0, len(data), SENT_BYTES):
            await self._handle.send_stdin(data[start : start + SENT_BYTES])

    async def piece(self) -> bytes:
        """Return the next bytes of the server's output; empty at the end."""
        return await self._pieces.get()

    async def close(self) -> None:
        """End the sandbox."""
        await ignore_errors(self._sandbox.kill(request_timeout=END_S))
        if self._handle is not None:
            await ignore_errors(self._handle.disconnect())
        while not self._pieces.empty():  # nobody reads them, and the end of the stream needs space
            self._pieces.get_nowait()

    async def _take(self, text: str) -> None:
        """Decode text of the server's output, and queue its pieces."""
        for piece in self._output.take(text):
            await self._pieces.put(piece)

    async def _watch(self, handle: AsyncCommandHandle[Any]) -> None:
        """Wait for the end of the server, and queue the end of the stream."""
        try:
            await handle.wait()
        except Exception as error:  # noqa: BLE001 - a boundary: the session reports how it ended
            self._ended = self._ended or describe_error(error)
        await self._pieces.put(b"")


class E2BDriver(HostedDriver):
    """A driver of sessions in sandboxes of E2B. Create it with :func:`open_e2b`."""

    def __init__(self, settings: E2BSettings) -> None:
        """Create a driver with ``settings``."""
        super().__init__("e2b", settings.image, _MISSING)
        self.settings = settings
        self._files_only = True
        """Whether snapshots are made without memory, until the service refuses one."""

    async def create(self, session: HostedSession, origin: str) -> E2BChannel:
        """Create a sandbox for ``session`` from the template or snapshot ``origin``, and start the launcher in it."""
        from e2b import AsyncSandbox

        try:
            sandbox = await AsyncSandbox.create(
                origin,
                timeout=round_up_lifetime(session.spec),
                metadata=self.tags(session),
                allow_internet_access=self.settings.network,
            )
        except Exception as error:
            raise _make_refusal(error, f"a session cannot start from {origin!r}") from error
        session.machine = sandbox
        channel = E2BChannel(self, sandbox)
        try:
            if session.below and not self._files_only:
                await _end_old_servers(sandbox)
            await channel.run(session, self.settings)
        except BaseException as error:
            await asyncio.shield(channel.close())
            if isinstance(error, Exception):
                raise _make_refusal(error, f"a session cannot start in a sandbox of {origin!r}") from error
            raise
        return channel

    async def keep(self, session: KeptSession, name: str) -> str:
        """Make a snapshot named ``name`` of the sandbox of ``session``, without its memory if the service can do so,
        and return its id."""
        try:
            return await self._snapshot(session.machine, f"{PREFIX}{name}")
        except Exception as error:
            raise _make_refusal(error, "the files of a session cannot be kept", reason="session_snapshot") from error

    async def _snapshot(self, sandbox: AsyncSandbox, name: str) -> str:
        """Make a snapshot named ``name``, and return its id. After the first refusal of a snapshot without memory, all
        snapshots contain the memory."""
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
        """Delete the snapshot ``kept``."""
        from e2b import AsyncSandbox

        await ignore_errors(AsyncSandbox.delete_snapshot(kept, request_timeout=END_S))

    async def sweep(self) -> None:
        """End sandboxes and delete snapshots of dead owners."""
        from e2b import AsyncSandbox, SandboxQuery

        try:
            for info in await _collect_pages(AsyncSandbox.list(SandboxQuery(metadata={"headrace": "session"}))):
                if is_dead((info.metadata or {}).get(LABEL, "")):
                    await AsyncSandbox.kill(info.sandbox_id)
            for kept in await _collect_pages(AsyncSandbox.list_snapshots()):
                if any(_has_dead_owner(name) for name in kept.names):
                    await AsyncSandbox.delete_snapshot(kept.snapshot_id)
        except Exception as error:
            raise EnvError(
                f"E2B cannot be used: {describe_error(error)}",
                remedy="set E2B_API_KEY to a key of your team, and look at status.e2b.dev",
            ) from error


async def _collect_pages(pages: Any) -> list[Any]:
    """Return the items of all pages of a list."""
    found: list[Any] = []
    while pages.has_next:
        found += await pages.next_items()
    return found


async def _end_old_servers(sandbox: AsyncSandbox) -> None:
    """Kill the processes that a snapshot with memory has restored: the server of the original session."""
    for process in await sandbox.commands.list():
        await sandbox.commands.kill(process.pid)


def _has_dead_owner(name: str) -> bool:
    """Return whether ``name``, a snapshot's name with an optional team and tag, belongs to a dead owner."""
    short = name.rpartition("/")[2].partition(":")[0]
    return short.startswith(PREFIX) and is_dead(short.removeprefix(PREFIX))


def _make_refusal(error: Exception, what: str, *, reason: str = "session_start") -> HeadraceError:
    """Return the error to raise for an ``error`` of the client, with the client's message and a remedy; ``what`` says
    what failed, and ``reason`` is the reason of the episode's failure."""
    from e2b import AuthenticationException, RateLimitException, ServiceBusyException

    words = f"{what}: {describe_error(error)}"
    if isinstance(error, AuthenticationException):
        return EnvError(words, remedy="set E2B_API_KEY to a key of your team")
    if isinstance(error, RateLimitException | ServiceBusyException):
        return EpisodeError(
            words, remedy="run fewer sessions at once, or ask E2B for a higher limit", reason="session_quota"
        )
    return EpisodeError(words, remedy="name a template that is there, and look at status.e2b.dev", reason=reason)


async def open_e2b(readable: Sequence[str] = (), **options: Any) -> E2BDriver:
    """Open the driver of E2B with the settings ``options``. ``readable`` must be empty, because a provider's machine
    cannot read paths of this machine."""
    settings = validate_driver_settings("e2b", E2BSettings, options)
    refuse_missing("e2b")
    refuse_readable("e2b", readable)
    driver = E2BDriver(settings)
    await driver.connect()
    return driver
