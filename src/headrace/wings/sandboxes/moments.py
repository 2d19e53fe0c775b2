"""The moments of episodes: what each command of an attempt has brought, with a snapshot of the world after it, so that
branches of the episode continue from there.

    origin   begin ─▶ command 1 ─▶ command 2 ─▶ command 3 ─▶ tests
               │          │            │            │             a moment after each of them
    branch     └─ its model gives the same answers: it reads what the origin has read, and no session runs ─┐
                       another command, or the tests: a session is forked from the last moment in common ◀──┘

A moment of which no snapshot could be taken, since processes ran in the background, is made again from the one before:
its commands run once more, and must print the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from headrace.base.errors import EpisodeError
from headrace.base.types.episode import AttemptKind
from headrace.wings.sandboxes.base import DriverLost, SandboxDriver, SandboxSession, SandboxSnapshot

_WITHOUT_SNAPSHOT = ("session_busy", "session_snapshot")
"""The reasons for which a moment has no snapshot, and the episode goes on."""
BeginWorld = Callable[[], Awaitable[SandboxSession]]
"""Return a session at the beginning of an episode."""
RunCommand = Callable[[SandboxSession, str], Awaitable[str]]
"""Run a command of the agent in a session, and return what the model reads of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMoment:
    """The world after one command of an episode, or at its beginning."""

    command: str
    """The command; empty at the beginning."""
    observation: str
    """What the model has read of its result."""
    snapshot: SandboxSnapshot | None
    """The world; ``None`` if there was no snapshot to be had."""
    left_s: float
    """The time that the agent had left, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeMoments:
    """The moments of one episode. Its origin adds them, and branches read them."""

    driver: SandboxDriver
    """The driver of the snapshots."""
    moments: list[WorldMoment] = field(default_factory=list)
    """The moments in order, the first of which is the beginning."""
    num_users: int = 1
    """The number of attempts that run and may need them."""

    async def add(self, session: SandboxSession, *, command: str, observation: str, left_s: float) -> None:
        """Add the present moment of the origin's session."""
        snapshot: SandboxSnapshot | None = None
        try:
            snapshot = await session.snapshot()
        except EpisodeError as error:
            if error.reason not in _WITHOUT_SNAPSHOT:
                raise
        self.moments.append(WorldMoment(command=command, observation=observation, snapshot=snapshot, left_s=left_s))

    async def resume(self, number: int, run: RunCommand, begin: BeginWorld) -> SandboxSession:
        """Return a session in the world of the moment ``number``. Where the snapshots are lost with their driver, the
        commands run again in the world that ``begin`` makes. Raises :class:`~headrace.base.errors.EpisodeError` if
        commands that had to run again have printed something else."""
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
        """Give up all snapshots."""
        for moment in self.moments:
            if moment.snapshot is not None:
                await self.driver.release(moment.snapshot)


class MomentStore:
    """The moments of the latest episodes of a process: of those that run, and of some that have ended."""

    def __init__(self, most_ended: int) -> None:
        """Keep the moments of ``most_ended`` episodes that have ended."""
        self._most_ended = most_ended
        self._kept: OrderedDict[Hashable, EpisodeMoments] = OrderedDict()

    async def begin(
        self, key: Hashable, session: SandboxSession, driver: SandboxDriver, left_s: float
    ) -> EpisodeMoments:
        """Begin the moments of an origin in the world of its session, in place of those of an earlier attempt."""
        begun = EpisodeMoments(driver=driver)
        await begun.add(session, command="", observation="", left_s=left_s)
        replaced = self._kept.pop(key, None)
        self._kept[key] = begun
        if replaced is not None and not replaced.num_users:
            await replaced.release()
        return begun

    def find(self, key: Hashable) -> EpisodeMoments | None:
        """Return the moments of an origin for one more attempt; ``None`` if there are none, or no more."""
        found = self._kept.get(key)
        if found is None or not found.moments or found.moments[0].snapshot is None:
            return None
        found.num_users += 1
        return found

    async def leave(self, key: Hashable, moments: EpisodeMoments) -> None:
        """End the use of moments by one attempt, and give up those that ended longest ago, if there are too many."""
        moments.num_users -= 1
        if self._kept.get(key) is not moments:  # another attempt has taken their place
            if not moments.num_users:
                await moments.release()
            return
        self._kept.move_to_end(key)
        ended = [each for each, kept in self._kept.items() if not kept.num_users]
        for each in ended[: max(0, len(ended) - self._most_ended)]:
            await self._kept.pop(each).release()

    async def clear(self) -> None:
        """Give up the moments of all episodes."""
        while self._kept:
            await self._kept.popitem()[1].release()


class ForkedWorld:
    """The world of one attempt: a session of its own, from the moment at which it differs from its origin."""

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
        """Begin in ``session`` or, if it is ``None``, at the beginning of ``moments``. ``begin`` makes another session
        at the beginning."""
        self.session = session
        """The session; ``None`` as long as the attempt repeats its origin."""
        self._store = store
        self._key = key
        self._moments = moments
        self._begin = begin
        self._kind = kind
        self._place = 0

    def repeat(self, command: str) -> WorldMoment | None:
        """Return the moment after ``command``, if the origin has run the same one in the same world; else ``None``."""
        if self.session is not None or self._moments is None:
            return None
        if self._place + 1 >= len(self._moments.moments) or self._moments.moments[self._place + 1].command != command:
            return None
        self._place += 1
        return self._moments.moments[self._place]

    async def enter(self, run: RunCommand) -> SandboxSession:
        """Return the session, which is forked from the last moment in common with the origin where it is not there."""
        if self.session is None:
            assert self._moments is not None
            self.session = await self._moments.resume(self._place, run, self._begin)
        return self.session

    async def keep(self, *, command: str, observation: str, left_s: float) -> None:
        """Keep the present moment, if the attempt is an origin."""
        if self._kind is AttemptKind.ORIGIN and self._moments is not None:
            assert self.session is not None
            await self._moments.add(self.session, command=command, observation=observation, left_s=left_s)

    async def leave(self) -> None:
        """End the session; moments of it are kept."""
        try:
            if self.session is not None:
                await self.session.stop()
        finally:
            if self._moments is not None:
                moments, self._moments = self._moments, None
                await self._store.leave(self._key, moments)
