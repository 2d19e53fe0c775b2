"""Environment workers: processes that run the user's environments, replaced when one hangs or dies.

    episode ──RunEpisode──▶ worker        the user's code
       ▲    ◀──Asked──────    │
       └──▶ ──Replied──────▶  │           as often as it likes
            ◀──EpisodeDone────┘

What becomes of the episodes of a worker:

    one of them kept its loop from turning ── it is ended, and the others begin again
    one of them does not end when it is given up ── the others end there, and no more come
    it died, or fell silent ── they begin again in the shared workers; those to which it happens a second time are tried
    by halves, in workers of their own, until the one that kills its worker is alone with it and fails (trials.py)
    its process was stopped by a signal ── it is ended, and they begin again
    its machine was lost ── they begin again elsewhere
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.base.clock import being_cancelled
from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.messages.controller import EpisodeDone
from headrace.base.types.messages.environment import Cancel, RunEpisode
from headrace.base.types.task import Task
from headrace.launch.clients.peer import Peer
from headrace.launch.clients.scorer import ScoringProcess
from headrace.launch.clients.shift import (
    EnvironmentWorker,
    EnvPeer,
    EpisodeCall,
    EpisodeLoss,
    Gone,
    ResizableSlots,
    WorkerGroup,
    WorkerSlot,
)
from headrace.launch.clients.trials import TRIALS, SuspectTrial, divide
from headrace.rollout.environments import AttemptOutcome, OpenEpisode

if TYPE_CHECKING:
    from headrace.wings.agents import Endpoint

GRACE_S = 2.0
"""How long an episode that nobody waits for any more may take to end."""
MAX_IDLE_DEATHS = 8
"""Workers that may die one after the other without having had an episode."""
LOOK_S = 0.5
"""How often the time since a worker was last heard is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTerms:
    """On which environment workers are kept."""

    num_workers: int
    """On this machine; 0: all are elsewhere."""
    concurrency: int
    """Episodes at once in each."""
    block_s: float
    """How long code of an episode may keep the loop of its worker from turning, and the worker may say nothing."""
    start_timeout_s: float
    """Longest that a worker may take to start."""
    scored: bool
    """Whether a reward function says what an episode earned, and not its environment."""


Listening = Callable[[Callable[[str], None]], AbstractAsyncContextManager["Endpoint"]]
"""Opens the endpoint at which programs reach their episodes; its warnings go to the function."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt at a task, in whichever workers it comes to."""

    order: RunEpisode
    episode: OpenEpisode
    deaths: int = 0
    """Workers that have died under it."""
    trial: SuspectTrial | None = None
    """Where it begins again, as a suspect; ``None``: in the shared workers."""

    def lost(self, why: EpisodeLoss, visit: EpisodeCall | None) -> EpisodeLoss:
        """Take note that a worker has ended under it, and return why."""
        if why is EpisodeLoss.DIED:
            self.deaths += 1
            self.trial = None if visit is None else visit.trial
        return why


