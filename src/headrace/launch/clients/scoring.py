"""The pools of scoring workers: processes that call the user's reward functions. Each component of the reward has its
own pool. User code may hang in a call, or kill its worker.

The time of a call is measured from the moment at which its worker begins it (``Started``). A call that exceeds its time
limit fails its own episode only: the worker is killed and replaced, and its other calls are repeated. If it is not
known which call has blocked the others or killed the worker, each of the calls is tried alone (suspects.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.base.clock import NUM_CHECKS, RealClock, TimeLimit, being_cancelled
from headrace.base.types.messages.codec import ENCODING_ERRORS, MessageCodec
from headrace.base.types.messages.controller import Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions, ScoreTogether
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.launch.clients.pool import CallLoss, PoolCall, PoolConfig, Worker, WorkerGroup, WorkerPool, WorkerProcess
from headrace.launch.clients.shortcalls import ShortCalls
from headrace.launch.clients.suspects import OneByOne
from headrace.rollout.scoring import NO_CONTEXT, AnyReward, Graded, Scores, ScoringContext
from headrace.rollout.scoring.rubric import Rubric, RubricPart

SHORT_S = 5e-3
"""Total seconds that the calls of one order may take, estimated from the durations of recent calls."""
MAX_TOGETHER = 256
"""Largest number of completions in one order."""
MIN_SHARED = 10
"""Number of completions that must fit into one order, so that requests share orders."""
NUM_UNSHARED = 1000
"""Number of answers after a lost order for which requests share no order."""
ORDERS_PER_WORKER = 2
"""Number of orders of short calls that are out for each worker: one that it executes, and the next."""
MAX_BLOCKED = 8
"""Number of consecutive calls that may block their worker. After that, other calls fail without being made."""

_CODEC = MessageCodec(ScoreCompletions)
"""The codec with which the size of a request is measured."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScoreCall(PoolCall):
    """One call of a reward function, over all workers in which it is tried."""

    request: ScoreCompletions | ScoreTogether
    """The completions to score, with their tasks."""


@dataclass(slots=True, eq=False)
class ScoringWorker(Worker[ScoreCall]):
    """A worker process that calls one reward function, as the pool sees it: the calls that it has begun, and the cause
    of a late call."""

    num_running: int = 0
    """Number of calls that the worker has begun and that have not returned."""
    num_started: int = 0
    """Number of calls that the worker has begun since it started."""
    answered: bool = False
    """Whether any call has returned. A side effect of such a call may kill the worker later."""
    cause_known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``frozen`` and ``crowded`` are determined, after a call was late."""
    crowded: bool = False
    """Whether the process computed for most of the time limit, so that any of its running calls may have blocked the
    others."""
    blocked: bool = False
    """Whether a single late call was running and prevented all other calls from beginning. If all threads of the worker
    were waiting in calls, this is ``False``."""
    frozen: bool = False
    """Whether the worker was killed because its process was stopped from outside or began no call for a long time, so
    that no call is the cause."""
    read_s: float = -math.inf
    """The time at which the processor time was last read, on the clock of the event loop."""
    computed_s: float = 0.0
    """The processor time that was read then, in seconds."""

    async def recently_computed_s(self, every_s: float) -> float:
        """Return the worker's processor time in seconds, which was read at most ``every_s`` seconds ago. It is not read
        at every call, because reading takes as long as a short call."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self.read_s >= every_s:
            self.read_s = now_s
            self.computed_s = await self.process.computed_s()
        return self.computed_s

    def count_death(self) -> int:
        """Count the worker's death as idle if the worker had no running call, had answered no call and had broken no
        protocol rule. Return the number of consecutive idle deaths on its machine."""
        has_suspect = self.num_running or self.answered or self.process.peer.protocol_violation
        self.group.idle_deaths += not has_suspect  # each of its calls will be tried alone
        return self.group.idle_deaths

    def find_loss(self, *, started: bool) -> CallLoss:
        """Return the reason for which one of the worker's calls is lost, after the worker has ended. ``started`` says
        whether the worker had begun that call."""
        if self.frozen:
            return CallLoss.INNOCENT
        if not self.replaced:
            return CallLoss.DIED
        return CallLoss.CROWDED if self.crowded and started else CallLoss.INNOCENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPoolConfig(PoolConfig):
    """The settings of a pool of scoring workers."""

    timeout_s: float
    """Seconds that a call may take after the worker has begun it."""


