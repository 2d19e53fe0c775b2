"""The part that all clients share: orders to a process, and the answers to them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.base import errors
from headrace.base.clock import TimeLimit
from headrace.base.errors import DeadlineError, HeadraceError, RunError
from headrace.base.types.messages.controller import Answer, Failure, Ready, Timed
from headrace.base.types.trace import Span, earlier
from headrace.launch.channel import OrdersEnd

A = TypeVar("A")


class Peer:
    """The controller's end of the conversation with one process."""

    def __init__(
        self, name: str, channel: OrdersEnd, *, token: str, on_spans: Callable[[Sequence[Span]], None]
    ) -> None:
        self.name = name
        self._channel = channel
        self._token = token
        self._on_spans = on_spans
        self._num_calls = 0
        self._expected: dict[tuple[int, type], asyncio.Future[Any]] = {}
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """The report with which the process says that it is ready."""
        self.reported_error: HeadraceError | None = None
        """The error with which the process reported that it cannot continue; ``None``: it has reported none."""
        self.reported = asyncio.Event()
        """Set when :attr:`reported_error` is."""
        self.halted = ""
        """The reason why the process is halted, such as ``is stopped (SIGSTOP)``; empty if it is not, as far as is
        known."""
        self.waits_while_halted = True
        """Whether an answer is waited for beyond its deadline while the process is stopped. An engine among several is
        replaced instead, because the others cannot continue without its answer."""
        self.protocol_violation = ""
        """The message by which a process with user code broke the protocol; empty if it did not."""
        self.clock_ahead_s = 0.0
        """Seconds by which the monotonic clock of its machine is ahead of ours."""

    def next_call(self) -> int:
        """Return the number of a new order, which the answers to it carry."""
        self._num_calls += 1
        return self._num_calls - 1

    def send(self, message: Any) -> None:
        """Send an order without waiting. If the process has just ended, nothing happens here: its supervisor reports
        the death."""
        self._channel.send(message)

    def expect(self, call: int, kind: type[A]) -> asyncio.Future[A]:
        """Return the future for an answer of type ``kind`` to order ``call``. It fails with the error that the process
        reports."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._expected[call, kind] = future

        def forget(done: asyncio.Future[A]) -> None:
            self._expected.pop((call, kind), None)
            if not done.cancelled():
                done.exception()  # marks the error as retrieved: asyncio would log it if no task waits any more

        future.add_done_callback(forget)
        return future

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer of the process is expected."""
        return bool(self._expected)

    async def answer(self, future: asyncio.Future[A], what: str, deadline_s: float) -> A:
        """Wait for an answer. Raises :class:`~headrace.base.errors.DeadlineError`, with the name of the process and of
        the order, after ``deadline_s``. The time in which the process is stopped does not count where
        :attr:`waits_while_halted` says so: the stall watchdog limits it."""
        try:
            async with TimeLimit(deadline_s, held=lambda: bool(self.halted) and self.waits_while_halted):
                await asyncio.wait([future])
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} has not answered for {deadline_s:g} s: {what}",
                remedy=f"look at logs/{self.name}.log in the run directory; is the machine overloaded?",
            ) from None
        finally:
            future.cancel()
        return future.result()

    async def wait_until_ready(self, dying: asyncio.Future[str], deadline_s: float, hint: str) -> bool:
        """Wait until the process is ready, or until ``dying`` is done because it has died; return whether it is ready.
        Raises :class:`~headrace.base.errors.DeadlineError` after ``deadline_s``, with a ``hint`` at the possible
        cause."""
        first: set[asyncio.Future[Any]] = {dying, self.ready}
        try:
            async with TimeLimit(deadline_s):
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} did not start within {deadline_s:g} s{self.halted and f'; it {self.halted}'}",
                remedy=f"look at logs/{self.name}.log in the run directory; {hint}",
            ) from None
        return self.ready.done()

    async def listen(self) -> None:
        """Route every message of the process; this ends only by cancellation."""
        while True:
            for message in await self._channel.receive():
                self._route(message)

    def close(self) -> None:
        """Close the channel, and cancel the answers that are expected."""
        for future in list(self._expected.values()):
            future.cancel()
        self._channel.close()

    def handle(self, message: Any) -> None:
        """Handle a message that is not an answer. Clients override this; here it raises
        :class:`~headrace.base.errors.RunError`."""
        raise RunError(f"{self.name} sent an unexpected {type(message).__name__}", remedy="use one version of headrace")

    def _route(self, message: Any) -> None:
        """Deliver a message of the process: to the call that waits for it, or to ``handle``. The first message must
        prove that the process belongs to this run."""
        if not isinstance(message, Ready | Failure) and not self.ready.done():
            words = f"{self.name} sent a {type(message).__name__} before it proved to be of this run"
            raise RunError(words, remedy="start the run again")
        if isinstance(message, Timed):
            self._on_spans(earlier(message.spans, self.clock_ahead_s))
        if isinstance(message, Ready):
            self._accept_ready(message)
        elif isinstance(message, Failure):
            self._fail(message)
        elif isinstance(message, Answer) and 0 <= message.call < self._num_calls:
            future = self._expected.get((message.call, type(message)))
            if future is not None and not future.done():  # no task waits for a future that is done
                future.set_result(message)
        else:
            self.handle(message)

    def _accept_ready(self, message: Ready) -> None:
        """Note that the process is ready. Raises :class:`~headrace.base.errors.RunError` if it does not know the run's
        token."""
        if not hmac.compare_digest(message.token, self._token):
            raise RunError(f"a process that is not of this run claims to be {self.name}", remedy="start the run again")
        if not self.ready.done():
            self.ready.set_result(message)

    def _fail(self, message: Failure) -> None:
        """Give a failure that the process reported to the call that it names; a failure without a call is that of the
        whole process."""
        error = error_of(message)
        if message.call is None:
            self.reported_error = error
            self.reported.set()
            return
        for (call, _), future in list(self._expected.items()):
            if call == message.call and not future.done():
                future.set_exception(error)


def error_of(failure: Failure) -> HeadraceError:
    """Return the error that a part has reported, as an exception of its class; as a
    :class:`~headrace.base.errors.RunError` if there is no class of that name."""
    kind = getattr(errors, failure.kind, RunError)  # gate: getattr - the other process names the class
    known = isinstance(kind, type) and issubclass(kind, HeadraceError)
    error: HeadraceError = (kind if known else RunError)(failure.problem, remedy=failure.remedy)
    return error


class ForeignPeer(Peer):
    """The controller's end of a process that runs user code. Once the process is ready, none of its messages ends the
    run; a process that breaks the protocol is killed, like one that has died."""

    protocol_violation = ""
    """The message by which the process broke the protocol; empty if it did not."""

    async def listen(self) -> None:
        """Receive messages until the process ends. A message that breaks the protocol is reported as a failure of this
        process, which runs code of the user, and not of the run."""
        try:
            await super().listen()
        except RunError as error:
            if not self.ready.done():
                raise
            self.protocol_violation = error.problem
            self.reported.set()

    def _fail(self, message: Failure) -> None:
        if self.ready.done():  # an error before that says that the user's file cannot be used
            raise RunError(f"{self.name} says that it cannot continue: {message.problem}", remedy="look at its log")
        super()._fail(message)
