"""The base of drivers whose service stores snapshots itself, for example as images of docker.

    KeepingDriver ── begin: a session from an image or a snapshot ── keep: store a snapshot ── remove: delete it

Each stored snapshot has a reference count: one for the snapshot object of the caller, and one for each session and each
snapshot that is built on it. The driver deletes a snapshot when its count is zero.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from headrace.base.errors import ConfigError
from headrace.wings.sandboxes.base import (
    SandboxDriver,
    SandboxSnapshot,
    SandboxSpec,
    make_unusable_snapshot_error,
    refuse_invalid,
)
from headrace.wings.sandboxes.served.owners import make_owner_name
from headrace.wings.sandboxes.served.session import ServedSession

S = TypeVar("S", bound="KeptSession")
_NUMBERS = count()
"""The numbers in the names of sessions and snapshots, unique among the drivers of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFiles:
    """The files of a snapshot that the service stores."""

    name: str
    """The service's name or id of the snapshot."""
    below: str
    """The name of the snapshot from which the session was forked; empty if it started from an image."""
    driver: KeepingDriver
    """The driver that made the snapshot."""


class KeptSession(ServedSession):
    """A session whose snapshots are stored by the service."""

    def __init__(self, driver: KeepingDriver, spec: SandboxSpec, name: str, below: str) -> None:
        """Create a session of ``driver`` with the settings ``spec``, whose container or machine is named ``name``.
        ``below`` is the name of the snapshot from which the session is forked; empty if it starts from an image."""
        super().__init__(spec)
        self.name = name
        self.below = below
        self.machine: Any = None
        """The machine as an object of the service's client; ``None`` if the driver needs none."""
        self._driver = driver

    async def take_files(self) -> KeptFiles:
        """Store a snapshot of the files with the service."""
        return await self._driver.keep_files(self)

    async def forget(self) -> None:
        """Remove the session from the driver's records."""
        await self._driver.forget(self)


class KeepingDriver(SandboxDriver):
    """A driver whose sessions start from images, or from snapshots that the service stores."""

    def __init__(self, kind: str, image: str, missing: Mapping[str, str]) -> None:
        """Create a driver of ``kind`` whose sessions start from ``image`` unless their spec names another image.
        ``missing`` are the guards that the service lacks, each with the reason."""
        self.kind = kind
        self.owner = make_owner_name()
        """The name of this process, with which sessions and snapshots are labelled."""
        self.missing: dict[str, str] = dict(missing)
        self._image = image
        self._sessions: set[KeptSession] = set()
        """The sessions that were started and have not ended."""
        self._uses: Counter[str] = Counter()
        """Reference count of each stored snapshot, by name."""

    @abstractmethod
    async def begin(self, spec: SandboxSpec, origin: str, *, below: str) -> KeptSession:
        """Return a session with the settings ``spec`` of the image or snapshot ``origin``, after its server's greeting.
        ``below`` is the snapshot's name; empty for an image. The implementation calls :meth:`enter` before the service
        creates anything."""

    @abstractmethod
    async def keep(self, session: KeptSession, name: str) -> str:
        """Let the service store the files of a session. Return the service's name of the snapshot, which may be
        ``name``."""

    @abstractmethod
    async def remove(self, kept: str) -> None:
        """Delete the snapshot ``kept``. Errors are ignored, because a later driver deletes it, or it expires."""

    async def start(self, spec: SandboxSpec) -> KeptSession:
        """Start a session from the image of ``spec`` or of the driver, and make its directory."""
        self.refuse_closed()
        refuse_invalid(spec)
        session = await self.begin(spec, choose_image(self.kind, spec, self._image), below="")
        await session.prepare()
        return session

    async def fork(self, snapshot: SandboxSnapshot) -> KeptSession:
        """Start a session from a snapshot."""
        self.refuse_closed()
        files = self._get_files(snapshot)
        if snapshot.released or files.name not in self._uses:
            raise make_unusable_snapshot_error()
        session = await self.begin(snapshot.spec, files.name, below=files.name)
        session.directory, session.variables = snapshot.directory, dict(snapshot.variables)
        return session

    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Release a snapshot; the service deletes it as soon as no session and no other snapshot is built on it."""
        if not snapshot.released:
            files = self._get_files(snapshot)
            snapshot.released = True
            await self._drop(files.name)
            await self._drop(files.below)

    def _get_files(self, snapshot: SandboxSnapshot) -> KeptFiles:
        """Return the files of a snapshot. Raises :class:`~headrace.base.errors.EpisodeError` if they belong to another
        driver."""
        files = snapshot.files
        if not isinstance(files, KeptFiles) or files.driver is not self:
            raise make_unusable_snapshot_error()
        return files

    async def close(self) -> None:
        """End all sessions, and delete all snapshots."""
        self.closed = True
        await asyncio.gather(*(session.give_up("its driver was closed") for session in list(self._sessions)))
        kept, self._uses = list(self._uses), Counter()
        for name in reversed(kept):
            await self.remove(name)

    async def keep_files(self, session: KeptSession) -> KeptFiles:
        """Let the service store the present files of a session, count the snapshot, and return its name."""
        name = await self.keep(session, f"{self.owner}-{next(_NUMBERS)}")
        self._uses[name] = 1
        if session.below:
            self._uses[session.below] += 1
        return KeptFiles(name=name, below=session.below, driver=self)

    def next_name(self) -> str:
        """Return a new name for a session's container or machine."""
        return f"headrace-{self.owner}-{next(_NUMBERS)}"

    def enter(self, session: S) -> S:
        """Record a session that is about to start, and return it."""
        if session.below:
            self._uses[session.below] += 1
        self._sessions.add(session)
        return session

    async def forget(self, session: KeptSession) -> None:
        """Remove an ended session from the records, which frees the snapshot that it was forked from."""
        if session in self._sessions:
            self._sessions.remove(session)
            await self._drop(session.below)

    async def _drop(self, kept: str) -> None:
        """Remove one reference of a snapshot, and delete the snapshot after the last reference."""
        if kept in self._uses:
            self._uses[kept] -= 1
            if not self._uses[kept]:
                del self._uses[kept]
                await self.remove(kept)


def choose_image(kind: str, spec: SandboxSpec, image: str) -> str:
    """Return the name of the image of a session of ``kind``: the image of ``spec``, or the driver's ``image``. Raises
    :class:`~headrace.base.errors.ConfigError` if both are empty."""
    if not spec.image and not image:
        raise ConfigError(
            f"a session of kind {kind!r} has no image", remedy="set the driver's image, or that of the spec"
        )
    return spec.image or image
