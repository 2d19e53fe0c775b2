"""The process of an environment worker, which runs many episodes of one environment (user code) at the same time. An
episode requests an answer of the model with a *query*, which the controller answers. Each order to run an episode has a
number, its *call*.

receiver ──orders──▶ loop: every episode is a task; async user code runs here
threads              plain functions of the user, a thread for each
watchdog             reports that this process lives, and which episode blocks the event loop
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.base.clock import Clock, RealClock, being_cancelled
from headrace.base.config.user_code import where
from headrace.base.errors import BudgetSpent, EpisodeError, RequestError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.messages import environment as orders
from headrace.base.types.messages.controller import Alive, EpisodeDone, ModelQuery
from headrace.base.types.tokens import IntColumn
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.worker import CallThreads, kill_now, serve
from headrace.launch.starts import EnvironmentStart
from headrace.rollout.environments.base import AS_THE_RUN
from headrace.rollout.environments.bridges import load_environment
from headrace.rollout.environments.entry import Rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.scoring.reward import plain_value

ALIVE_S = 0.5
"""Seconds between two heartbeats of this process."""
MAX_CAUSE_CHARS = 2000
"""The largest number of characters of a failure's cause that are sent."""
MAX_CHARS = 1 << 26
"""The largest number of characters in the messages of one model query. No model can read more, and the controller must
not have to process more."""
_PACKAGE_DIR = f"{Path(__file__).parents[2]}{os.sep}"
"""The directory of this library. Its code is not code of an episode."""
_STDLIB_DIR = f"{sysconfig.get_path('stdlib')}{os.sep}"
"""The directory of the standard library. Its code is not code of an episode."""
_EPISODE_CALL: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=-1)
"""The call number of the episode whose code is running; −1 if no episode's code is running."""


def run_environment(start: EnvironmentStart, channel: PartChannel) -> None:
    """Import the environment that ``start`` names, report that the worker is ready, and run episodes as the controller
    orders, until the order to shut down. This is the main function of an environment worker's process."""
    asyncio.run(_serve(start, channel))


async def _serve(start: EnvironmentStart, channel: PartChannel) -> None:
    """Import the user's environment, and execute the controller's orders in this event loop until the order to shut
    down. A watchdog thread observes the event loop."""
    threads = CallThreads(max_workers=start.concurrency, thread_name_prefix="environment")
    watch = _LoopWatchdog(asyncio.get_running_loop(), channel, RealClock(), block_s=start.block_s)
    rollout = load_environment(start.kind, start.entry, start.options, threads, own_namespace=start.own_namespace)
    source = start.entry.rpartition(":")[0]
    dispatcher = _OrderDispatcher(channel=channel, rollout=rollout, threads=threads, source=source)
    await serve(channel, dispatcher.handle, on_ready=watch.begin)


