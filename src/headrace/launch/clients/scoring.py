"""The pools of scoring workers: processes that call the user's reward functions, one pool for each component of the
reward. User code may hang in a call, or kill its worker.

The time of a call is measured from the moment when its worker begins it (``Started``). A call that has not returned by
its deadline fails its own episode only: the worker is killed and replaced, and its other calls are made again. If it is
unknown which call blocked the others or killed the worker, each is tried alone (suspects.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.base.clock import NUM_CHECKS, RealClock, TimeLimit, being_cancelled
from headrace.base.types.messages.controller import Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.launch.clients.pool import CallLoss, PoolCall, PoolConfig, Worker, WorkerGroup, WorkerPool, WorkerProcess
from headrace.launch.clients.suspects import OneByOne
from headrace.rollout.scoring import NO_CONTEXT, AnyReward, Graded, Scores, ScoringContext
from headrace.rollout.scoring.rubric import Rubric, RubricPart

SHORT_S = 5e-3
"""Seconds that the calls of one order may take together, by what calls took of late."""
MOST_BLOCKED = 8
"""Number of calls in a row that may block their worker before the others are not made any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScoreCall(PoolCall):
    """One call of a reward function, over all workers in which it is made."""

    request: ScoreCompletions
    """The task and the completions to score."""


@dataclass(slots=True, eq=False)
class ScoringWorker(Worker[ScoreCall]):
    """A process that calls one reward function, as the pool sees it: the calls that it has begun, and what is known of
    a call that was late."""

    begun: int = 0
    """Number of calls that it has begun and that have not returned."""
    num_begun: int = 0
    """Number of calls that it has begun since it started."""
    answered: bool = False
    """Whether any call has returned. Side effects of such a call may kill the worker later."""
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``frozen`` and ``crowded`` are known, after a call was late."""
    crowded: bool = False
    """Whether the process computed for most of the time, so that any of its calls may have blocked the others."""
    blocked: bool = False
    """Whether the one call that it had begun was late and kept all others from beginning. A full pool of threads, of
    which each waits, is no such case."""
    frozen: bool = False
    """Whether it was killed because it was stopped from outside or began no call for long, so that no call is to
    blame."""
    read_s: float = -math.inf
    """The time at which its processor time was read, by the clock of the event loop."""
    computed_s: float = 0.0
    """Its processor time at that moment, in seconds."""

    async def recently_computed_s(self, every_s: float) -> float:
        """Return its processor time in seconds, read at most ``every_s`` ago, since reading it takes as long as a short
        call."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self.read_s >= every_s:
            self.read_s = now_s
            self.computed_s = await self.process.computed_s()
        return self.computed_s

    def count_death(self) -> int:
        """Count the worker's death as idle if it had begun no call, answered none and broke no protocol; return the
        number of idle deaths in a row on its machine."""
        blamed = self.begun or self.answered or self.process.peer.protocol_violation
        self.group.idle_deaths += not blamed  # one of its calls may be to blame: each will be tried alone
        return self.group.idle_deaths

    def loss(self, *, begun: bool) -> CallLoss:
        """Return the reason why one of its calls is lost, now that the worker has ended. ``begun`` says whether it had
        begun that call."""
        if self.frozen:
            return CallLoss.INNOCENT
        if not self.replaced:
            return CallLoss.DIED
        return CallLoss.CROWDED if self.crowded and begun else CallLoss.INNOCENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPoolConfig(PoolConfig):
    """The settings of a pool of scoring workers."""

    timeout_s: float
    """Seconds that a call may take after it has begun."""


