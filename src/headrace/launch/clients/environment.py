"""The pool of environment workers: processes that run user environments and are replaced when one hangs or dies. An
episode asks the model with a *query*, which the controller answers.

    episode ──RunEpisode──▶ worker        the user's code
       ▲    ◀──ModelQuery────  │
       └──▶ ──Replied───────▶  │          any number of times
            ◀──EpisodeDone─────┘

The episodes of a worker, when something goes wrong:

    one of them blocks the event loop ── it fails, the worker is replaced, and the others begin again
    one of them does not end when it is cancelled ── the worker gets no more episodes, and the others end there
    the worker died, or fell silent ── its episodes begin again in the shared workers. Those that lose a second worker
    are tried by halves in workers of their own, until the one that kills its worker is found and fails (suspects.py)
    the process was stopped by a signal ── the worker is replaced, and its episodes begin again
    the machine was lost ── its episodes begin again on other machines
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
    start_in,
)
from headrace.launch.clients.suspects import ByHalves
from headrace.launch.endpoints import EpisodeEndpoint
from headrace.rollout.environments import AttemptOutcome, OpenEpisode

GRACE_S = 2.0
"""Seconds that a cancelled episode may take to end."""
CHECK_S = 0.5
"""Seconds between two checks whether a worker has sent anything."""
MAX_QUERIES = 1024
"""Number of model queries of one episode that may wait for an answer."""
MAX_ORIGINS = 10_000
"""Number of episodes whose workers are remembered, so that their branches run there too."""


@dataclass(slots=True, eq=False, kw_only=True)
class EpisodeCall(PoolCall):
    """One attempt at a task, over all workers in which it runs: if a worker is lost, the episode begins again in
    another one."""

    order: RunEpisode
    """The message that starts it in a worker."""
    episode: OpenEpisode
    """The controller's side of it, which samples from the model and records the turns."""
    begun: bool = False
    """Whether it has run in a worker before."""
    tasks: asyncio.TaskGroup | None = None
    """The task group of its answers, while it runs in a worker; ``None`` at other times."""
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks that answer its model queries."""

    def ask(self, peer: Peer, query: ModelQuery) -> None:
        """Start to answer a model query that the episode sent from the worker ``peer``. A query that is one too many is
        refused; one of an episode that has ended is ignored."""
        if self.tasks is None:
            return
        if len(self.answers) >= MAX_QUERIES:
            problem = f"{MAX_QUERIES} questions of this episode are open, and no more may be"
            remedy = "wait for their answers"
            peer.send(AnswerRefused(ask=query.ask, reason="env_error", spent=False, problem=problem, remedy=remedy))
            return
        if task := start_in(self.tasks, self._answer(peer, query)):
            self.answers.add(task)
            task.add_done_callback(self.answers.discard)

    def end(self) -> None:
        """Cancel the answers that have not been sent, since the episode has ended in its worker, or its worker is
        lost."""
        self.tasks = None
        for task in self.answers:
            task.cancel()

    async def _answer(self, peer: Peer, query: ModelQuery) -> None:
        """Let the model answer a query of the environment, and send the answer to the worker ``peer``; or send the
        reason why there is none. A query gives either token ids to continue, or messages and tools to render."""
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
    """A process that runs episodes, as the pool sees it: the calls that it has, and whether it hangs."""

    served: bool = False
    """Whether it has ever run an episode."""
    blocked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when code of an episode blocks its event loop."""
    blocked_by: int = -1
    """The call whose code blocks the event loop; −1: none does."""
    was_heard: bool = False
    """Whether it has sent anything since the latest check."""

    def handle_message(self, message: Alive | ModelQuery) -> None:
        """Handle a message that is not the answer to an order: a query of an episode, or a sign of life (``Alive``),
        which names the call that blocks the worker's event loop, if any."""
        self.was_heard = True
        if isinstance(message, ModelQuery):
            call = self.calls.get(message.episode)
            if call is not None:  # an unknown call was cancelled a moment ago
                call.ask(self.process.peer, message)
        elif message.blocked_by >= 0:
            self.blocked_by = message.blocked_by
            self.blocked.set()

    def count_death(self) -> int:
        """Count the death of a worker that never ran an episode as idle; return the number of idle deaths in a row on
        its machine. The death of another worker begins the count anew."""
        self.group.idle_deaths = 0 if self.served else self.group.idle_deaths + 1  # an episode may have caused it later
        return self.group.idle_deaths


