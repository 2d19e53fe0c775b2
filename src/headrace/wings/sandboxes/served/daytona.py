"""The driver of sessions in sandboxes of Daytona, with Daytona's client (``pip install 'headrace[daytona]'``).

    DaytonaDriver ── create ── sandbox of an image, or of a snapshot
                  ══ a command of a process session: input by calls, output by its log, a WebSocket ══ server.sh
                  ── create_snapshot: an image of its files; a fork is a sandbox of that image

The service accepts input and output only as text, so both are sent as lines of base64. The output is read from the log
of the command, which can be read again from the same place after a lost connection. Daytona's terminals would pass
bytes, but they disconnect a slow reader. The client reads the key from ``DAYTONA_API_KEY``.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import EnvError, EpisodeError, HeadraceError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSpec
from headrace.wings.sandboxes.served.containers import OWN_BYTES
from headrace.wings.sandboxes.served.hosted import (
    END_S,
    EncodedOutput,
    HostedChannel,
    HostedDriver,
    HostedSession,
    describe_error,
    encode_input,
    ignore_errors,
    make_launcher_arguments,
    refuse_missing,
)
from headrace.wings.sandboxes.served.keeping import KeptSession
from headrace.wings.sandboxes.served.owners import LABEL, is_dead
from headrace.wings.sandboxes.served.settings import refuse_readable, validate_driver_settings

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox
    from daytona.common.daytona import CreateSandboxBaseParams

SENT_BYTES = 1 << 18
"""The largest number of bytes of one call that sends input. The service answers when the command has read them."""
PREFIX = "headrace-snapshot-"
"""The prefix of the names of snapshots."""
NAMED = "snapshot:"
"""The prefix of an image name that names a snapshot of Daytona and not an image of a registry."""
PIECES = 64
"""The capacity of the queue of output pieces; when it is full, reading of the log waits."""
CONNECTIONS = 100
"""The largest number of connections to the log of one session; after that its output counts as ended."""
PAGE = 100
"""The number of snapshots in one page of the service's list."""
_NOT_TEXT = str.maketrans("", "", "\0\1\2")
"""Characters to remove from the log: older services fill messages with zero bytes, and a lost connection may leave
parts of the log's stream markers."""
_MISSING = {"disk": "Daytona cannot bound the files of a session: they may fill the disk of its sandbox"}
"""The guards that the service lacks."""
_QUOTA = ("limit exceeded", "quota exceeded")
"""Parts of an error message that mean an exceeded quota; its HTTP status is the same as for any invalid request."""


class DaytonaSettings(Section):
    """The settings of sandboxes of Daytona: ``env.options.driver``."""

    image: str = ""
    """The image of sessions whose task does not name an image: a registry name with a tag, or ``snapshot:NAME``."""
    target: str = ""
    """The region of the sandboxes; empty: the region in ``DAYTONA_TARGET``, or the organization's default."""
    network: bool = False
    """Whether sessions reach the network."""
    user: str = "root"
    """The user of the image that runs the server and the commands."""
    rights: bool = False
    """Whether commands keep the rights of ``user``, such as the rights of root; if not, they have no capabilities."""
    cpus: int | None = Field(default=None, ge=1)
    """The number of processors of a sandbox from an image; unset: Daytona's default."""
    disk_gib: int | None = Field(default=None, ge=1)
    """The disk space of a sandbox from an image, in GiB; unset: Daytona's default."""
    idle_s: int = Field(default=900, ge=60)
    """The time after which Daytona ends a sandbox whose worker has died, in seconds, rounded up to minutes."""


