"""One environment worker, from its start to its end, and the episodes that visit it; and those of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.base.errors import BudgetSpent, EpisodeError, RequestError
from headrace.base.types.messages.controller import Alive, ModelQuery
from headrace.base.types.messages.environment import AnswerRefused, Replied
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.clients.scorer import ScoringProcess
from headrace.launch.clients.trials import SuspectTrial
from headrace.rollout.environments import OpenEpisode

MAX_ASKS = 1024
"""Questions of one episode that may be open."""


class EnvPeer(ForeignPeer):
    """An environment worker, as the controller sees it."""

    shift: EnvironmentWorker | None = None
    """Who hears what it says without having been asked; ``None`` before it is of use."""

    def handle(self, message: object) -> None:
        if not isinstance(message, Alive | ModelQuery):
            super().handle(message)
        elif self.shift is not None:
            self.shift.hear(message)


class EpisodeLoss(Enum):
    """Why an episode came to nothing in a worker."""

    INNOCENT = auto()
    """The worker was replaced for the sake of another one."""
    BLOCKED = auto()
    """It kept the loop of its worker from turning."""
    DIED = auto()
    """The worker died, or fell silent: any of its episodes may be why."""


@dataclass(slots=True, eq=False)
class EpisodeCall:
    """One episode in one worker."""

    episode: OpenEpisode
    peer: Peer
    group: asyncio.TaskGroup
    deaths: int = 0
    """Workers that have died under the episode before this one."""
    trial: SuspectTrial | None = None
    """Where the episode is to begin again, as a suspect, after the death of this worker; ``None``: it is none."""
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    """Those that are under way."""

    def asked(self, asked: ModelQuery) -> None:
        """Answer, when there is an answer."""
        if len(self.answers) >= MAX_ASKS:
            problem = f"{MAX_ASKS} questions of this episode are open, and no more may be"
            remedy = "wait for their answers"
            self.peer.send(
                AnswerRefused(ask=asked.ask, reason="env_error", spent=False, problem=problem, remedy=remedy)
            )
            return
        task = self.group.create_task(self._answer(asked))
        self.answers.add(task)
        task.add_done_callback(self.answers.discard)

    def end(self) -> None:
        """Nobody waits for answers any more."""
        for task in self.answers:
            task.cancel()

    async def _answer(self, asked: ModelQuery) -> None:
        try:
            if asked.prompt_ids_T is not None:
                reply = await self.episode.sample(asked.prompt_ids_T, asked.options)
            else:
                reply = await self.episode.reply(asked.messages, asked.tools, asked.options)
        except (EpisodeError, RequestError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "request_refused"
            spent = isinstance(error, BudgetSpent)
            told = AnswerRefused(ask=asked.ask, reason=reason, spent=spent, problem=error.problem, remedy=error.remedy)
            self.peer.send(told)
        else:
            self.peer.send(Replied(ask=asked.ask, reply=reply))


@dataclass(slots=True, eq=False)
class EnvironmentWorker:
    """One worker, from its start to its end."""

    worker: ScoringProcess
    programs: str = ""
    """See :class:`WorkerGroup`."""
    visits: dict[int, EpisodeCall] = field(default_factory=dict)
    """Its episodes, by call."""
    served: bool = False
    """Whether it ever had one."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether it has become ready, or has ended before."""
    blocked: asyncio.Event = field(default_factory=asyncio.Event)
    blocked_by: int = -1
    """The call that keeps its loop from turning; −1: none does."""
    was_heard: bool = False
    """Since that was looked at last."""
    replaced: bool = False
    """Whether it was ended for the sake of one of its episodes."""
    cause: str = ""
    """Why it has ended, in words."""
    num_lost: int = 0
    """Episodes that it had when it ended."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether its place is free: it has ended, or gets no more episodes."""
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether it has no episode."""

    def __post_init__(self) -> None:
        self.emptied.set()

    def come(self, call: int, visit: EpisodeCall) -> None:
        """An episode begins here."""
        self.visits[call] = visit
        self.served = True
        self.emptied.clear()

    def go(self, call: int) -> None:
        """An episode is over here, or was given up."""
        del self.visits[call]
        if not self.visits:
            self.emptied.set()

    def hear(self, message: Alive | ModelQuery) -> None:
        """It has said something without having been asked."""
        self.was_heard = True
        if isinstance(message, ModelQuery):
            visit = self.visits.get(message.episode)
            if visit is not None:  # else it has just been given up
                visit.asked(message)
        elif message.blocked_by >= 0:
            self.blocked_by = message.blocked_by
            self.blocked.set()

    def why_lost(self, call: int) -> EpisodeLoss:
        """It has ended: what that means for one of its episodes."""
        if self.blocked_by == call:
            return EpisodeLoss.BLOCKED
        return EpisodeLoss.INNOCENT if self.replaced else EpisodeLoss.DIED

    async def replace(self) -> None:
        """End it, for the sake of one of its episodes."""
        self.replaced = True
        await self.worker.kill()

    async def retire(self) -> None:
        """Give it no more episodes, and end it with the last that it has."""
        self.left.set()
        await self.emptied.wait()
        await self.replace()


class Gone(Exception):
    """No worker can be started on that machine any more."""


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """The workers of one machine."""

    start_worker: Callable[[], Awaitable[ScoringProcess]]
    """Raises :class:`Gone` once the machine is."""
    num_workers: int
    programs: str = ""
    """``HOST:PORT`` there, at which programs reach their episodes; empty: where the endpoint listens."""
    helpers: asyncio.TaskGroup | None = None
    """Its tasks, while it is kept: what goes wrong with it goes wrong there."""
    shifts: set[EnvironmentWorker] = field(default_factory=set)
    """Those that are there."""
    idle_deaths: int = 0
    """Workers that have died one after the other without having had an episode."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether nothing is to begin there any more."""

    def lose(self) -> None:
        """The machine is gone, with all that ran there: none of its episodes is to blame."""
        self.leaving.set()
        for shift in self.shifts:
            shift.replaced = True


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """Where a worker stands; empty while it is replaced."""

    crew: WorkerGroup
    shift: EnvironmentWorker | None = None
    """Who stands there; ``None`` while it is empty."""

    @property
    def up(self) -> bool:
        shift = self.shift
        return shift is not None and shift.settled.is_set() and not (shift.replaced or shift.left.is_set())

    @property
    def load(self) -> int:
        return 0 if self.shift is None else len(self.shift.visits)


class ResizableSlots(asyncio.Semaphore):
    """For so many episodes at once; it grows, and shrinks as episodes end."""

    def __init__(self) -> None:
        super().__init__(0)
        self._owed = 0

    def release(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            super().release()

    def grow(self, by: int) -> None:
        """By so many."""
        for _ in range(by):
            self.release()

    def shrink(self, by: int) -> None:
        """By so many; what is taken of them is given back by whoever has it."""
        free = min(self._value, by)
        self._value -= free
        self._owed += by - free
