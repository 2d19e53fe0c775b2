"""The base of drivers of remote services that cannot store snapshots: a snapshot is a copy of the changed files
(copies.py)."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from headrace.base.config import Section
from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import (
    SandboxDriver,
    SandboxSnapshot,
    SandboxSpec,
    make_unusable_snapshot_error,
    refuse_invalid,
)
from headrace.wings.sandboxes.served.copies import ChangedFiles, FileListing, list_files, put_copy, take_copy
from headrace.wings.sandboxes.served.keeping import choose_image
from headrace.wings.sandboxes.served.session import ServedSession

OWN_BYTES = 64 * MIB
"""The memory of a sandbox beyond the limit of its session, for the server, in bytes."""


class RemoteSettings(Section):
    """The settings that all drivers of remote services have: ``env.options.driver``."""

    image: str = ""
    """The image of sessions whose task does not name an image."""
    snapshots: bool = True
    """Whether sessions can be copied. If so, each start lists the files of the image."""
    start_s: float = 300.0
    """The longest time of a start in seconds, which includes the download of an image."""
    call_s: float = 30.0
    """The longest time of one call of the service in seconds."""


class RemoteSession(ServedSession):
    """A session in a sandbox that a service runs."""

    def __init__(self, driver: RemoteDriver, spec: SandboxSpec, image: str) -> None:
        """Create a session of ``driver`` with the settings ``spec``, which starts from ``image``."""
        super().__init__(spec)
        self.image = image
        """The image, by the most exact name that the service reports, such as a digest."""
        self.initial_files: FileListing | None = None
        """The list of the files at the start of the session; ``None`` if the session cannot be copied."""
        self._driver = driver

    async def take_files(self) -> ChangedFiles:
        """Return a copy of the files that the session has changed. Raises :class:`~headrace.base.errors.EpisodeError`
        if the setting ``snapshots`` is false."""
        if self.initial_files is None:
            raise EpisodeError(
                "a session of a driver with snapshots=false cannot be copied",
                remedy="set snapshots = true in the settings of the driver",
                reason="session_snapshot",
            )
        largest_bytes = self._driver.largest_bytes(self.spec)
        files = await take_copy(self, self.initial_files, self.image, largest_bytes=largest_bytes)
        self._driver.keep(files)
        return files

    async def forget(self) -> None:
        """Remove the session from its driver's records."""
        self._driver.forget(self)


class RemoteDriver(SandboxDriver):
    """A driver of sessions in sandboxes of a service, whose snapshots are copies of changed files."""

    def __init__(self, kind: str, settings: RemoteSettings) -> None:
        """Create a driver of sandboxes of ``kind`` with ``settings``."""
        self.kind = kind
        self.settings = settings
        self.missing: dict[str, str] = {}
        self._sessions: set[RemoteSession] = set()
        """The sessions that were started and have not ended."""
        self._copies: set[ChangedFiles] = set()
        """The copies that were not released."""

    @abstractmethod
    async def begin(self, spec: SandboxSpec, image: str) -> RemoteSession:
        """Return a session with the settings ``spec`` of ``image``, after its server's greeting. The implementation
        calls :meth:`enter` before the service creates anything."""

    @abstractmethod
    def largest_bytes(self, spec: SandboxSpec) -> int:
        """Return the size in bytes of the largest file that a copy of a session with the settings ``spec`` can
        contain."""

    async def start(self, spec: SandboxSpec) -> RemoteSession:
        """Start a sandbox from the image of ``spec`` or of the settings, list its files, and create the session's
        directory. Raises :class:`~headrace.base.errors.EpisodeError` if that fails."""
        self.refuse_closed()
        refuse_invalid(spec)
        session = await self._begin_listed(spec, choose_image(self.kind, spec, self.settings.image))
        await session.prepare()
        return session

    async def fork(self, snapshot: SandboxSnapshot) -> RemoteSession:
        """Start a sandbox from the image of a snapshot, and write the changed files into it. Raises
        :class:`~headrace.base.errors.EpisodeError` if the image has changed since."""
        self.refuse_closed()
        files = snapshot.files
        if snapshot.released or not isinstance(files, ChangedFiles) or files not in self._copies:
            raise make_unusable_snapshot_error()
        image = snapshot.spec.image or self.settings.image
        session = await self._begin_listed(snapshot.spec, image)
        try:
            if session.image != files.image:
                raise EpisodeError(
                    f"the image {image!r} has changed since the snapshot: {files.image!r}, now {session.image!r}",
                    remedy="name images by their digest",
                    reason="session_snapshot",
                )
            await put_copy(session, files)
        except BaseException:
            await session.give_up("its files could not be made")
            raise
        session.directory, session.variables = snapshot.directory, dict(snapshot.variables)
        return session

    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Delete the copy of a snapshot."""
        if not snapshot.released and not self.closed:
            files = snapshot.files
            if not isinstance(files, ChangedFiles) or files not in self._copies:
                raise make_unusable_snapshot_error()
            snapshot.released = True
            self._copies.discard(files)
            files.release()

    async def close(self) -> None:
        """End all sessions, and delete all copies."""
        self.closed = True
        await asyncio.gather(*(session.give_up("its driver was closed") for session in list(self._sessions)))
        for files in self._copies:
            files.release()
        self._copies.clear()

    def keep(self, files: ChangedFiles) -> None:
        """Record the copy ``files``, which :meth:`close` deletes."""
        self._copies.add(files)

    def enter(self, session: RemoteSession) -> None:
        """Record a session that is about to start, which :meth:`close` ends."""
        self._sessions.add(session)

    def forget(self, session: RemoteSession) -> None:
        """Remove an ended session from the records."""
        self._sessions.discard(session)

    async def _begin_listed(self, spec: SandboxSpec, image: str) -> RemoteSession:
        """Start a session, and list its files before a command can change them."""
        session = await self.begin(spec, image)
        session.missing = dict(self.missing)
        if self.settings.snapshots:
            try:
                session.initial_files = await list_files(session)
            except BaseException:
                await session.give_up("its files could not be listed")
                raise
        return session
