"""The process of an environment worker, which runs many episodes of one environment (user code) at the same time. An
episode asks the model with a *query*, which the controller answers. Each order to run an episode has a number, its
*call*.

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
from headrace.launch.hosts.worker import CallThreads, end_now, serve
from headrace.launch.starts import EnvironmentStart
from headrace.rollout.environments.base import AS_THE_RUN
from headrace.rollout.environments.bridges import load_environment
from headrace.rollout.environments.entry import Rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.scoring.reward import plain_value

ALIVE_S = 0.5
"""Seconds between two reports that this process lives."""
MAX_CAUSE_CHARS = 2000
"""Number of characters that are sent of a failure's cause."""
MAX_CHARS = 1 << 26
"""Number of characters that the messages of one model query may have. No model reads more, and the controller must not
have to."""
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
"""The folders of this library and of the standard library, whose code no episode brings."""
_EPISODE: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=-1)
"""The call number of the episode whose code is running; −1: no episode's code."""


def run_environment(start: EnvironmentStart, channel: PartChannel) -> None:
    """Import the environment that ``start`` names, report that the worker is ready, and run the episodes that the
    controller orders until it orders to shut down. This is the whole work of an environment worker's process."""
    asyncio.run(_serve(start, channel))


async def _serve(start: EnvironmentStart, channel: PartChannel) -> None:
    """Import the environment of the user, and carry out the controller's orders in this event loop, with a watchdog,
    until it orders to shut down."""
    threads = CallThreads(max_workers=start.concurrency, thread_name_prefix="environment")
    watch = _LoopWatchdog(asyncio.get_running_loop(), channel, RealClock(), block_s=start.block_s)
    rollout = load_environment(start.kind, start.entry, start.options, threads, own_namespace=start.own_namespace)
    source = start.entry.rpartition(":")[0]
    dispatcher = _RequestDispatcher(channel=channel, rollout=rollout, threads=threads, source=source)
    await serve(channel, dispatcher.handle, on_ready=watch.begin)


