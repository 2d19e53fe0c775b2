"""The driver of sessions in sandboxes of Modal, with Modal's client (``pip install 'headrace[modal]'``).

    ModalDriver ── Sandbox.create ── machine of an image ── exec(text=False) ══ server.sh
                ── snapshot_filesystem: an image of its files; a fork is a machine of that image

The client reads its token from ``MODAL_TOKEN_ID`` and ``MODAL_TOKEN_SECRET``, or from its own settings file. After a
lost connection it resumes a stream at the same byte, so no output is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import EnvError, EpisodeError, HeadraceError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.served.containers import OWN_BYTES
from headrace.wings.sandboxes.served.hosted import (
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
    import modal

SENT_BYTES = 1 << 20
"""The largest number of bytes of one call that sends input; the client refuses more than 2 MiB."""
_MISSING = {"disk": "Modal cannot bound the files of a session below the disk of its sandboxes"}
"""The guards that the service lacks."""


class ModalSettings(Section):
    """The settings of sandboxes of Modal: ``env.options.driver``."""

    image: str = ""
    """The image of sessions whose task does not name an image: a name in a registry, or an id of Modal (im-...)."""
    app: str = "headrace"
    """The name of the Modal app to which the sandboxes belong; it is created if it does not exist."""
    network: bool = False
    """Whether sessions reach the network."""
    cpus: float | None = Field(default=None, gt=0)
    """The number of processors that one sandbox may use; unset: Modal's default."""
    rights: bool = False
    """Whether commands keep the rights of root in the sandbox; if not, they have no capabilities."""
    snapshot_s: int = Field(default=86400, ge=60)
    """The time after which Modal removes a snapshot that was not released, in seconds."""


class ModalChannel(HostedChannel):
    """The standard streams of the server in a sandbox."""

    def __init__(self, sandbox: modal.Sandbox) -> None:
        """Create a channel to a sandbox, in which :meth:`run` starts the server."""
        super().__init__()
        self._sandbox = sandbox
        self._process: Any = None
        """The client's handle of the launcher; ``None`` before its start."""
        self._output: AsyncGenerator[bytes, None] | None = None
        """The launcher's output; ``None`` before its start."""

    async def run(self, session: HostedSession, settings: ModalSettings) -> None:
        """Start the launcher for ``session`` with ``settings``."""
        from modal.stream_type import StreamType

        words = make_launcher_arguments(session.spec, encoded=False, rights=settings.rights)
        self._process = await self._sandbox.exec.aio(
            "bash", *words, text=False, workdir="/", stderr=StreamType.DEVNULL
        )  # fmt: skip
        self._output = aiter(self._process.stdout)

    async def write(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server, in parts."""
        for start in range(0, len(data), SENT_BYTES):
            self._process.stdin.write(data[start : start + SENT_BYTES])
            await self._process.stdin.drain.aio()

    async def piece(self) -> bytes:
        """Return the next bytes of the server's output; empty at the end."""
        assert self._output is not None
        try:
            return await anext(self._output)
        except StopAsyncIteration:
            return b""
        except Exception as error:  # noqa: BLE001 - a boundary: the session reports how it ended
            self._ended = self._ended or describe_error(error)
            return b""

    async def close(self) -> None:
        """End the sandbox."""
        await ignore_errors(self._sandbox.terminate.aio())
        if self._output is not None:
            await ignore_errors(self._output.aclose())
        await ignore_errors(self._sandbox.detach.aio())  # type: ignore[no-untyped-call]


class ModalDriver(HostedDriver):
    """A driver of sessions in sandboxes of Modal. Create it with :func:`open_modal`."""

    def __init__(self, settings: ModalSettings) -> None:
        """Create a driver with ``settings``."""
        super().__init__("modal", settings.image, _MISSING)
        self.settings = settings
        self._app: modal.App | None = None
        """The Modal app of the sandboxes; ``None`` before the driver is connected."""

    async def create(self, session: HostedSession, origin: str) -> ModalChannel:
        """Create a sandbox for ``session`` from the image or snapshot ``origin``, and start the launcher in it."""
        import modal

        memory = (session.spec.limits.memory_bytes + OWN_BYTES) // MIB
        make_image = modal.Image.from_id if session.below or origin.startswith("im-") else modal.Image.from_registry
        try:
            sandbox = await modal.Sandbox.create.aio(
                "sleep",
                "infinity",
                app=self._app,
                image=make_image(origin),
                tags=self.tags(session),
                timeout=round_up_lifetime(session.spec),
                cpu=None if self.settings.cpus is None else (self.settings.cpus, self.settings.cpus),
                memory=(memory, memory),
                block_network=not self.settings.network,
            )
        except Exception as error:
            raise _make_refusal(error, f"a session cannot start from {origin!r}") from error
        session.machine = sandbox
        channel = ModalChannel(sandbox)
        try:
            await channel.run(session, self.settings)
        except BaseException as error:
            await asyncio.shield(channel.close())
            if isinstance(error, Exception):
                raise _make_refusal(error, f"a session cannot start in a sandbox of {origin!r}") from error
            raise
        return channel

    async def keep(self, session: KeptSession, name: str) -> str:
        """Make an image of the files of ``session``, and return its id; the service gives no ``name`` to it."""
        try:
            image = await session.machine.snapshot_filesystem.aio(ttl=self.settings.snapshot_s)
        except Exception as error:
            raise _make_refusal(error, "the files of a session cannot be kept", reason="session_snapshot") from error
        return str(image.object_id)

    async def remove(self, kept: str) -> None:
        """Delete the image ``kept`` of a snapshot."""
        import modal.experimental

        await ignore_errors(modal.experimental.image_delete.aio(kept))

    async def sweep(self) -> None:
        """End sandboxes of dead owners. Images of snapshots expire by themselves (``snapshot_s``)."""
        import modal

        try:
            self._app = await modal.App.lookup.aio(self.settings.app, create_if_missing=True)
            async for sandbox in modal.Sandbox.list.aio(app_id=self._app.app_id, tags={"headrace": "session"}):
                if is_dead((await sandbox.get_tags.aio()).get(LABEL, "")):
                    await sandbox.terminate.aio()
        except Exception as error:
            raise EnvError(
                f"Modal cannot be used: {describe_error(error)}",
                remedy="set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, and look at status.modal.com",
            ) from error


def _make_refusal(error: Exception, what: str, *, reason: str = "session_start") -> HeadraceError:
    """Return the error to raise for an ``error`` of the client, with the client's message and a remedy; ``what`` says
    what failed, and ``reason`` is the reason of the episode's failure."""
    from modal.exception import AuthError, PermissionDeniedError, ResourceExhaustedError

    words = f"{what}: {describe_error(error)}"
    if isinstance(error, AuthError | PermissionDeniedError):
        return EnvError(words, remedy="set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET to a token of your workspace")
    if isinstance(error, ResourceExhaustedError):
        return EpisodeError(
            words, remedy="run fewer sessions at once, or ask Modal for a higher limit", reason="session_quota"
        )
    return EpisodeError(words, remedy="name an image that is there, and look at status.modal.com", reason=reason)


async def open_modal(readable: Sequence[str] = (), **options: Any) -> ModalDriver:
    """Open the driver of Modal with the settings ``options``. ``readable`` must be empty, because a provider's machine
    cannot read paths of this machine."""
    settings = validate_driver_settings("modal", ModalSettings, options)
    refuse_missing("modal")
    refuse_readable("modal", readable)
    driver = ModalDriver(settings)
    await driver.connect()
    return driver
