"""The worlds of tasks. A world is a session in which the environment of a task has been built.

first episode of a task:  start ─▶ steps of the environment ─▶ snapshot, which is cached
every episode:                                                    └─▶ fork ─▶ agent ─▶ tests ─▶ reward
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.errors import EnvError, EpisodeError, HeadraceError
from headrace.base.types.episode import AttemptKind
from headrace.rollout.scoring.sandbox import SandboxLimits
from headrace.wings.sandboxes import (
    DriverLost,
    SandboxDriver,
    SandboxSession,
    SandboxSnapshot,
    SandboxSpec,
    open_sandboxes,
    swe,
)
from headrace.wings.sandboxes.building import build
from headrace.wings.sandboxes.moments import ForkedWorld, MomentStore
from headrace.wings.sandboxes.tasks import TaskDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """The configuration that the worlds of all tasks of a run share."""

    kind: str
    """The kind of sandbox, such as ``jail``."""
    readable: tuple[str, ...]
    """Paths of this machine that sessions can read."""
    limits: SandboxLimits
    """The largest limits of a session; a task may request less memory and disk."""
    kept_environments: int
    """The number of environments whose snapshots are cached."""
    episodes: int = 64
    """The number of ended episodes whose moments are kept for branches."""
    options: str = "{}"
    """The settings of the driver, as JSON."""
    images: bool = False
    """Whether sessions start from the images that tasks name."""
    repositories: str = ""
    """The folder of repositories for tasks that are rows of SWE-bench, if images do not contain the repositories."""
    loopback: bool = False
    """Whether programs in a session can reach each other over 127.0.0.1."""
    forwards: tuple[tuple[int, str], ...] = ()
    """TCP forwards of sessions: pairs of a port of their 127.0.0.1 and the address outside to which it leads. Drivers
    that serve no forwards ignore them."""


class Worlds:
    """The worlds of the tasks of one process. Each environment is built once, and forked for every episode."""

    def __init__(self, config: WorldConfig) -> None:
        """Create worlds with this configuration; the driver is opened at the first use."""
        self._config = config
        self._driver: SandboxDriver | None = None
        """The driver; ``None`` before the first use."""
        self._opening = asyncio.Lock()
        """Held while the driver is opened."""
        self._snapshots: OrderedDict[str, SandboxSnapshot] = OrderedDict()
        """The snapshot of each built environment by its key, the least recently used first."""
        self._build_locks: dict[str, asyncio.Lock] = {}
        """Held while an environment is built, by its key."""
        self._failures: dict[str, EpisodeError] = {}
        """The error of each build that failed while other calls waited for it."""
        self._moments = MomentStore(config.episodes)
        """The moments of the episodes."""

    async def attempt(
        self, key: str, task: TaskDirectory, *, seed: int = 0, kind: AttemptKind = AttemptKind.ALONE
    ) -> ForkedWorld:
        """Return the world of one attempt at ``task``, whose cache key is ``key``. A branch continues from the moments
        of its origin, the attempt with the same ``seed``, if they are kept. Every other attempt begins in the
        environment of the task. Raises :class:`~headrace.base.errors.EpisodeError` if that environment cannot be built.
        ``kind`` says whether the attempt is an origin, a branch, or neither."""
        moments = self._moments.find((key, seed)) if kind is AttemptKind.BRANCH else None
        session = None if moments is not None else await self.enter(key, task)
        if session is not None and kind is AttemptKind.ORIGIN:
            try:
                moments = await self._moments.begin((key, seed), session, await self.open(), task.agent_s)
            except BaseException:
                await session.stop()
                raise
        begin = partial(self.enter, key, task)
        return ForkedWorld(self._moments, (key, seed), session=session, moments=moments, begin=begin, kind=kind)

    async def enter(self, key: str, task: TaskDirectory) -> SandboxSession:
        """Return a new session in the environment of ``task``, whose cache key is ``key``. If the driver's host process
        has ended, the driver is opened again, once. Raises :class:`~headrace.base.errors.EpisodeError` if the
        environment cannot be built."""
        driver = await self.open()
        try:
            return await self._enter(driver, key, task)
        except DriverLost:
            await self._give_up(driver)
            return await self._enter(await self.open(), key, task)

    async def _enter(self, driver: SandboxDriver, key: str, task: TaskDirectory) -> SandboxSession:
        """Return a new session of ``driver`` in the environment of ``task``, whose cache key is ``key`` and which the
        first call builds. If the build fails, the error is raised in all calls that waited for this build; a later call
        tries again."""
        before = self._failures.get(key)
        async with self._build_locks.setdefault(key, asyncio.Lock()):
            failed = self._failures.get(key)
            if failed is not None and failed is not before:
                raise EpisodeError(failed.problem, remedy=failed.remedy, reason=failed.reason)
            if key not in self._snapshots:
                try:
                    self._snapshots[key] = await self._build_snapshot(driver, task)
                except EpisodeError as error:
                    self._failures[key] = error
                    raise
            self._snapshots.move_to_end(key)
            session = await driver.fork(self._snapshots[key])
        while len(self._snapshots) > self._config.kept_environments:
            _, oldest = self._snapshots.popitem(last=False)
            await driver.release(oldest)
        return session

    async def _give_up(self, driver: SandboxDriver) -> None:
        """Close a driver whose host process has ended, and release its snapshots and moments."""
        async with self._opening:
            if self._driver is not driver:
                return  # another episode has done it
            self._driver = None
            snapshots, self._snapshots = list(self._snapshots.values()), OrderedDict()
            with suppress(HeadraceError, OSError):  # releasing fails where the host process is gone
                await self._moments.clear()
                for snapshot in snapshots:
                    await driver.release(snapshot)
                await driver.close()

    async def close(self) -> None:
        """End all sessions, and release all snapshots."""
        if self._driver is not None:
            await self._moments.clear()
            while self._snapshots:
                await self._driver.release(self._snapshots.popitem()[1])
            await self._driver.close()

    async def open(self) -> SandboxDriver:
        """Return the driver of sandboxes. The first call opens it."""
        async with self._opening:
            if self._driver is None:
                self._refuse_absent()
                self._driver = await open_sandboxes(
                    self._config.kind, self._config.readable, json.loads(self._config.options)
                )
        return self._driver

    def _refuse_absent(self) -> None:
        """Raise :class:`~headrace.base.errors.EnvError` if a path of ``readable`` does not exist."""
        if absent := [path for path in self._config.readable if not Path(path).exists()]:
            raise EnvError(
                f"env.options.readable={absent} names what is not on this machine", remedy="correct it, or leave it out"
            )

    async def _build_snapshot(self, driver: SandboxDriver, task: TaskDirectory) -> SandboxSnapshot:
        """Build the environment of ``task`` in a new session of ``driver``, and return its snapshot."""
        most = self._config.limits
        life_s = task.agent_s + task.tests_s + task.build_s
        limits = replace(
            most,
            cpu_s=math.ceil(life_s),  # wall_s of each command is the effective limit
            memory_bytes=min(most.memory_bytes, task.memory_bytes or most.memory_bytes),
            disk_bytes=min(most.disk_bytes, task.disk_bytes or most.disk_bytes),
        )
        forwards = dict(self._config.forwards) if driver.serves_forwards else {}
        spec = SandboxSpec(
            limits=limits,
            life_s=life_s,
            directory=task.directory,
            variables=task.variables,
            image=task.image if self._config.images else "",
            loopback=self._config.loopback or bool(forwards),
            forwards=forwards,
        )
        async with await driver.start(spec) as session:
            if task.named is not None:
                await swe.begin(session, task, "" if spec.image else self._config.repositories)
            await build(session, task)
            return await session.snapshot(end_background=True)


_SHARED: dict[tuple[WorldConfig, int], Worlds] = {}


def shared_worlds(config: WorldConfig) -> Worlds:
    """Return the :class:`Worlds` of the running event loop with this configuration, so that its episodes share
    environments."""
    key = (config, id(asyncio.get_running_loop()))
    return _SHARED.setdefault(key, Worlds(config))


async def close_shared_worlds() -> None:
    """Close the worlds of the running event loop. Without this call the sandboxes end with the process."""
    here = id(asyncio.get_running_loop())
    for key in [key for key in _SHARED if key[1] == here]:
        await _SHARED.pop(key).close()


def now_s() -> float:
    """Return the time of the monotonic clock, in seconds."""
    return RealClock().now()