class ScorerPool(WorkerPool[ScoringWorker, ScoreCall, Scores]):
    """The pool of scoring workers for one component of the reward. Its workers call the reward function. A call that
    fails or is late fails only its own episode."""

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
        """Create a pool whose workers are not started yet. ``start_worker`` starts one worker on this machine; ``warn``
        receives warnings for users."""
        super().__init__(start_worker, config, OneByOne(), warn=warn)
        self.by_group = False
        """Whether the reward function scores all completions of a task in one call. This is known when a worker is
        ready."""
        self.wants: frozenset[str] = frozenset()
        """The names of the context fields that the reward function uses. They are known when a worker is ready."""
        self._timeout_s = config.timeout_s
        self._mean_s = math.inf
        """The mean duration of a call of the reward function in seconds, as the worker that answered last has measured
        it; infinite before the first answer."""
        self._num_unshared = 0
        """The number of next answers for which requests share no order, since one was lost or late."""
        self._short_calls = ShortCalls(
            self._score_together,
            start=self.run_in_background,
            max_orders=lambda: ORDERS_PER_WORKER * self.num_ready,
            max_completions=self._max_shared,
        )
        self._num_running = 0
        """The number of calls that are running in workers."""
        self._num_blocked = 0
        """The number of consecutive calls that have blocked their worker until their time limit."""

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score ``completions`` of ``task`` with the reward function in a worker, and return their rewards or the
        failure. ``context`` contains the values of the context fields.

        A reward function that scores one completion at a time is called once per completion. If its calls are shorter
        than the overhead of an order, all calls are sent to one worker in a single order, together with those of other
        tasks that are to be scored now; otherwise each call is a separate, concurrent order."""
        request = self._make_request(task, completions, context)
        if not self.by_group and len(completions) <= self._max_together():
            scores = await self._score_shortly(request)
            if scores is not None:
                return scores
        if self.by_group or len(completions) == 1:
            return await self._answer(request)
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(self._answer(request.make_single_order(index))) for index in range(len(completions))
            ]
        return _combine([call.result().get_graded(0) for call in calls])

    async def _score_shortly(self, request: ScoreCompletions) -> Scores | None:
        """Score all completions of a request, whose calls are short, in one order, which other requests may share.
        Return ``None`` if each call has to be made by an order of its own."""
        if not self._max_shared():
            scores = await self._score_together([request]) if len(request.completions) > 1 else None
            return None if scores is None else scores[0]
        try:
            num_bytes = len(_CODEC.encode(request))
        except ENCODING_ERRORS:
            return None  # the order of its own fails with the reason
        return await self._short_calls.score(request, num_bytes)

    async def _score_together(self, requests: Sequence[ScoreCompletions]) -> list[Scores] | None:
        """Order a worker to score all completions of ``requests`` sequentially, and return the scores of each request.
        Return ``None`` if one of the calls has killed the worker or was late, because it is not known which. For the
        next :data:`NUM_UNSHARED` answers requests then share no order."""
        call = ScoreCall(request=ScoreTogether(call=0, requests=tuple(requests)))
        outcome: Scores | CallLoss = CallLoss.INNOCENT
        while outcome is CallLoss.INNOCENT:
            async with self.capacity_for_one():
                outcome = await self.attempt_in(await self.wait_for_worker(), call)
        if isinstance(outcome, CallLoss) or outcome.failure:
            self._num_unshared = NUM_UNSHARED
            return None
        graded = iter(outcome.graded)
        return [_combine(list(itertools.islice(graded, len(request.completions)))) for request in requests]

    def _max_shared(self) -> int:
        """Return the largest number of completions in an order that several requests share; 0 if they share none. Only
        calls of which many fit into an order do: longer ones may be waiting, and then are made side by side."""
        limit = self._max_together()
        return limit if limit >= MIN_SHARED and not self._num_unshared else 0

    def _max_together(self) -> int:
        """Return the largest number of completions in one order, all of which are expected to take less than
        :data:`SHORT_S`, and far less than the time limit; 0 if a call takes longer."""
        return min(MAX_TOGETHER, int(min(SHORT_S, self._timeout_s / 20) / max(self._mean_s, 1e-9)))

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Score one turn of an episode and return its scores. ``text`` is the text of the turn, ``history`` is the text
        that the model read before it, and ``turn`` is its index in the episode."""
        request = self._make_request(task, (text,), context)
        return await self._answer(msgspec.structs.replace(request, history=history, turn=turn))

    def _make_request(self, task: Task, completions: tuple[str, ...], context: ScoringContext) -> ScoreCompletions:
        """Return the request to score ``completions`` of a task, with the context fields that the reward function
        uses."""
        request = ScoreCompletions(call=0, prompt=task.prompt, completions=completions, row=task.row)
        if "completion_ids" in self.wants:
            request = msgspec.structs.replace(request, completion_ids=context.completion_ids)
        return msgspec.structs.replace(request, trainer=context.trainer) if "trainer" in self.wants else request

    async def _answer(self, request: ScoreCompletions) -> Scores:
        """Score a request in a worker, and return the scores. They are a failure (``reward_crashed``) if the request is
        found to kill its worker even if it is the only call."""
        outcome = await self.execute(ScoreCall(request=request))
        if isinstance(outcome, CallLoss):
            return Scores(rewards=(), failure="reward_crashed: the process that computed it died, alone too")
        return outcome

    def create_worker(self, process: WorkerProcess, group: WorkerGroup) -> ScoringWorker:
        """Return the worker record of ``process``, which was just started on the machine of ``group``."""
        return ScoringWorker(process, group)

    def on_ready(self, facts: dict[str, str | int | float]) -> None:
        """Store the facts that a ready worker reports about the reward function: ``by_group`` and ``wants``."""
        self.by_group, self.wants = bool(facts["by_group"]), frozenset(str(facts["wants"]).split())

    async def attempt(self, worker: ScoringWorker, call: ScoreCall, number: int) -> Scores | CallLoss:
        """Score the request of ``call`` in ``worker`` as order ``number``, and return the scores or the reason why the
        call was lost. A call that takes longer than its time limit is a failure, unless the worker made no progress at
        all. After :data:`MAX_BLOCKED` consecutive calls that blocked their worker, only one call runs at a time, and
        all others fail at once. Otherwise they would wait for hours for a function that always blocks."""
        if self._num_blocked >= MAX_BLOCKED and self._num_running:
            problem = f"the last {self._num_blocked} calls blocked their worker for {self._timeout_s:g} s each"
            advice = "let an async def await what it waits for, and bound what a function computes"
            return Scores(rewards=(), failure=f"reward_timeout: {problem}; {advice}")
        self._num_running += 1
        try:
            return await self._attempt(worker, call, number)
        finally:
            self._num_running -= 1

    async def _attempt(self, worker: ScoringWorker, call: ScoreCall, number: int) -> Scores | CallLoss:
        """Send ``call`` to ``worker`` as order ``number``. Return its scores, a failure as scores, or the reason why
        the call was lost. The time limit counts from the moment at which the worker begins the call."""
        peer = worker.process.peer
        started, scored = peer.expect(number, Started), peer.expect(number, Scored)
        scored.add_done_callback(partial(_mark_started, started))
        try:
            peer.send(msgspec.structs.replace(call.request, call=number))
            await started
            worker.num_running += 1
            worker.num_started += 1
            try:  # most answers arrive together with the report that the call has begun, and need no timer
                answer = scored.result() if scored.done() else await self._wait_in_time(worker, scored)
            finally:
                worker.num_running -= 1
        except TimeoutError:
            if worker.frozen or worker.crowded:
                return worker.find_loss(started=True)
            self._num_blocked += worker.blocked
            return Scores(rewards=(), failure=f"reward_timeout: no reward for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            if not scored.cancelled() or being_cancelled():
                raise
            return worker.find_loss(started=not started.cancelled())
        except ENCODING_ERRORS as error:
            return Scores(rewards=(), failure=f"reward_error: the row cannot travel: {error!a}")
        finally:
            started.cancel()
            scored.cancel()
        if not _answers_all(answer, call.request):
            peer.protocol_violation = f"{peer.name} answered a call with another number of rewards than completions"
            await worker.process.kill()
            return CallLoss.DIED
        worker.group.idle_deaths, worker.answered, self._num_blocked = 0, True, 0
        self._num_unshared = max(0, self._num_unshared - 1)
        self._mean_s = answer.mean_s
        calls = [
            Scores(rewards=each.rewards, failure=each.error, metrics=each.metrics, extra=each.extra)
            for each in answer.calls
        ]
        if isinstance(call.request, ScoreCompletions):
            return calls[0]
        return Scores(rewards=(), graded=tuple(each.get_graded(0) for each in calls))

    async def _wait_in_time(self, worker: ScoringWorker, scored: asyncio.Future[Scored]) -> Scored:
        """Wait for ``scored``, the answer of a call that has begun, up to the pool's time limit, and return it. If it
        does not arrive in time, determine the possible causes, kill the worker and raise ``TimeoutError``."""
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
        """Determine the possible causes of a late call before its worker is killed: whether the process was stopped
        (``frozen``), and whether another call may have blocked the late call (``crowded``). ``before_s`` is the
        processor time of the process when the call began, in seconds. If several calls of a worker are late, this is
        done once."""
        if worker.replaced:
            await worker.cause_known.wait()
            return
        worker.replaced = True
        try:
            # with one running call and others waiting, that call has kept the others from beginning
            worker.blocked = worker.num_running == 1 < len(worker.calls)
            halted = await worker.process.halt_reason()
            worker.frozen = bool(halted)
            computed_s = await worker.process.computed_s() - before_s
            worker.crowded = worker.num_running > 1 and computed_s > self._timeout_s / 2
        finally:
            worker.cause_known.set()
        reason = f", and its calls are made again, for its process {halted}" if halted else ""
        self.warn(f"a reward has not returned for {self._timeout_s:g} s: its worker is replaced{reason}")

    async def watch(self, worker: ScoringWorker) -> str:
        """Wait until ``worker`` has calls but has begun none of them for as long as a call may take, and return the
        warning about it. The pool then kills the worker. Return an empty text if the worker is already being replaced.
        The time is counted in checks, so that a standstill of this process's event loop counts as one check only."""
        quiet_checks, num_started = 0, 0
        while quiet_checks < NUM_CHECKS:
            await asyncio.sleep(self._timeout_s / NUM_CHECKS)
            makes_progress = worker.num_running or not worker.calls or worker.num_started != num_started
            quiet_checks, num_started = 0 if makes_progress else quiet_checks + 1, worker.num_started
        if worker.replaced:
            return ""
        worker.frozen = True
        return (
            f"a scoring worker has begun with no call for {self._timeout_s:g} s ({worker.process.peer.name} "
            f"{await worker.process.halt_reason() or 'does not answer'}): it is replaced, its calls are made again"
        )


def _answers_all(answer: Scored, request: ScoreCompletions | ScoreTogether) -> bool:
    """Return whether ``answer`` has a reward, or an error in its place, for each completion of ``request``."""
    if isinstance(request, ScoreTogether):
        sizes = [1] * sum(len(each.completions) for each in request.requests)
    else:
        sizes = [len(request.completions)]
    if len(answer.calls) != len(sizes):
        return False
    return all(each.error or len(each.rewards) == size for each, size in zip(answer.calls, sizes, strict=True))


def _combine(graded: Sequence[Graded]) -> Scores:
    """Return one record of scores for completions that were scored separately, with the results ``graded``. The record
    of a single completion is that of its call, whose failure lets the call be repeated."""
    if len(graded) == 1:
        (single,) = graded
        rewards, extra = () if single.failure else (single.reward,), (single.extra,) if single.extra else ()
        return Scores(rewards=rewards, failure=single.failure, metrics=single.metrics, extra=extra)
    return Scores(rewards=tuple(each.reward for each in graded), graded=tuple(graded))


def _mark_started(started: asyncio.Future[Any], _: asyncio.Future[Any]) -> None:
    """Set the future ``started``, for which the caller waits first. This is called when the answer to the same call has
    arrived, or the call has failed, without a report that it has begun."""
    if not started.done():
        started.set_result(None)


class ScoringStage:
    """All components of the reward. Each has its own pool of scoring workers, with its own queue and time limit, so
    that no component waits for another. ``rubric`` combines their scores."""

    def __init__(
        self,
        rewards: Sequence[AnyReward],
        start_worker: Callable[[AnyReward], Awaitable[WorkerProcess]],
        *,
        start_timeout_s: float,
        warn: Callable[[str], None],
        on_span: Callable[[Span], None],
    ) -> None:
        """Create one pool per component in ``rewards``. No worker is started yet. ``start_worker`` starts a worker of a
        component, which may take ``start_timeout_s`` seconds. ``warn`` receives warnings for users, and ``on_span``
        receives the times of scoring for the event trace."""
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
        """Keep the workers of all pools running. This ends only by cancellation, or with an error of
        :meth:`ScorerPool.keep`."""
        async with asyncio.TaskGroup() as group:
            for pool in self._pools:
                group.create_task(pool.keep())

    async def wait_until_started(self) -> None:
        """Wait until every worker of every pool is ready for calls."""
        for pool in self._pools:
            await pool.wait_until_started()
