"""The pool of environment workers: processes that run the user's environments, and that are replaced when they hang or
die. An episode requests an answer of the model with a *query*, which the controller answers.

    episode ──RunEpisode──▶ worker        the user's code
       ▲    ◀──ModelQuery────  │
       └──▶ ──Replied───────▶  │          any number of times
            ◀──EpisodeDone─────┘

What happens to the episodes of a worker after a failure:

    an episode blocks the event loop       it fails, the worker is replaced, and its other episodes begin again
    a cancelled episode does not end       the worker receives no more episodes, and its other episodes end there
    the worker dies, or becomes silent     its episodes begin again in the shared workers. Episodes that lose a second
                                           worker are tried by halves in separate workers, until the episode that kills
                                           its worker is found and fails (suspects.py)
    a signal has stopped the process       the worker is replaced, and its episodes begin again
    the machine is lost                    its episodes begin again on other machines
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import msgspec

from headrace.base.clock import being_cancelled
from headrace.base.errors import BudgetSpent, EpisodeError, RequestError
from headrace.base.types.episode import AttemptKind
from headrace.base.types.messages.codec import ENCODING_ERRORS
from headrace.base.types.messages.controller import Alive, EpisodeDone, ModelQuery
from headrace.base.types.messages.environment import AnswerRefused, Cancel, Replied, RunEpisode
from headrace.base.types.task import Task
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.clients.pool import (
    CallLoss,
    PoolCall,
    PoolConfig,
    Worker,
    WorkerGroup,
    WorkerPool,
    WorkerProcess,
    create_task_if_open,
)
from headrace.launch.clients.suspects import ByHalves
from headrace.launch.endpoints import EpisodeEndpoint
from headrace.rollout.environments import AttemptOutcome, OpenEpisode

GRACE_S = 2.0
"""Seconds that a cancelled episode may take to end."""
CHECK_S = 0.5
"""Seconds between two checks whether a worker has sent anything."""
MAX_QUERIES = 1024
"""Number of model queries of one episode that may be unanswered at the same time."""
MAX_ORIGINS = 10_000
"""Number of episodes whose worker is stored, so that branches of the episode can run in the same worker."""


@dataclass(slots=True, eq=False, kw_only=True)
class EpisodeCall(PoolCall):
    """One attempt at a task, over all workers in which it runs. If a worker is lost, the episode begins again in
    another worker."""

    order: RunEpisode
    """The message that starts the episode in a worker."""
    episode: OpenEpisode
    """The controller's side of the episode, which samples from the model and records the turns."""
    started: bool = False
    """Whether the episode has run in a worker before."""
    tasks: asyncio.TaskGroup | None = None
    """The task group of its answers while it runs in a worker; ``None`` otherwise."""
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks that answer the episode's model queries."""

    def ask(self, peer: Peer, query: ModelQuery) -> None:
        """Begin to answer ``query``, a model query that the episode has sent from the worker ``peer``. A query beyond
        :data:`MAX_QUERIES` is refused. A query of an episode that has ended is ignored."""
        if self.tasks is None:
            return
        if len(self.answers) >= MAX_QUERIES:
            problem = f"{MAX_QUERIES} questions of this episode are open, and no more may be"
            remedy = "wait for their answers"
            peer.send(AnswerRefused(ask=query.ask, reason="env_error", spent=False, problem=problem, remedy=remedy))
            return
        if task := create_task_if_open(self.tasks, self._answer(peer, query)):
            self.answers.add(task)
            task.add_done_callback(self.answers.discard)

    def end(self) -> None:
        """Cancel all answers that were not sent yet, because the episode has ended in its worker or the worker is
        lost."""
        self.tasks = None
        for task in self.answers:
            task.cancel()

    async def _answer(self, peer: Peer, query: ModelQuery) -> None:
        """Sample an answer to ``query`` and send it to the worker ``peer``, or send the reason why there is no answer.
        A query contains either token ids to continue, or messages and tools to render."""
        try:
            if query.prompt_ids_T is not None:
                reply = await self.episode.sample(query.prompt_ids_T, query.options)
            else:
                reply = await self.episode.reply(query.messages, query.tools, query.options)
        except (EpisodeError, RequestError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "request_refused"
            spent = isinstance(error, BudgetSpent)
            peer.send(
                AnswerRefused(ask=query.ask, reason=reason, spent=spent, problem=error.problem, remedy=error.remedy)
            )
        else:
            peer.send(Replied(ask=query.ask, reply=reply))


@dataclass(slots=True, eq=False)
class EnvironmentWorker(Worker[EpisodeCall]):
    """A worker process that runs episodes, as the pool sees it: its calls, and whether it hangs."""

    served: bool = False
    """Whether the worker has ever run an episode."""
    blocked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the code of an episode blocks the worker's event loop."""
    blocked_by: int = -1
    """The number of the call whose code blocks the event loop; −1 if none does."""
    was_heard: bool = False
    """Whether the worker has sent a message since the latest check."""

    def handle_message(self, message: Alive | ModelQuery) -> None:
        """Handle a message that is not the answer to an order: a query of an episode, or a heartbeat (``Alive``), which
        contains the number of the call that blocks the worker's event loop, if any."""
        self.was_heard = True
        if isinstance(message, ModelQuery):
            call = self.calls.get(message.episode)
            if call is not None:  # otherwise the call was just cancelled
                call.ask(self.process.peer, message)
        elif message.blocked_by >= 0:
            self.blocked_by = message.blocked_by
            self.blocked.set()

    def count_death(self) -> int:
        """Count the worker's death as idle if the worker never ran an episode, and return the number of consecutive
        idle deaths on its machine. The death of a worker that ran an episode resets the count."""
        # an episode may cause the death of its worker even after it has ended
        self.group.idle_deaths = 0 if self.served else self.group.idle_deaths + 1
        return self.group.idle_deaths


class EnvPeer(ForeignPeer):
    """The controller's client of an environment worker. The worker runs user code, so its messages are not trusted."""

    worker: EnvironmentWorker | None = None
    """The worker that handles messages other than answers; ``None`` until the worker is part of a pool."""

    def handle(self, message: object) -> None:
        """Pass heartbeats and model queries to the worker. Any other message raises
        :class:`~headrace.base.errors.RunError`."""
        if not isinstance(message, Alive | ModelQuery):
            super().handle(message)
        elif self.worker is not None:
            self.worker.handle_message(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPoolConfig(PoolConfig):
    """The settings of a pool of environment workers."""

    block_s: float
    """Seconds for which the code of an episode may block the event loop of its worker, and for which the worker may
    send no message."""
    scored: bool
    """Whether a reward function scores the episodes. If not, the environment returns the rewards."""


Listening = Callable[[Callable[[str], None]], AbstractAsyncContextManager[EpisodeEndpoint]]
"""Opens the endpoint at which programs reach their episodes. Its argument is a function that receives warnings."""


class EnvPool(WorkerPool[EnvironmentWorker, EpisodeCall, EpisodeDone]):
    """The pool of environment workers, which implements the :class:`~headrace.rollout.environments.Environment`
    contract. With ``listening``, programs that an episode starts can reach the model over HTTP."""

    begins_with_prompt = False
    worker_name = "environment worker"
    lost_calls = "its {num} episodes begin again"
    slow_start = "is the file of env.entry slow to import?"

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[WorkerProcess]],
        config: EnvPoolConfig,
        *,
        warn: Callable[[str], None],
        listening: Listening | None = None,
    ) -> None:
        """Create a pool whose workers are not started yet. ``start_worker`` starts one worker on this machine; ``warn``
        receives warnings for users; the class describes ``listening``."""
        super().__init__(start_worker, config, ByHalves(), warn=warn)
        self._config = config
        self._listening = listening
        self._endpoint: EpisodeEndpoint | None = None
        """The endpoint at which programs reach their episodes; ``None`` if there is none, or before :meth:`keep`."""
        self._origins: dict[int, EnvironmentWorker] = {}
        """The workers that have run the latest episodes that may have branches, by the seed of the episode."""

    async def keep(self) -> None:
        """Keep the workers running. If the environment has an endpoint, through which programs reach the policy, keep
        it open too."""
        if self._listening is None:
            await super().keep()
        else:
            async with self._listening(self.warn) as self._endpoint:
                await super().keep()

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Make one attempt at ``task`` in a worker, and return the outcome with its rewards. If the worker is lost and
        the attempt is not the cause, the attempt begins again. ``episode`` answers the model queries and records the
        turns.

        Raises :class:`~headrace.base.errors.EpisodeError`, with the reason, if the episode has failed.
        """
        order = RunEpisode(
            call=0, row=task.row, prompt_ids_T=task.prompt_ids_T, seed=episode.seed, attempt_kind=episode.attempt_kind
        )
        call = EpisodeCall(order=order, episode=episode)
        report = await self.execute(call)
        if isinstance(report, CallLoss):
            raise EpisodeError(
                f"the process that ran it died, alone too: {call.cause}",
                remedy="look at logs/environment-*.log in the run directory",
                reason="env_crashed",
            )
        if report.reason:
            raise EpisodeError(report.problem, remedy="fix the environment", reason=report.reason)
        if report.reward is None and not report.agent_rewards and not self._config.scored:
            raise EpisodeError(
                "the environment did not say what it earned, and there is no reward function",
                remedy="return a reward, or set env.reward",
                reason="reward_none",
            )
        if report.agent_rewards and self._config.scored:
            raise EpisodeError(
                "the environment says what each agent earned, and there is a reward function that would count instead",
                remedy="leave env.reward and env.rewards out, or agent_rewards",
            )
        reward = None if self._config.scored else report.reward
        return AttemptOutcome(
            reward=reward,
            turn_rewards=report.turn_rewards,
            agent_rewards=report.agent_rewards,
            trained=report.trained,
            turn_extra=report.turn_extra,
        )

    def preferred_worker(self, call: EpisodeCall) -> EnvironmentWorker | None:
        """Return the worker that has run the origin of a branch, because it may still have snapshots of the origin's
        world; ``None`` for other episodes."""
        return self._origins.get(call.order.seed) if call.order.attempt_kind is AttemptKind.BRANCH else None

    def create_worker(self, process: WorkerProcess, group: WorkerGroup) -> EnvironmentWorker:
        """Return the worker for ``process``, a new process on the machine of ``group``. From now on, the worker handles
        the messages of the process."""
        worker = EnvironmentWorker(process, group)
        assert isinstance(process.peer, EnvPeer)
        process.peer.worker = worker
        return worker

    async def attempt(self, worker: EnvironmentWorker, call: EpisodeCall, number: int) -> EpisodeDone | CallLoss:
        """Run the episode of ``call`` in ``worker`` as call ``number``. If an earlier worker has started it, it starts
        from the beginning. Return the worker's report of its end, or the reason why it was lost. If the pool has an
        endpoint, the episode has its own session there, and the report of a failure contains the last request that the
        endpoint refused."""
        if call.started:
            call.episode.restart()
        call.started = worker.served = True
        if call.order.attempt_kind is AttemptKind.ORIGIN:
            self._origins[call.order.seed] = worker
            if len(self._origins) > MAX_ORIGINS:
                del self._origins[next(iter(self._origins))]
        if self._endpoint is None:
            return await self._run_in_worker(worker, call, number, call.order)
        async with self._endpoint.session(call.episode) as access:
            order = msgspec.structs.replace(call.order, variables=dict(access.variables))
            outcome = await self._run_in_worker(worker, call, number, order)
        if isinstance(outcome, EpisodeDone) and outcome.reason and access.last_refusal:
            problem = f"{outcome.problem} (a request of it had been refused: {access.last_refusal})"
            return msgspec.structs.replace(outcome, problem=problem)
        return outcome

    async def _run_in_worker(
        self, worker: EnvironmentWorker, call: EpisodeCall, number: int, order: RunEpisode
    ) -> EpisodeDone | CallLoss:
        """Send ``order``, which starts the episode of ``call``, to ``worker`` as call ``number``, and answer the
        episode's queries until the episode has ended or is lost. Return the report of its end, or the reason why it was
        lost. If this call is cancelled, the worker ends the episode in the background. Raises
        :class:`~headrace.base.errors.EpisodeError` if the episode has blocked the worker's event loop, or if the data
        row of its task cannot be encoded."""
        if worker.slot_freed.is_set():  # the worker was retired while the session was opened
            return CallLoss.INNOCENT
        peer = worker.process.peer
        done = peer.expect(number, EpisodeDone)
        try:
            peer.send(msgspec.structs.replace(order, call=number))
            async with asyncio.TaskGroup() as call.tasks:
                report = await done
                call.end()
            return report
        except asyncio.CancelledError:
            if not done.cancelled() or being_cancelled():
                self.run_in_background(self._end_cancelled(worker, number))
                raise
        except BaseExceptionGroup as errors:
            # the answers have failed with errors of the engine, and the episode is not the cause
            self.run_in_background(self._end_cancelled(worker, number))
            raise errors.exceptions[0] from None
        except ENCODING_ERRORS as error:
            raise EpisodeError(f"the row cannot travel: {error!a}", remedy="keep plain data in the rows") from None
        finally:
            done.cancel()
            call.end()
        if worker.blocked_by == number:
            raise EpisodeError(
                f"its code kept the loop of its worker from turning for env.block_s={self._config.block_s:g} s",
                remedy="await what waits, and hand what computes to asyncio.to_thread",
                reason="env_blocked",
            )
        return CallLoss.INNOCENT if worker.replaced else CallLoss.DIED

    async def _end_cancelled(self, worker: EnvironmentWorker, number: int) -> None:
        """Order ``worker`` to end the cancelled episode ``number``. If the episode does not end within :data:`GRACE_S`,
        the worker receives no more episodes, and is replaced when its other episodes have ended."""
        peer = worker.process.peer
        report = peer.expect(number, EpisodeDone)
        peer.send(Cancel(call=number))
        await asyncio.wait([report], timeout=GRACE_S)
        if not report.done() and not worker.replaced:
            self.warn("an episode that was given up does not end: its worker is replaced when its others have ended")
            await worker.retire()
        report.cancel()

    async def watch(self, worker: EnvironmentWorker) -> str:
        """Wait until the code of an episode blocks the event loop of ``worker``, or until the worker has sent no
        message for ``block_s``, and return the warning about it. The pool then kills the worker. Silence is counted in
        checks, so that a standstill of this process's event loop counts as one check only."""
        quiet_checks = 0
        while quiet_checks * CHECK_S < self._config.block_s + CHECK_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await worker.blocked.wait()
            if worker.blocked.is_set():
                worker.replaced = True
                return "code of an episode blocks the loop of its worker: the worker is replaced"
            quiet_checks = 0 if worker.was_heard else quiet_checks + 1
            worker.was_heard = False
        if halted := await worker.process.halt_reason():
            worker.replaced = True
            return f"an environment worker {halted}: it is replaced, and its episodes begin again"
        return "an environment worker has fallen silent: it is replaced"
