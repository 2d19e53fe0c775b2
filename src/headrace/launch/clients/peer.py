"""The base class of all clients: it sends orders to a process and matches the answers to them.

Each order has a number, its *call*, which its answers repeat. One order may have several answers of different types.
The first message of a process says that it is ready, and contains the run's secret token. *Spans* are times of activity
that a process reports for the event trace.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.base import errors
from headrace.base.clock import TimeLimit
from headrace.base.errors import DeadlineError, HeadraceError, RunError
from headrace.base.types.messages.controller import Answer, Failure, Ready, Timed
from headrace.base.types.trace import Span, shifted_back
from headrace.launch.channel import OrdersEnd

A = TypeVar("A")


class Peer:
    """The controller's client of one process: it sends orders, matches the answers to them, and stores errors that the
    process reports. The clients of engines, learners and workers derive from it.

    ``token`` is the run's secret, with which the process proves that it belongs to the run. ``on_spans`` receives the
    spans that the process reports.
    """

    in_run = True
    """Whether the process belongs to a run, whose directory contains the log of the process."""

    def __init__(
        self, name: str, channel: OrdersEnd, *, token: str, on_spans: Callable[[Sequence[Span]], None]
    ) -> None:
        """Create the client of the process ``name``, which is connected by ``channel``. It belongs to the running event
        loop. The class describes the other arguments."""
        self.name = name
        self._channel = channel
        self._token = token
        self._on_spans = on_spans
        self._num_calls = 0
        """The number of orders so far, which is also the number of the next order."""
        self._expected: dict[tuple[int, type], asyncio.Future[Any]] = {}
        """The futures of the expected answers, by the number of the order and the type of the answer."""
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """The future of the message in which the process says that it is ready."""
        self.reported_error: HeadraceError | None = None
        """The error with which the process has reported that it cannot continue; ``None`` if it has reported none."""
        self.reported = asyncio.Event()
        """Set when :attr:`reported_error` is set."""
        self.halted = ""
        """Why the operating system does not run the process, in words such as ``is stopped (SIGSTOP)``; empty if it
        runs, as far as is known."""
        self.waits_while_halted = True
        """Whether the deadline of an answer is suspended while the process is stopped. It is not suspended for an
        engine among several, because such an engine is replaced."""
        self.protocol_violation = ""
        """The message by which a process with user code broke the protocol; empty if it did not."""
        self.clock_ahead_s = 0.0
        """Seconds by which the monotonic clock of the process's machine is ahead of the clock of this machine."""

    def get_fact(self, name: str) -> str:
        """Return the fact ``name`` that the process has reported about itself when it became ready; empty if it is not
        ready, or has not reported it."""
        is_ready = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        return str(self.ready.result().facts.get(name, "")) if is_ready else ""

    def next_call(self) -> int:
        """Return the number of a new order, which its answers repeat."""
        self._num_calls += 1
        return self._num_calls - 1

    def send(self, message: Any) -> None:
        """Send an order without waiting. An order to a process that has just ended is lost without an error here,
        because the supervisor reports the death."""
        self._channel.send(message)

    def expect(self, call: int, kind: type[A]) -> asyncio.Future[A]:
        """Return the future of an answer of type ``kind`` to the order with the number ``call``. Call this before the
        order is sent. The future fails with the error that the process reports for this order."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._expected[call, kind] = future

        def forget(done: asyncio.Future[A]) -> None:
            """Stop expecting the answer of the completed future ``done``."""
            self._expected.pop((call, kind), None)
            if not done.cancelled():
                done.exception()  # marks the error as retrieved, so that asyncio does not log it

        future.add_done_callback(forget)
        return future

    @property
    def awaits_answer(self) -> bool:
        """Whether any answer of the process is expected."""
        return bool(self._expected)

    async def answer(self, future: asyncio.Future[A], operation: str, deadline_s: float, *, setting: str = "") -> A:
        """Wait for the answer ``future`` (from :meth:`expect`) and return it, or raise the error that the process has
        reported instead. Raises :class:`~headrace.base.errors.DeadlineError` after ``deadline_s`` seconds;
        ``operation`` names the order in the error, and ``setting`` the setting that extends the deadline, if there is
        one. If :attr:`waits_while_halted` is set, time during which the process is stopped is not counted; the stall
        watchdog limits it."""
        try:
            async with TimeLimit(deadline_s, is_paused=lambda: bool(self.halted) and self.waits_while_halted):
                return await future
        except TimeoutError:
            last = self.last_report()
            log = f"look at logs/{self.name}.log in the run directory" if self.in_run else ""
            slow = setting and f"if the machine is only slow, raise {setting}"
            raise DeadlineError(
                f"{self.name} has not answered for {deadline_s:g} s: {operation}{last and f'; {last}'}",
                remedy="; ".join(filter(None, (log, slow))),
            ) from None
        finally:
            future.cancel()

    def last_report(self) -> str:
        """Return what the process has reported last about its work, as a clause for an error message; empty if it
        reports nothing about it."""
        return ""

    async def wait_until_ready(self, death: asyncio.Future[str], deadline_s: float, hint: str) -> bool:
        """Wait until the process is ready, or until ``death`` is done because the process has died. Return whether it
        is ready. Raises :class:`~headrace.base.errors.DeadlineError` after ``deadline_s`` seconds; ``hint`` is a
        possible cause for the error text."""
        events: set[asyncio.Future[Any]] = {death, self.ready}
        try:
            async with TimeLimit(deadline_s):
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} did not start within {deadline_s:g} s{self.halted and f'; it {self.halted}'}",
                remedy=f"look at logs/{self.name}.log in the run directory; {hint}",
            ) from None
        return self.ready.done()

    async def listen(self) -> None:
        """Receive and deliver all messages of the process. This ends only by cancellation, or with the error of a
        message that is not allowed."""
        while True:
            for message in await self._channel.receive():
                self._route(message)

    def close(self) -> None:
        """Close the channel, and cancel all expected answers."""
        for future in list(self._expected.values()):
            future.cancel()
        self._channel.close()

    def handle(self, message: Any) -> None:
        """Handle a message that is not the answer to an order. Clients override this method for messages that their
        process sends without an order; by default it raises :class:`~headrace.base.errors.RunError`."""
        raise RunError(f"{self.name} sent an unexpected {type(message).__name__}", remedy="use one version of headrace")

    def _route(self, message: Any) -> None:
        """Deliver a message of the process to the call that waits for it, or to :meth:`handle`. The first message must
        prove that the process belongs to this run."""
        if not isinstance(message, Ready | Failure) and not self.ready.done():
            problem = f"{self.name} sent a {type(message).__name__} before it proved to be of this run"
            raise RunError(problem, remedy="start the run again")
        if isinstance(message, Timed):
            self._on_spans(shifted_back(message.spans, self.clock_ahead_s))
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
        """Record that the process is ready, and wake the tasks that wait for it. Raises
        :class:`~headrace.base.errors.RunError` if the message does not contain the run's token."""
        if not hmac.compare_digest(message.token, self._token):
            raise RunError(f"a process that is not of this run claims to be {self.name}", remedy="start the run again")
        if not self.ready.done():
            self.ready.set_result(message)

    def _fail(self, message: Failure) -> None:
        """Make the calls fail that have the order number of the reported failure. A failure without a number concerns
        the whole process, and is stored in :attr:`reported_error`."""
        error = make_error(message)
        if message.call is None:
            self.reported_error = error
            self.reported.set()
            return
        for (call, _), future in list(self._expected.items()):
            if call == message.call and not future.done():
                future.set_exception(error)