class EnvPool:
    """The :class:`~headrace.rollout.environments.Environment` contract over worker processes; with ``listening`` each
    episode can also
    be reached over HTTP, by the programs that it starts."""

    asks_prompt = False

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[ScoringProcess]],
        terms: EnvTerms,
        *,
        warn: Callable[[str], None],
        listening: Listening | None = None,
    ) -> None:
        self._listening = listening
        self._endpoint: Endpoint | None = None
        self._own = WorkerGroup(start_worker, terms.num_workers)
        self._terms = terms
        self._warn = warn
        self._places: list[WorkerSlot] = []
        self._came = asyncio.Condition()
        self._room = ResizableSlots()
        self._trials = asyncio.Semaphore(TRIALS)
        self._helpers: asyncio.TaskGroup | None = None

    @property
    def keeps_some_here(self) -> bool:
        """Whether some of its workers are of this machine."""
        return self._own.num_workers > 0

    def send_warnings_to(self, warn: Callable[[str], None]) -> None:
        """From now on, tell ``warn`` what people should know."""
        self._warn = warn

    def _tell(self, text: str) -> None:
        self._warn(text)

    async def keep(self) -> None:
        """Keep every place filled; ends only by cancellation, or when workers do not start, or die without work."""
        async with self._reachable(), asyncio.TaskGroup() as self._helpers:
            self._own.helpers = self._helpers
            self._settle(self._own)
            await asyncio.Event().wait()

    async def lodge(self, crew: WorkerGroup) -> None:
        """Keep the workers of another machine, until it leaves or is lost: then this returns when the last of them has
        ended. Raises what keeps them from being of use, a :class:`~headrace.base.errors.HeadraceError`."""
        try:
            async with asyncio.TaskGroup() as crew.helpers:
                keeping = self._settle(crew)
                await crew.leaving.wait()
                self._dissolve(crew)
                if not self._places:
                    self._warn("no environment worker is left: episodes wait until a machine joins")
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*(shift.retire() for shift in list(crew.shifts)))
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        finally:
            self._dissolve(crew)
            crew.lose()
            await asyncio.gather(*(shift.worker.kill() for shift in crew.shifts))
            for shift in crew.shifts:
                shift.worker.close()

    def _settle(self, crew: WorkerGroup) -> list[asyncio.Task[None]]:
        """Give a crew its places; the tasks that keep them filled."""
        places = [WorkerSlot(crew) for _ in range(crew.num_workers)]
        self._places += places
        self._room.grow(crew.num_workers * self._terms.concurrency)
        assert crew.helpers is not None
        return [crew.helpers.create_task(self._keep(place)) for place in places]

    def _dissolve(self, crew: WorkerGroup) -> None:
        """Nothing begins there any more."""
        left = [place for place in self._places if place.crew is not crew]
        self._room.shrink((len(self._places) - len(left)) * self._terms.concurrency)
        self._places = left

    @asynccontextmanager
    async def _reachable(self) -> AsyncIterator[None]:
        if self._listening is None:
            yield
            return
        async with self._listening(self._tell) as self._endpoint:
            yield

    async def started(self) -> None:
        """Until every worker of this machine is there, or, where there are to be none, one of another."""
        async with self._came:
            await self._came.wait_for(self._is_up)

    def _is_up(self) -> bool:
        if not self.keeps_some_here:
            return any(place.up for place in self._places)
        own = [place for place in self._places if place.crew is self._own]
        return bool(own) and all(place.up for place in own)

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """One attempt, in a worker; where it is lost without being to blame, begun again.

        Raises :class:`~headrace.base.errors.EpisodeError` by the reason for which the episode failed.
        """
        order = RunEpisode(call=0, row=task.row, prompt_ids_T=task.prompt_ids_T, seed=episode.seed)
        attempt = Attempt(order=order, episode=episode)
        try:
            found = await self._in_shared(attempt)
            while found in (EpisodeLoss.INNOCENT, EpisodeLoss.DIED):
                episode.begin_again()
                trial, attempt.trial = attempt.trial, None
                found = await (self._in_shared(attempt) if trial is None else self._in_trial(attempt, trial))
        finally:
            if attempt.trial is not None:  # cancelled before it could begin there
                attempt.trial.leave()
        if isinstance(found, EpisodeLoss):
            raise EpisodeError(
                f"its code kept the loop of its worker from turning for env.block_s={self._terms.block_s:g} s",
                remedy="await what waits, and hand what computes to asyncio.to_thread",
                reason="env_blocked",
            )
        return self._outcome(found)

    def _outcome(self, done: EpisodeDone) -> AttemptOutcome:
        if done.reason:
            raise EpisodeError(done.problem, remedy="mend the environment", reason=done.reason)
        if done.reward is None and not done.agent_rewards and not self._terms.scored:
            raise EpisodeError(
                "the environment did not say what it earned, and there is no reward function",
                remedy="return a reward, or set env.reward",
                reason="reward_none",
            )
        if done.agent_rewards and self._terms.scored:
            raise EpisodeError(
                "the environment says what each agent earned, and there is a reward function that would count instead",
                remedy="leave env.reward and env.rewards out, or agent_rewards",
            )
        reward = None if self._terms.scored else done.reward
        return AttemptOutcome(
            reward=reward, turn_rewards=done.turn_rewards, agent_rewards=done.agent_rewards, trained=done.trained
        )

    # -- one episode in one worker ----------------------------------------------------------------------------------

    async def _free_shift(self) -> EnvironmentWorker:
        """The worker with the fewest episodes."""
        async with self._came:
            await self._came.wait_for(lambda: any(place.up for place in self._places))
        place = min((place for place in self._places if place.up), key=lambda place: place.load)
        assert place.shift is not None
        return place.shift

    async def _in_shared(self, attempt: Attempt) -> EpisodeDone | EpisodeLoss:
        """One episode in whichever of the shared workers has the fewest."""
        async with self._room:
            return await self._visit(await self._free_shift(), attempt)

    async def _visit(self, shift: EnvironmentWorker, attempt: Attempt) -> EpisodeDone | EpisodeLoss:
        """One episode in one worker, and in the programs that it starts: nobody asks in its name afterwards."""
        if self._endpoint is None:
            return await self._in_worker(shift, attempt, attempt.order)
        async with self._endpoint.session(attempt.episode, shift.programs) as access:
            order = msgspec.structs.replace(attempt.order, variables=access.variables)
            found = await self._in_worker(shift, attempt, order)
        if isinstance(found, EpisodeDone) and found.reason and access.last_refusal:
            words = f"{found.problem} (a request of it had been refused: {access.last_refusal})"
            return msgspec.structs.replace(found, problem=words)
        return found

    async def _in_worker(
        self, shift: EnvironmentWorker, attempt: Attempt, order: RunEpisode
    ) -> EpisodeDone | EpisodeLoss:
        """Until the episode has ended there, or is lost. Where nobody waits for it any more, the worker ends it."""
        peer = shift.worker.peer
        call = peer.next_call()
        done = peer.expect(call, EpisodeDone)
        visit: EpisodeCall | None = None
        try:
            async with asyncio.TaskGroup() as group:
                visit = EpisodeCall(attempt.episode, peer, group, deaths=attempt.deaths)
                shift.come(call, visit)
                peer.send(msgspec.structs.replace(order, call=call))
                ended = await done
                visit.end()
            return ended
        except asyncio.CancelledError:
            if done.cancelled() and not being_cancelled():
                return attempt.lost(shift.why_lost(call), visit)
            self._give_up(shift, call)
            raise
        except BaseExceptionGroup as errors:  # of the answers: what goes wrong with the engine is not the episode's
            self._give_up(shift, call)
            raise errors.exceptions[0] from None
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise EpisodeError(f"the row cannot travel: {error!a}", remedy="keep plain data in the rows") from None
        finally:
            shift.go(call)
            done.cancel()
            if visit is not None and visit.trial not in (None, attempt.trial):  # cancelled as its worker died
                visit.trial.leave()

    # -- trials -----------------------------------------------------------------------------------------------------

    def _suspect(self, shift: EnvironmentWorker, cause: str) -> None:
        """A worker has died: those of its episodes that were lost before are tried by halves."""
        suspects = [visit for visit in shift.visits.values() if visit.deaths]
        if not suspects:
            return
        if len(suspects) > 1:
            self._warn(
                f"episodes were in a second environment worker that died ({len(suspects)} of them; {cause}): they "
                "begin again by halves, in workers of their own, until the one that ends its worker is found, after "
                f"{(len(suspects) - 1).bit_length()} more deaths; the other episodes go on meanwhile"
            )
        assert self._helpers is not None
        for trial in divide(suspects):
            holding = self._hold(trial)
            try:
                self._helpers.create_task(holding)
            except RuntimeError:  # no task may begin any more: all workers are being ended
                holding.close()

    async def _hold(self, trial: SuspectTrial) -> None:
        """Keep a worker for a trial, from when there is room for one more until no episode needs it."""
        async with self._trials:
            while not trial.ended.is_set():
                place = WorkerSlot(await self._some_crew())
                with contextlib.suppress(Gone):
                    await self._serve_trial(trial, place, await self._begin(place))

    async def _serve_trial(self, trial: SuspectTrial, place: WorkerSlot, shift: EnvironmentWorker) -> None:
        """Until its episodes need no worker any more, or this one has died before there was an episode in it."""
        try:
            await shift.settled.wait()
            if place.up:
                trial.worker.set_result(shift)
                await trial.ended.wait()
        finally:
            await shift.replace()

    async def _in_trial(self, attempt: Attempt, trial: SuspectTrial) -> EpisodeDone | EpisodeLoss:
        """One suspected episode, with the others of its half; what kills its worker alone has failed."""
        alone = trial.num_suspects == 1
        try:
            await asyncio.wait([trial.worker])  # unlike awaiting it, this cancels it for nobody
            shift = trial.worker.result()
            if shift.left.is_set():
                return EpisodeLoss.INNOCENT
            found = await self._visit(shift, attempt)
        finally:
            trial.leave()
        if found is EpisodeLoss.DIED and alone:
            raise EpisodeError(
                f"the process that ran it died, alone too: {shift.cause}",
                remedy="look at logs/environment-*.log in the run directory",
                reason="env_crashed",
            )
        return found

    def _give_up(self, shift: EnvironmentWorker, call: int) -> None:
        """Have the worker end an episode, or end the worker."""
        assert self._helpers is not None
        seeing = self._see_it_end(shift, call)
        try:
            self._helpers.create_task(seeing)
        except RuntimeError:  # no task may begin any more: all workers are being ended
            seeing.close()

    async def _see_it_end(self, shift: EnvironmentWorker, call: int) -> None:
        ended = shift.worker.peer.expect(call, EpisodeDone)
        shift.worker.peer.send(Cancel(call=call))
        await asyncio.wait([ended], timeout=GRACE_S)
        if not ended.done() and not shift.replaced:
            self._warn("an episode that was given up does not end: its worker is replaced when its others have ended")
            await shift.retire()
        ended.cancel()

    # -- workers ----------------------------------------------------------------------------------------------------

    async def _keep(self, place: WorkerSlot) -> None:
        while not place.crew.leaving.is_set():
            try:
                shift = await self._begin(place)
            except Gone:
                return
            await shift.left.wait()

    async def _begin(self, place: WorkerSlot) -> EnvironmentWorker:
        """A new worker in that place. Raises :class:`~headrace.launch.clients.shift.Gone`."""
        crew = place.crew
        shift = EnvironmentWorker(await crew.start_worker(), crew.programs)
        assert crew.helpers is not None
        tending = self._tend(place, shift)
        try:
            crew.helpers.create_task(tending)
        except RuntimeError:  # no task may begin any more: the machine has left meanwhile
            tending.close()
            await shift.worker.kill()
            shift.worker.close()
            raise Gone from None
        crew.shifts.add(shift)
        return shift

    async def _some_crew(self) -> WorkerGroup:
        """This machine's; where it keeps no worker, another's."""
        if self.keeps_some_here:
            return self._own
        async with self._came:
            await self._came.wait_for(lambda: bool(self._places))
        return self._places[0].crew

    async def _tend(self, place: WorkerSlot, shift: EnvironmentWorker) -> None:
        """A worker, from its start to its end."""
        worker = shift.worker
        assert isinstance(worker.peer, EnvPeer)
        worker.peer.shift = shift
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(worker.peer.listen())
            dying = group.create_task(worker.died())
            await self._arrival(place, shift, dying)
            watching = group.create_task(self._watch(shift))
            cause = await dying
            shift.cause = worker.peer.nonsense or cause.partition("\n")[0]
            if place.shift is shift:
                place.shift = None
            watching.cancel()
            listening.cancel()
        shift.num_lost = len(shift.visits)
        if not shift.replaced:
            self._suspect(shift, shift.cause)
        worker.close()
        place.crew.shifts.discard(shift)
        shift.left.set()
        shift.settled.set()
        if not shift.replaced:  # where it had an episode, what that left behind may have killed it
            self._count_death(place.crew, worker.peer, cause, shift)

    async def _arrival(self, place: WorkerSlot, shift: EnvironmentWorker, dying: asyncio.Future[str]) -> None:
        """Until the worker is ready, and episodes can run in its place, or it has died."""
        peer = shift.worker.peer
        if await peer.arrives(dying, self._terms.start_timeout_s, "is the file of env.entry slow to import?"):
            place.shift = shift
            shift.settled.set()
            async with self._came:
                self._came.notify_all()

    async def _watch(self, shift: EnvironmentWorker) -> None:
        """End a worker whose loop is blocked, or that has fallen silent. Silence is counted in looks: where this loop
        stood still itself, that is one look."""
        quiet_looks = 0
        while quiet_looks * LOOK_S < self._terms.block_s + LOOK_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await shift.blocked.wait()
            if shift.blocked.is_set():
                self._warn("code of an episode blocks the loop of its worker: the worker is replaced")
                await asyncio.shield(shift.replace())
                return
            quiet_looks = 0 if shift.was_heard else quiet_looks + 1
            shift.was_heard = False
        if halted := await shift.worker.halted():
            self._warn(f"an environment worker {halted}: it is replaced, and its episodes begin again")
            await asyncio.shield(shift.replace())
            return
        self._warn("an environment worker has fallen silent: it is replaced")
        await shift.worker.kill()

    def _count_death(self, crew: WorkerGroup, peer: Peer, cause: str, shift: EnvironmentWorker) -> None:
        if peer.last_words is not None:
            raise peer.last_words
        crew.idle_deaths = 0 if shift.served else crew.idle_deaths + 1
        if crew.idle_deaths >= MAX_IDLE_DEATHS:
            raise EnvError(
                f"{crew.idle_deaths} environment workers died without an episode, one after the other; the last: "
                f"{cause}",
                remedy=f"look at logs/{peer.name}.log in the run directory",
            )
        self._warn(f"an environment worker died ({cause}); its {shift.num_lost} episodes begin again")
