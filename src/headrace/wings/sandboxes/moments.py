"""The moments of episodes. A moment is the result of one command of an attempt, with a snapshot of the session after
it. Branches of the episode continue from the moments of their origin.

    origin   begin ─▶ command 1 ─▶ command 2 ─▶ command 3 ─▶ tests
               │          │            │            │             a moment after each of them
    branch     └─ its model gives the same answers: it reads the origin's results, and no session runs ──────┐
                       another command, or the tests: a session is forked from the last common moment ◀──────┘

No snapshot can be taken while processes run in the background. Such a moment is restored from the moment before it:
its command runs again, and must print the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from headrace.base.errors import EpisodeError
from headrace.base.types.episode import AttemptKind
from headrace.wings.sandboxes.base import DriverLost, SandboxDriver, SandboxSession, SandboxSnapshot

_WITHOUT_SNAPSHOT = ("session_busy", "session_snapshot")
"""The reasons of errors after which a moment has no snapshot, and the episode continues."""
BeginWorld = Callable[[], Awaitable[SandboxSession]]
"""A function that returns a session at the beginning of an episode."""
RunCommand = Callable[[SandboxSession, str], Awaitable[str]]
"""A function that runs a command of the agent in a session, and returns the observation for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMoment:
    """The state of an episode after one command, or at its beginning."""

    command: str
    """The command; empty at the beginning."""
    observation: str
    """The result of the command, as the model has read it."""
    snapshot: SandboxSnapshot | None
    """The snapshot of the session; ``None`` if none could be taken."""
    left_s: float
    """The time that the agent had left, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeMoments:
    """The moments of one episode. The origin adds moments, and its branches read them."""

    driver: SandboxDriver
    """The driver that made the snapshots."""
    moments: list[WorldMoment] = field(default_factory=list)
    """The moments in order; the first is the beginning of the episode."""
    num_users: int = 1
    """The number of running attempts that may read them."""

    async def add(self, session: SandboxSession, *, command: str, observation: str, left_s: float) -> None:
        """Add a moment with the present state of the origin's session, after ``command`` with the result
        ``observation``, when the agent had ``left_s`` seconds left."""
        snapshot: SandboxSnapshot | None = None
        try:
            snapshot = await session.snapshot()
        except EpisodeError as error:
            if error.reason not in _WITHOUT_SNAPSHOT:
                raise
        self.moments.append(WorldMoment(command=command, observation=observation, snapshot=snapshot, left_s=left_s))

    async def resume(self, number: int, run: RunCommand, begin: BeginWorld) -> SandboxSession:
        """Return a session in the state of the moment ``number``: fork the nearest earlier snapshot, and repeat the
        commands after it with ``run``. If the driver and its snapshots are lost, repeat all commands in the session of
        ``begin``. Raises :class:`~headrace.base.errors.EpisodeError` if a repeated command prints something else."""
        first = max(place for place in range(number + 1) if self.moments[place].snapshot is not None)
        snapshot = self.moments[first].snapshot
        assert snapshot is not None
        try:
            session = None if self.driver.closed else await self.driver.fork(snapshot)
        except DriverLost:
            session = None
        if session is None:
            first, session = 0, await begin()
        try:
            for moment in self.moments[first + 1 : number + 1]:
                if await run(session, moment.command) != moment.observation:
                    raise EpisodeError(
                        f"the command {moment.command[:200]!r} has another result than in the episode that is branched",
                        remedy="end processes in the background before the next command, so that a snapshot can be "
                        "taken, or have commands print the same when they are repeated",
                        reason="world_differs",
                    )
        except BaseException:
            await session.stop()
            raise
        return session

    async def release(self) -> None:
        """Release all snapshots."""
        for moment in self.moments:
            if moment.snapshot is not None:
                await self.driver.release(moment.snapshot)


class MomentStore:
    """The moments of the episodes of one process: of all running episodes, and of the latest ended episodes."""

    def __init__(self, most_ended: int) -> None:
        """Create a store that keeps the moments of at most ``most_ended`` ended episodes."""
        self._most_ended = most_ended
        self._kept: OrderedDict[Hashable, EpisodeMoments] = OrderedDict()
        """The moments of each episode by its key, the one that ended longest ago first."""

    async def begin(
        self, key: Hashable, session: SandboxSession, driver: SandboxDriver, left_s: float
    ) -> EpisodeMoments:
        """Create the moments of an origin, with the present state of ``session`` as the first, and store them under
        ``key``. They replace the moments of an earlier attempt. ``driver`` makes the snapshots, and the agent has
        ``left_s`` seconds."""
        created = EpisodeMoments(driver=driver)
        await created.add(session, command="", observation="", left_s=left_s)
        replaced = self._kept.pop(key, None)
        self._kept[key] = created
        if replaced is not None and not replaced.num_users:
            await replaced.release()
        return created

    def find(self, key: Hashable) -> EpisodeMoments | None:
        """Return the moments under ``key`` for one more attempt, which calls :meth:`leave` at its end; ``None`` if they
        are not kept or have no first snapshot."""
        found = self._kept.get(key)
        if found is None or not found.moments or found.moments[0].snapshot is None:
            return None
        found.num_users += 1
        return found

    async def leave(self, key: Hashable, moments: EpisodeMoments) -> None:
        """End the use of the moments under ``key`` by one attempt. Release the moments that ended longest ago beyond
        the number to keep."""
        moments.num_users -= 1
        if self._kept.get(key) is not moments:  # another attempt has replaced them
            if not moments.num_users:
                await moments.release()
            return
        self._kept.move_to_end(key)
        ended = [each for each, kept in self._kept.items() if not kept.num_users]
        for each in ended[: max(0, len(ended) - self._most_ended)]:
            await self._kept.pop(each).release()

    async def clear(self) -> None:
        """Release the moments of all episodes."""
        while self._kept:
            await self._kept.popitem()[1].release()


class ForkedWorld:
    """The world of one attempt. A branch has no session until its first command that differs from its origin's."""

    def __init__(
        self,
        store: MomentStore,
        key: Hashable,
        *,
        session: SandboxSession | None,
        moments: EpisodeMoments | None,
        begin: BeginWorld,
        kind: AttemptKind,
    ) -> None:
        """Create the world of an attempt of ``kind``, which begins in ``session``; if that is ``None``, as a branch at
        the beginning of ``moments``. ``store`` keeps the moments under ``key``. ``begin`` returns a new session at the
        beginning of the episode."""
        self.session = session
        """The session; ``None`` while the attempt repeats its origin."""
        self._store = store
        self._key = key
        self._moments = moments
        self._begin = begin
        self._kind = kind
        self._number = 0
        """Index of the present moment among the moments of the origin."""

    def repeat(self, command: str) -> WorldMoment | None:
        """Return the next moment of the origin if its command is ``command`` too, and continue from there. Return
        ``None`` if the attempt has a session of its own, or the commands differ."""
        if self.session is not None or self._moments is None:
            return None
        if self._number + 1 >= len(self._moments.moments) or self._moments.moments[self._number + 1].command != command:
            return None
        self._number += 1
        return self._moments.moments[self._number]

    async def enter(self, run: RunCommand) -> SandboxSession:
        """Return the session. If there is none, fork it from the last common moment; ``run`` repeats commands as in
        :meth:`EpisodeMoments.resume`."""
        if self.session is None:
            assert self._moments is not None
            self.session = await self._moments.resume(self._number, run, self._begin)
        return self.session

    async def keep(self, *, command: str, observation: str, left_s: float) -> None:
        """Store the present moment if the attempt is an origin; ``observation`` is the result of ``command``. The agent
        has ``left_s`` seconds left."""
        if self._kind is AttemptKind.ORIGIN and self._moments is not None:
            assert self.session is not None
            await self._moments.add(self.session, command=command, observation=observation, left_s=left_s)

    async def leave(self) -> None:
        """End the session and the use of the moments, which the store may keep."""
        try:
            if self.session is not None:
                await self.session.stop()
        finally:
            if self._moments is not None:
                moments, self._moments = self._moments, None
                await self._store.leave(self._key, moments)