class DaytonaChannel(HostedChannel):
    """The standard streams of the server in a sandbox: the input of a command, and its log."""

    def __init__(self, driver: DaytonaDriver, sandbox: AsyncSandbox, name: str) -> None:
        """Create a channel to a sandbox of ``driver``, in which :meth:`run` starts the server in the process session
        ``name``."""
        super().__init__()
        self._driver = driver
        self._sandbox = sandbox
        self._name = name
        self._command = ""
        """The service's id of the launcher's command; empty before its start."""
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(PIECES)
        """Output that was read from the log and not fetched; an empty piece is the end."""
        self._output = EncodedOutput()
        """The decoder of the log."""
        self._num_read = 0
        """Number of pieces of output that were queued."""
        self._to_skip = 0
        """Number of pieces of the present connection that an earlier one has delivered."""
        self._connected = False
        """Whether the present connection to the log has delivered text."""
        self._stop_reading: Callable[[], object] | None = None
        """Cancels the task that reads the log; ``None`` before it starts."""

    async def run(self, session: HostedSession, settings: DaytonaSettings) -> None:
        """Start the launcher for ``session`` with ``settings``, and the reading of its log."""
        from daytona import SessionExecuteRequest

        words = make_launcher_arguments(session.spec, encoded=True, lined=True, rights=settings.rights)
        # no `exec`: the shell of the process session reports the end of the server, once its error output has ended too
        command = f"cd / && bash {shlex.join(words)} 2> /dev/null"
        await self._sandbox.process.create_session(self._name)
        started = await self._sandbox.process.execute_session_command(
            self._name, SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
        )
        self._command = started.cmd_id
        self._stop_reading = self._driver.watch(self._read_log())

    async def write(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server, in parts."""
        for start in range(0, len(data), SENT_BYTES):
            text = encode_input(data[start : start + SENT_BYTES])
            await self._sandbox.process.send_session_command_input(self._name, self._command, text)

    async def piece(self) -> bytes:
        """Return the next bytes of the server's output; empty at the end."""
        return await self._pieces.get()

    async def close(self) -> None:
        """End the sandbox."""
        await ignore_errors(self._sandbox.delete(timeout=END_S))
        if self._stop_reading is not None:
            self._stop_reading()
        while not self._pieces.empty():  # nobody reads them, and the end of the stream needs space
            self._pieces.get_nowait()
        self._pieces.put_nowait(b"")

    async def _read_log(self) -> None:
        """Read the log until the server ends. After a lost connection, connect again and skip what was read before."""
        for _ in range(CONNECTIONS):
            self._to_skip, self._connected = self._num_read, False
            try:
                await self._sandbox.process.get_session_command_logs_async(
                    self._name, self._command, self._take, _ignore
                )
                break
            except Exception as error:  # noqa: BLE001 - a boundary: the session reports how it ended
                self._ended = describe_error(error)
                if not self._connected:
                    break
        await self._pieces.put(b"")

    async def _take(self, text: str) -> None:
        """Decode text of the log, and queue the pieces that were not read over an earlier connection."""
        text = text.translate(_NOT_TEXT)
        self._connected = True
        new = text[self._to_skip :]
        self._to_skip = max(0, self._to_skip - len(text))
        self._num_read += len(new)
        for piece in self._output.take(new):
            await self._pieces.put(piece)


class DaytonaDriver(HostedDriver):
    """A driver of sessions in sandboxes of Daytona. Create it with :func:`open_daytona`."""

    def __init__(self, settings: DaytonaSettings, client: AsyncDaytona) -> None:
        """Create a driver with ``settings``. :meth:`close` closes ``client``."""
        super().__init__("daytona", settings.image, _MISSING)
        self.settings = settings
        self._client = client
        self._unsure: set[str] = set()
        """Names of sandboxes whose creation may have succeeded although the call failed."""

    async def create(self, session: HostedSession, origin: str) -> DaytonaChannel:
        """Create a sandbox for ``session`` from the image or snapshot ``origin``, and start the launcher in it."""
        try:
            sandbox = await self._client.create(self._create_parameters(session, origin), timeout=0)
            session.machine = sandbox
            channel = DaytonaChannel(self, sandbox, session.name)
            await channel.run(session, self.settings)
        except BaseException as error:
            # a sandbox exists even if its image could not be built, and then does not end at its lifetime
            await asyncio.shield(ignore_errors(self._end(session.name)))
            if isinstance(error, Exception):
                raise _make_refusal(error, f"a session cannot start from {origin!r}") from error
            raise
        return channel

    async def keep(self, session: KeptSession, name: str) -> str:
        """Make a snapshot named ``name`` of the files of ``session``, and return its name."""
        name = f"{PREFIX}{name}"
        self._unsure.add(name)
        try:
            await session.machine.create_snapshot(name, timeout=0)
            # a failed snapshot raises no error in the call before
            await self._client.snapshot.get(name)
        except Exception as error:
            raise _make_refusal(error, "the files of a session cannot be kept", reason="session_snapshot") from error
        self._unsure.discard(name)
        return name

    async def remove(self, kept: str) -> None:
        """Delete the snapshot ``kept``."""
        await ignore_errors(self._client.snapshot.delete(kept))

    async def close(self) -> None:
        """End all sandboxes, delete all snapshots, and close the client."""
        await super().close()
        for name in self._unsure:  # the service may have created them in spite of an error
            await self.remove(name)
        await ignore_errors(self._client.close())

    async def sweep(self) -> None:
        """End sandboxes and delete snapshots of dead owners."""
        from daytona import ListSandboxesQuery

        try:
            async for sandbox in self._client.list(ListSandboxesQuery(labels={"headrace": "session"})):
                if is_dead(sandbox.labels.get(LABEL, "")):
                    await ignore_errors(sandbox.delete(timeout=END_S))
            for name in await self._snapshots():
                if name.startswith(PREFIX) and is_dead(name.removeprefix(PREFIX)):
                    await self.remove(name)
        except Exception as error:
            raise EnvError(
                f"Daytona cannot be used: {describe_error(error)}",
                remedy="set DAYTONA_API_KEY to a key that may write and delete sandboxes and snapshots, and look at "
                "status.daytona.io",
            ) from error

    async def _snapshots(self) -> list[str]:
        """Return the names of all snapshots of the organization."""
        names: list[str] = []
        page, pages = 0, 1
        while page < pages:
            page += 1
            found = await self._client.snapshot.list(page=page, limit=PAGE)
            names += [kept.name for kept in found.items]
            pages = found.total_pages
        return names

    async def _end(self, name: str) -> None:
        """End the sandbox ``name``."""
        await (await self._client.get(name)).delete(timeout=END_S)

    def _create_parameters(self, session: HostedSession, origin: str) -> CreateSandboxBaseParams:
        """Return the parameters for the creation of the sandbox of ``session`` from ``origin``. To Daytona, a sandbox
        is idle when no connection to its log is open."""
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources

        settings = self.settings
        common = {
            "name": session.name,
            "os_user": settings.user,
            "labels": self.tags(session),
            "network_block_all": not settings.network,
            "ttl_minutes": round_up_to_minutes(session.spec.life_s),
            "auto_stop_interval": round_up_to_minutes(settings.idle_s),
            "ephemeral": True,
            "target": settings.target or None,
        }
        if session.below or origin.startswith(NAMED):
            return CreateSandboxFromSnapshotParams(snapshot=origin.removeprefix(NAMED), **common)
        resources = Resources(cpu=settings.cpus, memory=_memory_gib(session.spec), disk=settings.disk_gib)
        return CreateSandboxFromImageParams(image=origin, resources=resources, **common)


def round_up_to_minutes(seconds: float) -> int:
    """Return the time ``seconds`` in whole minutes, rounded up, at least 1."""
    return max(1, math.ceil(seconds / 60))


def _memory_gib(spec: SandboxSpec) -> int:
    """Return the memory of a session's sandbox, in GiB."""
    return math.ceil((spec.limits.memory_bytes + OWN_BYTES) / (1024 * MIB))


def _ignore(text: str) -> None:
    """Ignore text of the server's error output, which is always empty."""


def _make_refusal(error: Exception, what: str, *, reason: str = "session_start") -> HeadraceError:
    """Return the error to raise for an ``error`` of the client, with the client's message and a remedy; ``what`` says
    what failed, and ``reason`` is the reason of the episode's failure."""
    from daytona import DaytonaAuthenticationError, DaytonaForbiddenError, DaytonaRateLimitError

    words = f"{what}: {describe_error(error)}"
    if isinstance(error, DaytonaAuthenticationError | DaytonaForbiddenError):
        return EnvError(words, remedy="set DAYTONA_API_KEY to a key that may write and delete sandboxes and snapshots")
    if isinstance(error, DaytonaRateLimitError) or any(word in words.lower() for word in _QUOTA):
        return EpisodeError(
            words, remedy="run fewer sessions at once, or ask Daytona for a higher limit", reason="session_quota"
        )
    return EpisodeError(
        words, remedy="name an image that is there, with its tag, and look at status.daytona.io", reason=reason
    )


def _make_client() -> AsyncDaytona:
    """Return a client with the key in the environment. Raises :class:`~headrace.base.errors.EnvError` without a key."""
    from daytona import AsyncDaytona, DaytonaConfig, DaytonaError

    try:
        with warnings.catch_warnings():  # the client reads its own deprecated setting
            warnings.simplefilter("ignore", DeprecationWarning)
            return AsyncDaytona(DaytonaConfig(connection_pool_maxsize=None))  # each session keeps a connection
    except DaytonaError as error:
        raise EnvError(f"Daytona cannot be used: {describe_error(error)}", remedy="set DAYTONA_API_KEY") from error


async def open_daytona(readable: Sequence[str] = (), **options: Any) -> DaytonaDriver:
    """Open the driver of Daytona with the settings ``options``. ``readable`` must be empty, because a provider's
    machine cannot read paths of this machine."""
    settings = validate_driver_settings("daytona", DaytonaSettings, options)
    refuse_readable("daytona", readable)
    refuse_missing("daytona")
    client = _make_client()
    driver = DaytonaDriver(settings, client)
    try:
        await driver.connect()
    except BaseException:
        await ignore_errors(client.close())
        raise
    return driver
