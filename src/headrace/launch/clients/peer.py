"""Orders and their answers: what all clients share."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.base import errors
from headrace.base.errors import DeadlineError, HeadraceError, RunError
from headrace.base.types.messages.controller import Answer, Failure, Ready, Timed
from headrace.base.types.trace import Span, earlier
from headrace.launch.channel import ControllerChannel

A = TypeVar("A")


class Peer:
    """One process, as the controller sees it."""

    def __init__(
        self, name: str, channel: ControllerChannel, *, token: str, on_spans: Callable[[Sequence[Span]], None]
    ) -> None:
        self.name = name
        self._channel = channel
        self._token = token
        self._on_spans = on_spans
        self._num_calls = 0
        self._expected: dict[tuple[int, type], asyncio.Future[Any]] = {}
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.last_words: HeadraceError | None = None
        """Why it could not go on, in its own words."""
        self.spoke = asyncio.Event()
        """Set with :attr:`last_words`."""
        self.halted = ""
        """What keeps its process from going on, as in ``is stopped (SIGSTOP)``; empty where nothing does, as far as it
        is known."""
        self.clock_ahead_s = 0.0
        """By how much the monotonic clock of its machine is ahead of ours."""

    def next_call(self) -> int:
        """A number for one order, by which its answers are known."""
        self._num_calls += 1
        return self._num_calls - 1

    def send(self, message: Any) -> None:
        """Give an order; never waits. To one that has just ended it says nothing: whoever watches it does."""
        self._channel.send(message)

    def expect(self, call: int, kind: type[A]) -> asyncio.Future[A]:
        """The answer of that kind to order ``call``; fails with the error that the part reports instead."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._expected[call, kind] = future

        def forget(done: asyncio.Future[A]) -> None:
            self._expected.pop((call, kind), None)
            if not done.cancelled():
                done.exception()  # where whoever asked has left, asyncio need not tell the user

        future.add_done_callback(forget)
        return future

    @property
    def owes(self) -> bool:
        """Whether an answer of it is waited for."""
        return bool(self._expected)

    async def answer(self, future: asyncio.Future[A], what: str, deadline_s: float) -> A:
        """Wait for an answer; :class:`~headrace.base.errors.DeadlineError` names the part and what it was asked. A part
        that
        is stopped has another ``deadline_s``, for as long as the stall watchdog allows."""
        try:
            while not (await asyncio.wait([future], timeout=deadline_s))[0]:
                if self.halted:
                    continue
                raise DeadlineError(
                    f"{self.name} has not answered for {deadline_s:g} s: {what}",
                    remedy=f"look at logs/{self.name}.log in the run directory; is the machine overloaded?",
                )
            return future.result()
        finally:
            future.cancel()

    async def arrives(self, dying: asyncio.Future[str], deadline_s: float, hint: str) -> bool:
        """Wait until it is ready, or ``dying`` says that it never will be; whether it is. Raises
        :class:`~headrace.base.errors.DeadlineError`, with a ``hint`` at what may keep it, after ``deadline_s``."""
        first: set[asyncio.Future[Any]] = {dying, self.ready}
        done, _ = await asyncio.wait(first, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineError(
                f"{self.name} did not start within {deadline_s:g} s{self.halted and f'; it {self.halted}'}",
                remedy=f"look at logs/{self.name}.log in the run directory; {hint}",
            )
        return self.ready.done()

    async def listen(self) -> None:
        """Route everything it says; ends only by cancellation."""
        while True:
            for message in await self._channel.receive():
                self._route(message)

    def close(self) -> None:
        """Close the channel; whoever still waits for an answer is cancelled."""
        for future in list(self._expected.values()):
            future.cancel()
        self._channel.close()

    def handle(self, message: Any) -> None:
        """What is said without having been asked; a client overrides this."""
        raise RunError(f"{self.name} sent an unexpected {type(message).__name__}", remedy="use one version of headrace")

    def _route(self, message: Any) -> None:
        if not isinstance(message, Ready | Failure) and not self.ready.done():
            words = f"{self.name} sent a {type(message).__name__} before it proved to be of this run"
            raise RunError(words, remedy="start the run again")
        if isinstance(message, Timed):
            self._on_spans(earlier(message.spans, self.clock_ahead_s))
        if isinstance(message, Ready):
            self._greet(message)
        elif isinstance(message, Failure):
            self._fail(message)
        elif isinstance(message, Answer) and 0 <= message.call < self._num_calls:
            future = self._expected.get((message.call, type(message)))
            if future is not None and not future.done():  # else whoever asked has left
                future.set_result(message)
        else:
            self.handle(message)

    def _greet(self, message: Ready) -> None:
        if not hmac.compare_digest(message.token, self._token):
            raise RunError(f"a process that is not of this run claims to be {self.name}", remedy="start the run again")
        if not self.ready.done():
            self.ready.set_result(message)

    def _fail(self, message: Failure) -> None:
        kind = getattr(errors, message.kind, RunError)  # gate: getattr - the name is the other process's word
        known = isinstance(kind, type) and issubclass(kind, HeadraceError)
        error: HeadraceError = (kind if known else RunError)(message.problem, remedy=message.remedy)
        if message.call is None:
            self.last_words = error
            self.spoke.set()
            return
        for (call, _), future in list(self._expected.items()):
            if call == message.call and not future.done():
                future.set_exception(error)


class ForeignPeer(Peer):
    """A process that runs code of the user. Once it is ready nothing that it says ends the run: one that talks nonsense
    is to be ended like one that has died."""

    nonsense = ""
    """What it said; empty where it keeps to the protocol."""

    async def listen(self) -> None:
        try:
            await super().listen()
        except RunError as error:
            if not self.ready.done():
                raise
            self.nonsense = error.problem
            self.spoke.set()

    def _fail(self, message: Failure) -> None:
        if self.ready.done():  # else its file cannot be used
            raise RunError(f"{self.name} says that it cannot go on: {message.problem}", remedy="look at its log")
        super()._fail(message)
