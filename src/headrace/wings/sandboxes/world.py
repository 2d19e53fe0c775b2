"""The worlds of tasks: sessions in which the environment of a task directory has been made.

first episode of a task:  start ─▶ steps of the environment ─▶ snapshot, which is kept
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
    """What the worlds of a run have in common."""

    kind: str
    """The kind of sandbox."""
    readable: tuple[str, ...]
    """Paths of this machine that sessions can read."""
    limits: SandboxLimits
    """The most that a task may have."""
    kept: int
    """The number of environments whose snapshots are kept."""
    episodes: int = 64
    """The number of episodes that have ended whose moments are kept for branches."""
    options: str = "{}"
    """The settings of the driver, as JSON."""
    images: bool = False
    """Whether sessions begin in the images that tasks name."""
    repositories: str = ""
    """The folder of the repositories of tasks that are rows, where no image has them."""
    loopback: bool = False
    """Whether sessions have a loopback network."""
    forwards: tuple[tuple[int, str], ...] = ()
    """The ways out of sessions: a port of their 127.0.0.1, and the address to which it leads. Sessions of drivers
    without such ways do not get them."""


class Worlds:
    """The worlds of the tasks that one process attempts, each made once and forked for every episode."""

    def __init__(self, config: WorldConfig) -> None:
        """Make worlds as ``config`` says."""
        self._config = config
        self._driver: SandboxDriver | None = None
        self._opening = asyncio.Lock()
        self._made: OrderedDict[str, SandboxSnapshot] = OrderedDict()
        self._making: dict[str, asyncio.Lock] = {}
        self._failed: dict[str, EpisodeError] = {}
        self._moments = MomentStore(config.episodes)

    async def attempt(
        self, key: str, task: TaskDirectory, *, seed: int = 0, kind: AttemptKind = AttemptKind.ALONE
    ) -> ForkedWorld:
        """Return the world of one attempt at ``task``, which ``key`` names. That of a branch begins as its origin with
        the same ``seed`` did, if the moments of that one are kept; all others begin in the environment of the task.
        Raises :class:`~headrace.base.errors.EpisodeError` where that cannot be made."""
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
        """Return a session in the world of ``task``, which ``key`` names. A driver that is lost is opened again, once.
        Raises :class:`~headrace.base.errors.EpisodeError` where the environment cannot be made."""
        driver = await self.open()
        try:
            return await self._enter(driver, key, task)
        except DriverLost:
            await self._give_up(driver)
            return await self._enter(await self.open(), key, task)

    async def _enter(self, driver: SandboxDriver, key: str, task: TaskDirectory) -> SandboxSession:
        """Return a session in the world of ``task``. An environment that could not be made fails all who waited for it;
        the next one tries again."""
        before = self._failed.get(key)
        async with self._making.setdefault(key, asyncio.Lock()):
            failed = self._failed.get(key)
            if failed is not None and failed is not before:
                raise EpisodeError(failed.problem, remedy=failed.remedy, reason=failed.reason)
            if key not in self._made:
                try:
                    self._made[key] = await self._make(driver, task)
                except EpisodeError as error:
                    self._failed[key] = error
                    raise
            self._made.move_to_end(key)
            session = await driver.fork(self._made[key])
        while len(self._made) > self._config.kept:
            _, oldest = self._made.popitem(last=False)
            await driver.release(oldest)
        return session

    async def _give_up(self, driver: SandboxDriver) -> None:
        """Forget a driver that is lost, with all that it has made."""
        async with self._opening:
            if self._driver is not driver:
                return  # another episode has done it
            self._driver = None
            made, self._made = list(self._made.values()), OrderedDict()
            with suppress(HeadraceError, OSError):  # of what is lost, only what lies here can be given up
                await self._moments.clear()
                for snapshot in made:
                    await driver.release(snapshot)
                await driver.close()

    async def close(self) -> None:
        """End all sessions, and give up all snapshots."""
        if self._driver is not None:
            await self._moments.clear()
            while self._made:
                await self._driver.release(self._made.popitem()[1])
            await self._driver.close()

    async def open(self) -> SandboxDriver:
        """Return the driver, which the first call opens."""
        async with self._opening:
            if self._driver is None:
                self._refuse_absent()
                self._driver = await open_sandboxes(
                    self._config.kind, self._config.readable, json.loads(self._config.options)
                )
        return self._driver

    def _refuse_absent(self) -> None:
        """Raise :class:`~headrace.base.errors.EnvError` for a path that sessions are to read and that is not there."""
        if absent := [path for path in self._config.readable if not Path(path).exists()]:
            raise EnvError(
                f"env.options.readable={absent} names what is not on this machine", remedy="correct it, or leave it out"
            )

    async def _make(self, driver: SandboxDriver, task: TaskDirectory) -> SandboxSnapshot:
        """Make the environment of a task, and return its snapshot."""
        most = self._config.limits
        life_s = task.agent_s + task.tests_s + task.build_s
        limits = replace(
            most,
            cpu_s=math.ceil(life_s),  # the time of each command bounds it before
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
    """Return the worlds of this event loop with this configuration: all its episodes share the environments."""
    key = (config, id(asyncio.get_running_loop()))
    return _SHARED.setdefault(key, Worlds(config))


async def close_shared_worlds() -> None:
    """End the sandboxes of this event loop. A process that ends does so by itself."""
    here = id(asyncio.get_running_loop())
    for key in [key for key in _SHARED if key[1] == here]:
        await _SHARED.pop(key).close()


def now_s() -> float:
    """Return the seconds of a clock that never goes back."""
    return RealClock().now()