@dataclass(slots=True, kw_only=True)
class _RequestDispatcher:
    """Carries out the controller's orders. It has the episodes that run here, and their model queries that wait for an
    answer."""

    channel: PartChannel
    rollout: Rollout
    threads: CallThreads
    source: str
    """The path of the user's file."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks of the episodes that run, by call."""
    queries: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    """The answers that are expected, by the number of their query."""
    num_queries: int = 0
    """Number of model queries so far."""
    given_up: set[int] = field(default_factory=set)
    """The calls of the episodes that the controller has cancelled."""

    def handle(self, order: orders.Message, episodes: asyncio.TaskGroup) -> None:
        """Carry out one order of the controller: start an episode, give a running one the answer that it waits for, or
        cancel it."""
        match order:
            case orders.RunEpisode():
                context = contextvars.copy_context()
                context.run(_EPISODE.set, order.call)
                self.running[order.call] = episodes.create_task(self.run(order), context=context)
            case orders.Replied():
                self._set_answer(order.ask, order.reply)
            case orders.AnswerRefused():
                kind = BudgetSpent if order.spent else EpisodeError
                self._set_answer(order.ask, kind(order.problem, remedy=order.remedy, reason=order.reason))
            case orders.Cancel():
                if order.call in self.running:
                    self.given_up.add(order.call)
                    self.running[order.call].cancel()

    async def run(self, order: orders.RunEpisode) -> None:
        """Run one episode to its end, and send its rewards or the cause of its failure. If the user's code has
        cancelled the task, the whole process ends, so that all its episodes are made again elsewhere."""
        remote = _Remote(self, order)
        policy = EpisodePolicy(
            remote,
            prompt_ids=order.prompt_ids_T.tolist(),
            attempt_kind=order.attempt_kind,
            variables=order.variables,
            executor=self.threads,
        )
        try:
            ended = await self.rollout(order.row, policy)
            self.channel.send(_done(order.call, ended))
        except (EpisodeError, RequestError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "request_refused"
            self._fail(order.call, reason, f"{error.problem}; {error.remedy}" if error.remedy else error.problem)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its failure is a record
            if _is_cancelled(error) and order.call not in self.given_up:
                end_now()  # code of an unknown episode cancelled this task, so all of them are made again
            self._fail(order.call, "env_error", _in_words(error, self.source))
        finally:
            self.running.pop(order.call, None)
            self.given_up.discard(order.call)
            for answer in remote.open:
                answer.cancel()

    async def ask(self, query: ModelQuery, episode: set[asyncio.Future[Reply]]) -> Reply:
        """Send a model query and wait for the answer, and return it. Meanwhile its future is in ``episode``, the set of
        answers that the episode waits for. Raises :class:`~headrace.base.errors.EpisodeError` if the query is too long,
        or if the controller refuses it."""
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
        """Give the episode that sent the query number ``ask`` its answer, or raise the error there. Nothing happens if
        it does not wait for it any more."""
        future = self.queries.get(ask)
        if future is None or future.done():  # the episode does not wait for it any more
            return
        if isinstance(answer, Reply):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _fail(self, call: int, reason: str, words: str) -> None:
        """Report that the episode of ``call`` has failed: ``reason`` is the name under which failures are counted, and
        ``words`` describes the cause, of which the first :data:`MAX_CAUSE_CHARS` characters are sent."""
        problem = words[:MAX_CAUSE_CHARS].encode("utf-8", "replace").decode()
        self.channel.send(EpisodeDone(call=call, reason=reason, problem=problem))


class _Remote:
    """The episode as the user's code reaches it in this process: calls to the model become queries to the controller,
    which has the real :class:`~headrace.rollout.environments.base.OpenEpisode`."""

    def __init__(self, dispatcher: _RequestDispatcher, order: orders.RunEpisode) -> None:
        """Make the episode of ``order``, whose queries go through ``dispatcher``."""
        self.seed = order.seed
        self.open: set[asyncio.Future[Reply]] = set()
        """The answers that the episode waits for."""
        self._dispatcher = dispatcher
        self._call = order.call

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        """Return the model's answer to ``messages``, given the ``tools`` that it may call."""
        query = self._query(messages=tuple(messages), tools=tuple(tools), options=options)
        return await self._dispatcher.ask(query, self.open)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return what the model samples after the token ids ``prompt_ids_T``."""
        return await self._dispatcher.ask(self._query(prompt_ids_T=prompt_ids_T, options=options), self.open)

    def _query(self, **what: Any) -> ModelQuery:
        """Return a new query of this episode with the given fields, and with a number that no other query has."""
        self._dispatcher.num_queries += 1
        return ModelQuery(episode=self._call, ask=self._dispatcher.num_queries, **what)


class _LoopWatchdog:
    """A thread that sends signs of life to the controller, and reports when ``loop`` has been blocked for ``block_s``
    seconds, and by the code of which episode."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: PartChannel, clock: Clock, *, block_s: float) -> None:
        """Prepare the watchdog; :meth:`begin` starts its thread. It must be made in the thread that runs ``loop``."""
        self._loop = loop
        self._channel = channel
        self._clock = clock
        self._block_s = block_s
        self._thread = threading.get_ident()
        self._last_turn_s = clock.now()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Start the thread, and record from now on which episode each new task belongs to."""
        self._loop.set_task_factory(self._make_task)
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None, **how: Any
    ) -> asyncio.Task[Any]:
        """Create a task for the event loop, and record the call number of the episode that creates it; −1: none. This
        is the loop's task factory."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **how)
        self._owners[task] = _EPISODE.get() if context is None else context.get(_EPISODE, -1)
        return task

    def _run(self) -> None:
        """Check again and again that the event loop takes its turns, and report the episode that blocks it, until the
        process ends."""
        nap = threading.Event()
        reported = False
        while True:
            self._loop.call_soon_threadsafe(self._note_turn)
            nap.wait(ALIVE_S)
            blocked = self._clock.now() - self._last_turn_s > self._block_s
            culprit = self._culprit() if blocked else -1
            if culprit >= 0 and not reported:
                reported = True
                self._channel.send(Alive(blocked_by=culprit))
            elif not blocked:
                reported = False
                self._channel.send(Alive())

    def _culprit(self) -> int:
        """Return the call number of the episode whose code the event loop runs now; −1 if it runs none. This library's
        own code may wait in the task of an episode too, for memory or a lock that other episodes hold: then no episode
        is blamed, and the controller replaces the silent worker."""
        task = asyncio.current_task(self._loop)
        if task is None or not _brings_code(sys._current_frames().get(self._thread)):
            return -1
        return self._owners.get(task, -1)

    def _note_turn(self) -> None:
        """Record that the event loop has just taken a turn; the loop itself calls this."""
        self._last_turn_s = self._clock.now()


def _brings_code(frame: FrameType | None) -> bool:
    """Return whether any function on the stack that ends with ``frame`` is neither this library's nor the standard
    library's, so that it is the code of an episode; false for no frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith((_STANDARD, "<frozen")) and "-packages" not in file
        if not standard and not file.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _done(call: int, ended: Episode) -> EpisodeDone:
    """Return the message that reports the rewards of an episode that has ended, and which of its turns are trained
    (``None``: all)."""
    trained = None if ended.trained is None else tuple(reply.turn for reply in ended.trained)
    return EpisodeDone(
        call=call,
        reward=ended.reward,
        turn_rewards=dict(ended.rewards),
        agent_rewards=dict(ended.agent_rewards),
        trained=trained,
        turn_extra={
            turn: {str(name): plain_value(value) for name, value in columns.items()}
            for turn, columns in ended.extra.items()
        },
    )


def _is_cancelled(error: BaseException) -> bool:
    """Return whether ``error`` is the cancellation of the current task, and not a ``CancelledError`` that user code
    raised by itself."""
    return isinstance(error, asyncio.CancelledError) and being_cancelled()


def _in_words(error: BaseException, source: str) -> str:
    """Return an exception of the user's code as text: its type, its message and, if the traceback has one, the line
    number in the user's file, whose path is ``source``. This function never raises, even if the exception cannot be
    printed."""
    try:
        return where(error, source)
    except BaseException:  # noqa: BLE001 - the user's ``__str__`` is user code too
        return f"{type(error).__name__}, which cannot be printed"
