"""An environment worker's process: many episodes of one environment at once.

ears ──orders──▶ loop: every episode is a task; async code of the user runs here
hands            plain functions of the user, a thread each
watch            tells the controller that this process lives, and which episode keeps the loop from turning
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.base.clock import Clock, RealClock, being_cancelled
from headrace.base.config.user_code import where
from headrace.base.environ import forget_token, run_token
from headrace.base.errors import BudgetSpent, EpisodeError, RequestError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.messages import environment as orders
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Alive, EpisodeDone, ModelQuery, Ready
from headrace.base.types.tokens import IntColumn
from headrace.launch.channel import PartChannel
from headrace.launch.starts import EnvironmentStart
from headrace.rollout.environments.base import AS_THE_RUN
from headrace.rollout.environments.entry import Rollout, load_entry
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges import load_bridge

WAIT_S = 60.0
"""How long to wait for orders at a time."""
ALIVE_S = 0.5
"""How often this process tells that it lives."""
MAX_WORDS = 2000
"""Characters of a cause that are told."""
MAX_CHARS = 1 << 26
"""Of the messages of one question: no model reads more, and the controller shall not have to."""
_EPISODE: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=-1)
"""Whose code is running."""


def run_environment(start: EnvironmentStart, channel: PartChannel) -> None:
    """Import the environment, report, serve until told to shut down."""
    asyncio.run(_serve(start, channel))


async def _serve(start: EnvironmentStart, channel: PartChannel) -> None:
    loop = asyncio.get_running_loop()
    ears = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    hands = ThreadPoolExecutor(max_workers=start.concurrency, thread_name_prefix="environment")
    watch = _LoopWatchdog(loop, channel, RealClock(), block_s=start.block_s)
    if start.kind == "bridge":
        rollout = load_bridge(start.entry, start.options, hands)
    else:
        rollout = load_entry(start.kind, start.entry, hands)
    desk = _RequestDispatcher(channel=channel, rollout=rollout, hands=hands, source=start.entry.rpartition(":")[0])
    channel.send(Ready(token=run_token(), pid=os.getpid(), facts={}))  # before anything else is said
    forget_token()
    watch.begin()
    async with asyncio.TaskGroup() as episodes:
        while True:
            for order in await loop.run_in_executor(ears, channel.receive, WAIT_S):
                desk.obey(order, episodes)


@dataclass(slots=True, kw_only=True)
class _RequestDispatcher:
    """The episodes that run here, and what they have asked."""

    channel: PartChannel
    rollout: Rollout
    hands: ThreadPoolExecutor
    source: str
    """The user's file."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    asks: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    num_asks: int = 0
    given_up: set[int] = field(default_factory=set)
    """Episodes that nobody waits for any more."""

    def obey(self, order: orders.Message, episodes: asyncio.TaskGroup) -> None:
        match order:
            case orders.RunEpisode():
                context = contextvars.copy_context()
                context.run(_EPISODE.set, order.call)
                self.running[order.call] = episodes.create_task(self.run(order), context=context)
            case orders.Replied():
                self._settle(order.ask, order.reply)
            case orders.AnswerRefused():
                kind = BudgetSpent if order.spent else EpisodeError
                self._settle(order.ask, kind(order.problem, remedy=order.remedy, reason=order.reason))
            case orders.Cancel():
                if order.call in self.running:
                    self.given_up.add(order.call)
                    self.running[order.call].cancel()
            case Shutdown():
                _end()

    async def run(self, order: orders.RunEpisode) -> None:
        """One episode, to its end; whatever happens becomes one message."""
        remote = _Remote(self, order)
        policy = EpisodePolicy(
            remote, prompt_ids=order.prompt_ids_T.tolist(), variables=order.variables, executor=self.hands
        )
        try:
            ended = await self.rollout(order.row, policy)
            self.channel.send(_done(order.call, ended))
        except (EpisodeError, RequestError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "request_refused"
            self._fail(order.call, reason, error.problem)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its failure is a record
            if _is_cancelled(error) and order.call not in self.given_up:
                _end()  # by code of another episode, or with the loop: nobody knows whose
            self._fail(order.call, "env_error", _in_words(error, self.source))
        finally:
            self.running.pop(order.call, None)
            self.given_up.discard(order.call)
            for unheard in remote.open:
                unheard.cancel()

    async def ask(self, asked: ModelQuery, episode: set[asyncio.Future[Reply]]) -> Reply:
        """Wait for the answer of the model; meanwhile the wait is one of those of its ``episode``."""
        length = sum(len(message.content) + len(message.reasoning) for message in asked.messages)
        if length > MAX_CHARS:
            raise EpisodeError(f"messages of {length} characters", remedy=f"send at most {MAX_CHARS}")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.asks[asked.ask] = future
        episode.add(future)
        try:
            self.channel.send(asked)
            return await future
        finally:
            episode.discard(future)
            del self.asks[asked.ask]

    def _settle(self, ask: int, answer: Reply | EpisodeError) -> None:
        future = self.asks.get(ask)
        if future is None or future.done():  # whoever asked has left
            return
        if isinstance(answer, Reply):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _fail(self, call: int, reason: str, words: str) -> None:
        problem = words[:MAX_WORDS].encode("utf-8", "replace").decode()
        self.channel.send(EpisodeDone(call=call, reason=reason, problem=problem))


class _Remote:
    """The :class:`~headrace.rollout.environments.base.OpenEpisode` of an episode, as far as user code uses it."""

    def __init__(self, desk: _RequestDispatcher, order: orders.RunEpisode) -> None:
        self.seed = order.seed
        self.open: set[asyncio.Future[Reply]] = set()
        """Waits for answers."""
        self._desk = desk
        self._call = order.call

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        asked = self._asked(messages=tuple(messages), tools=tuple(tools), options=options)
        return await self._desk.ask(asked, self.open)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        return await self._desk.ask(self._asked(prompt_ids_T=prompt_ids_T, options=options), self.open)

    def _asked(self, **what: Any) -> ModelQuery:
        self._desk.num_asks += 1
        return ModelQuery(episode=self._call, ask=self._desk.num_asks, **what)


class _LoopWatchdog:
    """A thread that sees whether the loop turns, and knows whose task it is at where it does not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: PartChannel, clock: Clock, *, block_s: float) -> None:
        self._loop = loop
        self._channel = channel
        self._clock = clock
        self._block_s = block_s
        self._turned_s = clock.now()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """From now on."""
        self._loop.set_task_factory(self._make_task)
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None, **how: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **how)
        self._owners[task] = _EPISODE.get() if context is None else context.get(_EPISODE, -1)
        return task

    def _run(self) -> None:
        nap = threading.Event()
        told = False
        while True:
            self._loop.call_soon_threadsafe(self._turn)
            nap.wait(ALIVE_S)
            blocked = self._clock.now() - self._turned_s > self._block_s
            task = asyncio.current_task(self._loop) if blocked else None
            culprit = self._owners.get(task, -1) if task is not None else -1
            if culprit >= 0 and not told:
                told = True
                self._channel.send(Alive(blocked_by=culprit))
            elif not blocked:
                told = False
                self._channel.send(Alive())

    def _turn(self) -> None:
        self._turned_s = self._clock.now()


def _done(call: int, ended: Episode) -> EpisodeDone:
    trained = None if ended.trained is None else tuple(reply.turn for reply in ended.trained)
    return EpisodeDone(
        call=call,
        reward=ended.reward,
        turn_rewards=dict(ended.rewards),
        agent_rewards=dict(ended.agent_rewards),
        trained=trained,
    )


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task was cancelled, and not only code of it raised what that raises."""
    return isinstance(error, asyncio.CancelledError) and being_cancelled()


def _end() -> None:
    """End this process, and what it has started: code that never returns must not keep it alive."""
    os.killpg(0, signal.SIGKILL)


def _in_words(error: BaseException, source: str) -> str:
    try:
        return where(error, source)
    except Exception:  # noqa: BLE001 - the user's ``__str__`` is user code too
        return f"{type(error).__name__}, which cannot be printed"