class EnvPeer(ForeignPeer):
    """The controller's end of the conversation with an environment worker. Its process runs user code, so its messages
    are not trusted."""

    worker: EnvironmentWorker | None = None
    """The worker that handles messages which are not answers; ``None`` before the worker is in a pool."""

    def handle(self, message: object) -> None:
        """Pass signs of life and model queries of episodes on to the worker; any other message is unexpected here, and
        raises :class:`~headrace.base.errors.RunError`."""
        if not isinstance(message, Alive | ModelQuery):
            super().handle(message)
        elif self.worker is not None:
            self.worker.handle_message(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPoolConfig(PoolConfig):
    """The settings of a pool of environment workers."""

    block_s: float
    """Seconds for which code of an episode may block the event loop of its worker, and for which the worker may send
    nothing."""
    scored: bool
    """Whether a reward function scores the episodes, and not their environment."""


Listening = Callable[[Callable[[str], None]], AbstractAsyncContextManager[EpisodeEndpoint]]
"""Opens the endpoint at which programs reach their episodes; the function that it is called with receives warnings."""


class EnvPool(WorkerPool[EnvironmentWorker, EpisodeCall, EpisodeDone]):
    """The pool of environment workers, which implements the :class:`~headrace.rollout.environments.Environment`
    contract. With ``listening``, programs that an episode starts can ask the model over HTTP."""

    asks_prompt = False
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
        """Make a pool whose workers are not started yet. ``start_worker`` starts one on this machine; ``warn`` receives
        warnings for users; ``listening`` is described at the class."""
        super().__init__(start_worker, config, ByHalves(), warn=warn)
        self._config = config
        self._listening = listening
        self._endpoint: EpisodeEndpoint | None = None
        self._origins: dict[int, EnvironmentWorker] = {}
        """The workers that ran the latest episodes from which branches may leave, by the seed of the episode."""

    async def keep(self) -> None:
        """Keep the workers running, together with the endpoint through which their programs reach the policy, if the
        environment has one."""
        if self._listening is None:
            await super().keep()
        else:
            async with self._listening(self.warn) as self._endpoint:
                await super().keep()

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Make one attempt at ``task`` in a worker, and return its rewards. It begins again if its worker is lost and
        the attempt is not to blame. ``episode`` answers its model queries and records its turns.

        Raises :class:`~headrace.base.errors.EpisodeError`, with the reason, if the episode failed.
        """
        order = RunEpisode(
            call=0,
            row=task.row,
            prompt_ids_T=task.prompt_ids_T,
            seed=episode.seed,
            attempt_kind=episode.attempt_kind,
        )
        call = EpisodeCall(order=order, episode=episode)
        done = await self.make(call)
        if isinstance(done, CallLoss):
            raise EpisodeError(
                f"the process that ran it died, alone too: {call.cause}",
                remedy="look at logs/environment-*.log in the run directory",
                reason="env_crashed",
            )
        if done.reason:
            raise EpisodeError(done.problem, remedy="fix the environment", reason=done.reason)
        if done.reward is None and not done.agent_rewards and not self._config.scored:
            raise EpisodeError(
                "the environment did not say what it earned, and there is no reward function",
                remedy="return a reward, or set env.reward",
                reason="reward_none",
            )
        if done.agent_rewards and self._config.scored:
            raise EpisodeError(
                "the environment says what each agent earned, and there is a reward function that would count instead",
                remedy="leave env.reward and env.rewards out, or agent_rewards",
            )
        reward = None if self._config.scored else done.reward
        return AttemptOutcome(
            reward=reward,
            turn_rewards=done.turn_rewards,
            agent_rewards=done.agent_rewards,
            trained=done.trained,
            turn_extra=done.turn_extra,
        )

    def preferred(self, call: EpisodeCall) -> EnvironmentWorker | None:
        """Return the worker that ran the origin of a branch, since it may have kept the moments of its world."""
        return self._origins.get(call.order.seed) if call.order.attempt_kind is AttemptKind.BRANCH else None

    def new_worker(self, process: WorkerProcess, group: WorkerGroup) -> EnvironmentWorker:
        """Return the worker of a new process on the machine of ``group``. The process's messages go to it from now
        on."""
        worker = EnvironmentWorker(process, group)
        assert isinstance(process.peer, EnvPeer)
        process.peer.worker = worker
        return worker

    async def attempt(self, worker: EnvironmentWorker, call: EpisodeCall, number: int) -> EpisodeDone | CallLoss:
        """Run an episode in a worker as call ``number``, from the beginning if an earlier worker began it. Return the
        worker's report of its end, or why it was lost. With an endpoint, the episode has a session of its own there,
        and a failure names the last request that the endpoint refused."""
        if call.begun:
            call.episode.restart()
        call.begun = worker.served = True
        if call.order.attempt_kind is AttemptKind.ORIGIN:
            self._origins[call.order.seed] = worker
            if len(self._origins) > MAX_ORIGINS:
                del self._origins[next(iter(self._origins))]
        if self._endpoint is None:
            return await self._in_worker(worker, call, number, call.order)
        async with self._endpoint.session(call.episode) as access:
            order = msgspec.structs.replace(call.order, variables=dict(access.variables))
            found = await self._in_worker(worker, call, number, order)
        if isinstance(found, EpisodeDone) and found.reason and access.last_refusal:
            words = f"{found.problem} (a request of it had been refused: {access.last_refusal})"
            return msgspec.structs.replace(found, problem=words)
        return found

    async def _in_worker(
        self, worker: EnvironmentWorker, call: EpisodeCall, number: int, order: RunEpisode
    ) -> EpisodeDone | CallLoss:
        """Send ``order`` to a worker and answer the episode's queries until it has ended or is lost; return the report
        of its end, or why it was lost. If it is cancelled, let the worker end it in the background. Raises
        :class:`~headrace.base.errors.EpisodeError` if the episode blocked the worker's event loop, or if its row of
        data cannot be sent."""
        if worker.left.is_set():  # the worker was retired while the session was being opened
            return CallLoss.INNOCENT
        peer = worker.process.peer
        done = peer.expect(number, EpisodeDone)
        try:
            peer.send(msgspec.structs.replace(order, call=number))
            async with asyncio.TaskGroup() as call.tasks:
                ended = await done
                call.end()
            return ended
        except asyncio.CancelledError:
            if not done.cancelled() or being_cancelled():
                self.in_background(self._end_cancelled(worker, number))
                raise
        except BaseExceptionGroup as errors:
            # errors of the answers come from the engine, and are not the episode's fault
            self.in_background(self._end_cancelled(worker, number))
            raise errors.exceptions[0] from None
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
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
        """Order a worker to end the cancelled episode ``number``. If it does not end within :data:`GRACE_S`, the worker
        gets no more episodes, and is replaced when its others have ended."""
        peer = worker.process.peer
        ended = peer.expect(number, EpisodeDone)
        peer.send(Cancel(call=number))
        await asyncio.wait([ended], timeout=GRACE_S)
        if not ended.done() and not worker.replaced:
            self.warn("an episode that was given up does not end: its worker is replaced when its others have ended")
            await worker.retire()
        ended.cancel()

    async def watch(self, worker: EnvironmentWorker) -> str:
        """Wait until code of an episode blocks the event loop of a worker, or the worker has sent nothing for
        ``block_s``; return the warning that says so. The pool then kills the worker. Silence is counted in checks, so
        that a standstill of this event loop counts as one check only."""
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
        if halted := await worker.process.halted():
            worker.replaced = True
            return f"an environment worker {halted}: it is replaced, and its episodes begin again"
        return "an environment worker has fallen silent: it is replaced"
