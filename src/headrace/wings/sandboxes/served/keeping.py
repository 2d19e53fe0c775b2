"""The books of drivers whose service keeps snapshots: as images, or as what else it calls them.

    KeepingDriver ── begin: a session of an image, or of what was kept ── keep ── remove

What is kept counts once for itself, and once for each session and each snapshot that is built on it. It is removed when
none is left.
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
    refuse_invalid,
    unusable_snapshot,
)
from headrace.wings.sandboxes.served.owners import owner_name
from headrace.wings.sandboxes.served.session import ServedSession

S = TypeVar("S", bound="KeptSession")
_NUMBERS = count()
"""The numbers in the names of what the drivers of this process make: they carry one owner's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFiles:
    """The files of a snapshot, which the service keeps."""

    name: str
    """What the service calls them."""
    below: str
    """The snapshot with which the session had begun; empty if none."""
    driver: KeepingDriver
    """The driver that had the service keep them."""


class KeptSession(ServedSession):
    """A session whose snapshots the service keeps."""

    def __init__(self, driver: KeepingDriver, spec: SandboxSpec, name: str, below: str) -> None:
        """Describe a session whose container or machine carries ``name``; it continues the snapshot ``below``."""
        super().__init__(spec)
        self.name = name
        self.below = below
        self.machine: Any = None
        """The machine, as the service's client knows it, if the driver needs it."""
        self._driver = driver

    async def take_files(self) -> KeptFiles:
        """Have the service keep the files."""
        return await self._driver.keep_files(self)

    async def left(self) -> None:
        """Take the session out of the books."""
        await self._driver.forget(self)


class KeepingDriver(SandboxDriver):
    """Sessions that begin as images, and as what was kept of other sessions."""

    def __init__(self, kind: str, image: str, missing: Mapping[str, str]) -> None:
        """Describe a driver whose sessions begin as ``image`` unless their spec names one."""
        self.kind = kind
        self.owner = owner_name()
        """The name of this process, which what it makes carries."""
        self.missing: dict[str, str] = dict(missing)
        self._image = image
        self._sessions: set[KeptSession] = set()
        self._uses: Counter[str] = Counter()

    @abstractmethod
    async def begin(self, spec: SandboxSpec, origin: str, *, below: str) -> KeptSession:
        """Return a session of an image, or of the snapshot ``below``, whose server has greeted; it is entered into the
        books before the service makes anything."""

    @abstractmethod
    async def keep(self, session: KeptSession, name: str) -> str:
        """Have the service keep the files of a session, under a name if it names them. Return what it calls them."""

    @abstractmethod
    async def remove(self, kept: str) -> None:
        """Remove what was kept. An error is swallowed: a later driver removes it, or its time is over."""

    async def start(self, spec: SandboxSpec) -> KeptSession:
        """Begin a session of the image, and make its directory."""
        self.refuse_closed()
        refuse_invalid(spec)
        session = await self.begin(spec, image_of(self.kind, spec, self._image), below="")
        await session.prepare()
        return session

    async def fork(self, snapshot: SandboxSnapshot) -> KeptSession:
        """Begin a session of a snapshot."""
        self.refuse_closed()
        files = self._files_of(snapshot)
        if snapshot.released or files.name not in self._uses:
            raise unusable_snapshot()
        session = await self.begin(snapshot.spec, files.name, below=files.name)
        session.directory, session.variables = snapshot.directory, dict(snapshot.variables)
        return session

    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Have a snapshot removed as soon as no fork is built on it."""
        if not snapshot.released:
            files = self._files_of(snapshot)
            snapshot.released = True
            await self._drop(files.name)
            await self._drop(files.below)

    def _files_of(self, snapshot: SandboxSnapshot) -> KeptFiles:
        """Return the files of a snapshot of this driver. Raises :class:`~headrace.base.errors.EpisodeError` for those
        of another one."""
        files = snapshot.files
        if not isinstance(files, KeptFiles) or files.driver is not self:
            raise unusable_snapshot()
        return files

    async def close(self) -> None:
        """End all sessions, and have all snapshots removed."""
        self.closed = True
        await asyncio.gather(*(session.give_up("its driver was closed") for session in list(self._sessions)))
        kept, self._uses = list(self._uses), Counter()
        for name in reversed(kept):
            await self.remove(name)

    async def keep_files(self, session: KeptSession) -> KeptFiles:
        """Return the present files of a session as the service keeps them."""
        name = await self.keep(session, f"{self.owner}-{next(_NUMBERS)}")
        self._uses[name] = 1
        if session.below:
            self._uses[session.below] += 1
        return KeptFiles(name=name, below=session.below, driver=self)

    def next_name(self) -> str:
        """Return a name for what is made for a session."""
        return f"headrace-{self.owner}-{next(_NUMBERS)}"

    def enter(self, session: S) -> S:
        """Take a session into the books, and return it."""
        if session.below:
            self._uses[session.below] += 1
        self._sessions.add(session)
        return session

    async def forget(self, session: KeptSession) -> None:
        """Take a session that has ended out of the books."""
        if session in self._sessions:
            self._sessions.remove(session)
            await self._drop(session.below)

    async def _drop(self, kept: str) -> None:
        """Count one use less of a snapshot, and have it removed after the last one."""
        if kept in self._uses:
            self._uses[kept] -= 1
            if not self._uses[kept]:
                del self._uses[kept]
                await self.remove(kept)


def image_of(kind: str, spec: SandboxSpec, image: str) -> str:
    """Return the image of a session: that of its spec, or that of the driver. Raises
    :class:`~headrace.base.errors.ConfigError` if there is none."""
    if not spec.image and not image:
        raise ConfigError(
            f"a session of kind {kind!r} has no image", remedy="set the driver's image, or that of the spec"
        )
    return spec.image or image