class ScorerPool(WorkerPool[ScoringWorker, ScoreCall, Scores]):
    """The pool of scoring workers for one component of the reward: it lets worker processes call the reward function.
    A reward that fails or is late is a failure of its own episode only."""

    worker_name = "scoring worker"
    lost_calls = "its calls are made again"
    slow_start = "is the reward's file slow to import?"
    death_remedy = "the reward function kills its process: look at logs/{name}.log in the run directory"

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[WorkerProcess]],
        config: ScorerPoolConfig,
        *,
        warn: Callable[[str], None],
    ) -> None:
        """Make a pool whose workers are not started yet. ``start_worker`` starts one on this machine; ``warn`` receives
        warnings for users."""
        super().__init__(start_worker, config, OneByOne(), warn=warn)
        self.by_group = False
        """Whether the reward function scores all completions of a task in one call; known when a worker is ready."""
        self.wants: frozenset[str] = frozenset()
        """The names of the optional columns that the reward function takes; known when a worker is ready."""
        self._timeout_s = config.timeout_s
        self._mean_s = math.inf
        """Mean seconds of a call of the reward function, as the worker that answered last has measured it; infinite
        before the first answer."""
        self._num_tried = 0  # calls that are being made
        self._num_blocked = 0  # calls in a row that blocked their worker until they were late

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score completions of ``task`` by the reward function in a worker, and return their rewards or the failure.
        ``context`` has what optional columns need.

        A reward function that scores one completion at a time is called for each by itself: in one order to a worker if
        its calls are so short that the order would cost more than they, else in several orders side by side."""
        request = self._request(task, completions, context)
        if self.by_group or len(completions) == 1:
            return await self._answer(request)
        if len(completions) * self._mean_s <= SHORT_S:
            together = await self._in_one_order(request)
            if together is not None:
                return together
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._answer(request.single(index))) for index in range(len(completions))]
        return _joined([call.result().of(0) for call in calls])

    async def _in_one_order(self, request: ScoreCompletions) -> Scores | None:
        """Let a worker score all completions of ``request``, one after the other, and return their scores; ``None`` if
        the order was lost or late, so that it is not known which of the calls is to blame."""
        async with self.capacity_for_one():
            found = await self.attempt_in(await self.worker(), ScoreCall(request=request))
        if isinstance(found, CallLoss) or found.failure:
            return None
        return found

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Score one turn of an episode: its ``text``, with ``history``, all that the model had read before it, and
        ``turn``, its index in the episode."""
        request = self._request(task, (text,), context)
        return await self._answer(msgspec.structs.replace(request, history=history, turn=turn))

    def _request(self, task: Task, completions: tuple[str, ...], context: ScoringContext) -> ScoreCompletions:
        """Return the request to score ``completions`` of a task, with those optional columns that the reward function
        takes."""
        request = ScoreCompletions(call=0, prompt=task.prompt, completions=completions, row=task.row)
        if "completion_ids" in self.wants:
            request = msgspec.structs.replace(request, completion_ids=context.completion_ids)
        return msgspec.structs.replace(request, trainer=context.trainer) if "trainer" in self.wants else request

    async def _answer(self, request: ScoreCompletions) -> Scores:
        """Let a worker score a request, and return the scores. They are a failure (``reward_crashed``) if the request
        was found to kill its workers, even alone in one."""
        found = await self.make(ScoreCall(request=request))
        if isinstance(found, CallLoss):
            return Scores(rewards=(), failure="reward_crashed: the process that computed it died, alone too")
        return found

    def new_worker(self, process: WorkerProcess, group: WorkerGroup) -> ScoringWorker:
        """Return the record of the worker for ``process``, which has just been started on the machine of ``group``."""
        return ScoringWorker(process, group)

    def on_ready(self, facts: dict[str, str | int | float]) -> None:
        """Store what a ready worker reports of the reward function: ``by_group`` and ``wants``."""
        self.by_group, self.wants = bool(facts["by_group"]), frozenset(str(facts["wants"]).split())

    async def attempt(self, worker: ScoringWorker, call: ScoreCall, number: int) -> Scores | CallLoss:
        """Let a worker score a request, and return the scores or why the call was lost. A reward that takes longer than
        its time limit is a failure, unless the worker made no progress at all. After :data:`MOST_BLOCKED` calls in a
        row that let no other call of their worker begin, one is made at a time, and all others fail at once: they
        would wait for hours in front of a function that always blocks."""
        if self._num_blocked >= MOST_BLOCKED and self._num_tried:
            words = f"the last {self._num_blocked} calls blocked their worker for {self._timeout_s:g} s each"
            advice = "let an async def await what it waits for, and bound what a function computes"
            return Scores(rewards=(), failure=f"reward_timeout: {words}; {advice}")
        self._num_tried += 1
        try:
            return await self._attempt(worker, call, number)
        finally:
            self._num_tried -= 1

    async def _attempt(self, worker: ScoringWorker, call: ScoreCall, number: int) -> Scores | CallLoss:
        """Send a call to ``worker`` as order ``number``, and return its scores, a failure as scores, or why the call
        was lost. The time limit counts from the moment when the worker begins the call."""
        peer = worker.process.peer
        begun, scored = peer.expect(number, Started), peer.expect(number, Scored)
        scored.add_done_callback(partial(_mark_begun, begun))
        try:
            peer.send(msgspec.structs.replace(call.request, call=number))
            await begun
            worker.begun, worker.num_begun = worker.begun + 1, worker.num_begun + 1
            try:  # most answers come together with the report that they were begun, and need no timer
                answer = scored.result() if scored.done() else await self._in_time(worker, scored)
            finally:
                worker.begun -= 1
        except TimeoutError:
            if worker.frozen or worker.crowded:
                return worker.loss(begun=True)
            self._num_blocked += worker.blocked
            return Scores(rewards=(), failure=f"reward_timeout: no reward for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            if not scored.cancelled() or being_cancelled():
                raise
            return worker.loss(begun=not begun.cancelled())
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            return Scores(rewards=(), failure=f"reward_error: the row cannot travel: {error!a}")
        finally:
            begun.cancel()
            scored.cancel()
        worker.group.idle_deaths, worker.answered, self._num_blocked = 0, True, 0
        self._mean_s = answer.mean_s
        scores = Scores(rewards=answer.rewards, failure=answer.error, metrics=answer.metrics, extra=answer.extra)
        if not answer.errors:
            return scores
        each = enumerate(answer.errors)
        return msgspec.structs.replace(
            scores, graded=tuple(msgspec.structs.replace(scores.of(at), failure=error) for at, error in each)
        )

    async def _in_time(self, worker: ScoringWorker, scored: asyncio.Future[Scored]) -> Scored:
        """Wait up to the pool's time limit for ``scored``, the answer of a call that has begun, and return it. If it
        does not come in time, find out who may be to blame, kill the worker and raise ``TimeoutError``."""
        before_s = await worker.recently_computed_s(self._timeout_s / NUM_CHECKS)
        try:
            async with TimeLimit(self._timeout_s):
                return await scored
        except TimeoutError:
            try:
                await self._find_blame(worker, before_s)
            finally:
                await worker.process.kill()
            raise

    async def _find_blame(self, worker: ScoringWorker, before_s: float) -> None:
        """Find out, before the worker of a late call is killed, whether its process was stopped (``frozen``), or
        another call may have blocked the late one (``crowded``). ``before_s`` is the processor time that the process
        had used when the call began, in seconds. For several late calls of one worker, the first finds it out."""
        if worker.replaced:
            await worker.judged.wait()
            return
        worker.replaced = True
        try:
            worker.blocked = worker.begun == 1 < len(worker.calls)
            halted = await worker.process.halted()
            worker.frozen = bool(halted)
            computed_s = await worker.process.computed_s() - before_s
            worker.crowded = worker.begun > 1 and computed_s > self._timeout_s / 2
        finally:
            worker.judged.set()
        why = f", and its calls are made again, for its process {halted}" if halted else ""
        self.warn(f"a reward has not returned for {self._timeout_s:g} s: its worker is replaced{why}")

    async def watch(self, worker: ScoringWorker) -> str:
        """Wait until a worker has calls, but has begun none of them for as long as a call may take; return the warning
        that says so, with which the pool kills it. Return an empty text if it is being replaced already. The time is
        counted in checks, so that a standstill of this event loop counts as one check only."""
        quiet_checks, num_begun = 0, 0
        while quiet_checks < NUM_CHECKS:
            await asyncio.sleep(self._timeout_s / NUM_CHECKS)
            progressing = worker.begun or not worker.calls or worker.num_begun != num_begun
            quiet_checks, num_begun = 0 if progressing else quiet_checks + 1, worker.num_begun
        if worker.replaced:
            return ""
        worker.frozen = True
        return (
            f"a scoring worker has begun with no call for {self._timeout_s:g} s ({worker.process.peer.name} "
            f"{await worker.process.halted() or 'does not answer'}): it is replaced, its calls are made again"
        )


def _joined(graded: Sequence[Graded]) -> Scores:
    """Return the scores of completions that were scored one by one."""
    return Scores(rewards=tuple(each.reward for each in graded), graded=tuple(graded))


def _mark_begun(begun: asyncio.Future[Any], _: asyncio.Future[Any]) -> None:
    """Set the future ``begun``, for which the caller waits first, when the answer to the same call has come or the call
    has failed without the report that it was begun."""
    if not begun.done():
        begun.set_result(None)


class ScoringStage:
    """All components of the reward: a pool of scoring workers for each, with its own queue and time limit, so that none
    waits for another. ``rewards`` are the settings of the components; ``rubric`` combines their scores."""

    def __init__(
        self,
        rewards: Sequence[AnyReward],
        start_worker: Callable[[AnyReward], Awaitable[WorkerProcess]],
        *,
        start_timeout_s: float,
        warn: Callable[[str], None],
        on_span: Callable[[Span], None],
    ) -> None:
        """Make one pool for each of ``rewards``; no worker is started yet. ``start_worker`` starts a worker of a
        component, ``start_timeout_s`` is the longest time for that, and ``on_span`` receives the times of scoring for
        the event trace."""
        self._pools = [
            ScorerPool(
                partial(start_worker, reward),
                ScorerPoolConfig(
                    num_workers=reward.workers,
                    concurrency=reward.concurrency,
                    timeout_s=reward.timeout_s,
                    start_timeout_s=start_timeout_s,
                ),
                warn=warn,
            )
            for reward in rewards
        ]
        components = [
            RubricPart(section=reward, graders=pool) for reward, pool in zip(rewards, self._pools, strict=True)
        ]
        self.rubric = Rubric(components, clock=RealClock(), on_span=on_span)

    def send_warnings_to(self, warn: Callable[[str], None]) -> None:
        """Send all later warnings for users to ``warn``."""
        for pool in self._pools:
            pool.send_warnings_to(warn)

    async def run(self) -> None:
        """Keep every pool filled; this ends only by cancellation, or with an error of :meth:`ScorerPool.keep`."""
        async with asyncio.TaskGroup() as group:
            for pool in self._pools:
                group.create_task(pool.keep())

    async def started(self) -> None:
        """Wait until every worker of every pool is ready for calls."""
        for pool in self._pools:
            await pool.started()