def make_error(failure: Failure) -> HeadraceError:
    """Return a reported failure as an exception of the class that the failure names, or as a
    :class:`~headrace.base.errors.RunError` if Headrace has no error with that name."""
    kind = getattr(errors, failure.kind, RunError)  # gate: getattr - the other process names the class
    is_known = isinstance(kind, type) and issubclass(kind, HeadraceError)
    error: HeadraceError = (kind if is_known else RunError)(failure.problem, remedy=failure.remedy)
    return error


class ForeignPeer(Peer):
    """The controller's client of a process that runs user code. After the process is ready, none of its messages ends
    the run. A process that breaks the protocol is killed and treated like a process that has died."""

    async def listen(self) -> None:
        """Receive messages until the process ends. A message that breaks the protocol is recorded as a failure of this
        process, and does not end the run."""
        try:
            await super().listen()
        except RunError as error:
            if not self.ready.done():
                raise
            self.protocol_violation = error.problem
            self.reported.set()

    def _fail(self, message: Failure) -> None:
        """Handle a failure that the process has reported. Before the process is ready, the failure says that the user's
        file cannot be used. Afterwards such a message breaks the protocol, and raises
        :class:`~headrace.base.errors.RunError`."""
        if self.ready.done():
            raise RunError(f"{self.name} says that it cannot continue: {message.problem}", remedy="look at its log")
        super()._fail(message)