@dataclass(slots=True, kw_only=True)
class _OrderDispatcher:
    """The object that executes the controller's orders. It stores the running episodes and their unanswered model
    queries."""

    channel: PartChannel
    """The channel to the controller."""
    rollout: Rollout
    """The function that runs one episode of the user's environment."""
    threads: CallThreads
    """The threads for plain functions of the user."""
    source: str
    """The path of the user's file."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks of the running episodes, by call number."""
    queries: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    """The futures of expected answers, by the number of the query."""
    num_queries: int = 0
    """Number of model queries so far."""
    cancelled_calls: set[int] = field(default_factory=set)
    """The call numbers of episodes that the controller has cancelled and that have not ended yet."""

    def handle(self, order: orders.Message, episodes: asyncio.TaskGroup) -> None:
        """Execute one order of the controller: start an episode, deliver the answer to a query of a running episode, or
        cancel an episode."""
        match order:
            case orders.RunEpisode():
                context = contextvars.copy_context()
                context.run(_EPISODE_CALL.set, order.call)
                self.running[order.call] = episodes.create_task(self.run(order), context=context)
            case orders.Replied():
                self._set_answer(order.ask, order.reply)
            case orders.AnswerRefused():
                kind = BudgetSpent if order.spent else EpisodeError
                self._set_answer(order.ask, kind(order.problem, remedy=order.remedy, reason=order.reason))
            case orders.Cancel():
                if order.call in self.running:
                    self.cancelled_calls.add(order.call)
                    self.running[order.call].cancel()

    async def run(self, order: orders.RunEpisode) -> None:
        """Run one episode until it ends, and send its rewards or the cause of its failure. If user code has cancelled
        the task of the episode, the whole process ends, so that all its episodes are repeated elsewhere."""
        remote = _RemoteEpisode(self, order)
        policy = EpisodePolicy(
            remote,
            prompt_ids=order.prompt_ids_T.tolist(),
            attempt_kind=order.attempt_kind,
            variables=order.variables,
            executor=self.threads,
        )
        try:
            episode = await self.rollout(order.row, policy)
            self.channel.send(_done_message(order.call, episode))
        except (EpisodeError, RequestError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "request_refused"
            self._fail(order.call, reason, f"{error.problem}; {error.remedy}" if error.remedy else error.problem)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its failure is a record
            if _is_cancelled(error) and order.call not in self.cancelled_calls:
                kill_now()  # code of an unknown episode has cancelled this task, so all episodes are repeated
            self._fail(order.call, "env_error", where(error, self.source))
        finally:
            self.running.pop(order.call, None)
            self.cancelled_calls.discard(order.call)
            for answer in remote.open:
                answer.cancel()

    async def ask(self, query: ModelQuery, episode: set[asyncio.Future[Reply]]) -> Reply:
        """Send a model query, wait for its answer and return the answer. While it waits, its future is in ``episode``,
        the set of the episode's expected answers. Raises :class:`~headrace.base.errors.EpisodeError` if the query is
        too long or if the controller refuses it."""
        length = sum(len(message.content) + len(message.reasoning) for message in query.messages)
        if length > MAX_CHARS:
            raise EpisodeError(f"messages of {length} characters", remedy=f"send at most {MAX_CHARS}")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.queries[query.ask] = future
        episode.add(future)
        try:
            self.channel.send(query)
            return await future
        finally:
            episode.discard(future)
            del self.queries[query.ask]

    def _set_answer(self, ask: int, answer: Reply | EpisodeError) -> None:
        """Deliver the answer to the query with the number ``ask`` to the episode that has sent it. An error is raised
        in the episode. Nothing happens if the episode does not wait for the answer any more."""
        future = self.queries.get(ask)
        if future is None or future.done():  # the episode does not wait for it any more
            return
        if isinstance(answer, Reply):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _fail(self, call: int, reason: str, problem: str) -> None:
        """Report that the episode of ``call`` has failed. ``reason`` is the name under which failures are counted.
        ``problem`` describes the cause; at most :data:`MAX_CAUSE_CHARS` characters of it are sent."""
        text = problem[:MAX_CAUSE_CHARS].encode("utf-8", "replace").decode()
        self.channel.send(EpisodeDone(call=call, reason=reason, problem=text))


class _RemoteEpisode:
    """The episode as user code in this process sees it. Requests for answers become queries to the controller, which
    has the :class:`~headrace.rollout.environments.base.OpenEpisode`."""

    def __init__(self, dispatcher: _OrderDispatcher, order: orders.RunEpisode) -> None:
        """Create the episode for ``order``. Its queries are sent through ``dispatcher``."""
        self.seed = order.seed
        self.open: set[asyncio.Future[Reply]] = set()
        """The futures of the answers for which the episode waits."""
        self._dispatcher = dispatcher
        self._call = order.call
        """The number of the order to run the episode."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        """Return the model's answer to ``messages``. The answer may call ``tools``."""
        query = self._make_query(messages=tuple(messages), tools=tuple(tools), options=options)
        return await self._dispatcher.ask(query, self.open)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the model's answer after the token ids ``prompt_ids_T``."""
        return await self._dispatcher.ask(self._make_query(prompt_ids_T=prompt_ids_T, options=options), self.open)

    def _make_query(self, **fields: Any) -> ModelQuery:
        """Return a new query of this episode with the given ``fields`` and a unique number."""
        self._dispatcher.num_queries += 1
        return ModelQuery(episode=self._call, ask=self._dispatcher.num_queries, **fields)


class _LoopWatchdog:
    """A thread that sends heartbeats to the controller. It also reports when the event loop ``loop`` has been blocked
    for ``block_s`` seconds, and by the code of which episode."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: PartChannel, clock: Clock, *, block_s: float) -> None:
        """Create the watchdog; :meth:`begin` starts its thread. Call this in the thread that runs ``loop``."""
        self._loop = loop
        self._channel = channel
        self._clock = clock
        self._block_s = block_s
        self._loop_thread = threading.get_ident()
        """The id of the thread that runs the event loop."""
        self._last_turn_s = clock.now()
        """The time at which the event loop was last known to run."""
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        """The call number of the episode that has created each task; −1 if no episode has."""

    def begin(self) -> None:
        """Start the thread. From now on, the episode of each new task is recorded."""
        self._loop.set_task_factory(self._make_task)
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        """Create a task of the coroutine ``coro`` for the event loop ``loop``, and record the call number of the
        episode that creates it, or −1 if no episode does. This is the loop's task factory."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **options)
        self._owners[task] = _EPISODE_CALL.get() if context is None else context.get(_EPISODE_CALL, -1)
        return task

    def _run(self) -> None:
        """Check at intervals whether the event loop is running, and report the episode that blocks it. This is the body
        of the thread, and ends with the process."""
        pause = threading.Event()
        is_reported = False
        while True:
            self._loop.call_soon_threadsafe(self._record_turn)
            pause.wait(ALIVE_S)
            is_blocked = self._clock.now() - self._last_turn_s > self._block_s
            culprit = self._find_culprit() if is_blocked else -1
            if culprit >= 0 and not is_reported:
                is_reported = True
                self._channel.send(Alive(blocked_by=culprit))
            elif not is_blocked:
                is_reported = False
                self._channel.send(Alive())

    def _find_culprit(self) -> int:
        """Return the call number of the episode whose code the event loop is executing; −1 if it executes none. This
        library's own code may also wait in the task of an episode, for memory or for a lock that other episodes hold.
        In that case no episode is blamed, and the controller replaces the silent worker."""
        task = asyncio.current_task(self._loop)
        if task is None or not _contains_user_code(sys._current_frames().get(self._loop_thread)):
            return -1
        return self._owners.get(task, -1)

    def _record_turn(self) -> None:
        """Record that the event loop is running. The loop itself calls this."""
        self._last_turn_s = self._clock.now()


def _contains_user_code(frame: FrameType | None) -> bool:
    """Return whether the stack that ends with ``frame`` contains a function that belongs neither to this library nor to
    the standard library, and is therefore code of an episode. The result is ``False`` without a frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_stdlib = file.startswith((_STDLIB_DIR, "<frozen")) and "-packages" not in file
        if not is_stdlib and not file.startswith(_PACKAGE_DIR):
            return True
        frame = frame.f_back
    return False


def _done_message(call: int, episode: Episode) -> EpisodeDone:
    """Return the message that reports the rewards of an ended episode, and which of its turns are trained (``None``
    means all)."""
    trained = None if episode.trained is None else tuple(reply.turn for reply in episode.trained)
    return EpisodeDone(
        call=call,
        reward=episode.reward,
        turn_rewards=dict(episode.rewards),
        agent_rewards=dict(episode.agent_rewards),
        trained=trained,
        turn_extra={
            turn: {str(name): plain_value(value) for name, value in columns.items()}
            for turn, columns in episode.extra.items()
        },
    )


def _is_cancelled(error: BaseException) -> bool:
    """Return whether ``error`` is the cancellation of the current task, and not a ``CancelledError`` that user code has
    raised."""
    return isinstance(error, asyncio.CancelledError) and being_cancelled()
