"""Short calls of a reward function, which are sent to a worker together: an order costs a worker and the controller
more time than a call of some microseconds, and groups of episodes often end at about the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring import Scores

LONG_S = 0.1
"""Seconds after which an order does not count as running any more: one of its calls waits or hangs, and other calls
should not wait for it."""
MAX_BYTES = 1 << 20
"""Largest size of an order of several requests, in bytes."""

SendTogether = Callable[[Sequence[ScoreCompletions]], Awaitable[Sequence[Scores] | None]]
"""A function that lets a worker score several requests in one order, and returns the scores of each; ``None`` if the
order was lost or late."""
StartTask = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None] | None]
"""A function that starts a task of the pool, and returns ``None`` if the pool is ending and starts no more."""


@dataclass(slots=True, eq=False)
class _ShortCall:
    """A request that waits for its scores."""

    request: ScoreCompletions
    """The completions to score, with their task."""
    num_bytes: int
    """The size of the request as a message."""
    outcome: asyncio.Future[Scores | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The scores of the request; ``None`` if they have to be computed by an order of its own."""

    def end(self, scores: Scores | None) -> None:
        """Give the caller its scores, unless it has an outcome already or was cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(scores)


class ShortCalls:
    """The short calls that wait for an order. While as many orders are running as ``max_orders`` returns, other calls
    wait, and the next order contains all of them, up to ``max_completions`` completions and :data:`MAX_BYTES`. So an
    order is the larger the busier the workers are, and a single call waits for no other."""

    def __init__(
        self, send: SendTogether, *, start: StartTask, max_orders: Callable[[], int], max_completions: Callable[[], int]
    ) -> None:
        """Create the queue without calls. ``send`` sends one order, and ``start`` starts the task that does it. If
        ``max_completions`` returns 0, the calls are not short any more, and those that wait have no joint order."""
        self._send = send
        self._start = start
        self._max_orders = max_orders
        self._max_completions = max_completions
        self._waiting: deque[_ShortCall] = deque()
        """The calls that wait for an order, oldest first."""
        self._running_orders: set[asyncio.Task[None]] = set()
        """The tasks of the orders that count as running."""
        self._is_planned = False
        """Whether the next turn of the event loop begins an order."""

    async def score(self, request: ScoreCompletions, num_bytes: int) -> Scores | None:
        """Score ``request``, whose message has ``num_bytes`` bytes, together with others, and return its scores. Return
        ``None`` if its order was lost or late, because it is not known which of the calls is the cause."""
        call = _ShortCall(request, num_bytes)
        self._waiting.append(call)
        self._plan_order()
        return await call.outcome

    def _plan_order(self) -> None:
        """If calls wait and another order may run, begin one in the next turn of the event loop, after all calls that
        are made in this turn, so that they share the order."""
        if self._waiting and not self._is_planned and len(self._running_orders) < max(1, self._max_orders()):
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._begin_order)

    def _begin_order(self) -> None:
        """Start the task that sends the calls that wait now, as many as fit into one order."""
        self._is_planned = False
        if calls := self._take_next():
            order = self._start(self._send_order(calls))
            if order is None:
                _end_calls(calls)
            else:
                self._running_orders.add(order)
                timer = asyncio.get_running_loop().call_later(LONG_S, self._order_ended, order)
                order.add_done_callback(lambda _: timer.cancel())
                order.add_done_callback(self._order_ended)
                order.add_done_callback(partial(_end_calls, calls))  # also of a task that was cancelled before it ran
        self._plan_order()

    def _order_ended(self, order: asyncio.Task[None]) -> None:
        """Stop counting ``order``, which has ended or has been running for long, and begin the next one."""
        self._running_orders.discard(order)
        self._plan_order()

    async def _send_order(self, calls: Sequence[_ShortCall]) -> None:
        """Send ``calls`` in one order, and give the callers their scores."""
        scores = await self._send([call.request for call in calls])
        for call, each in zip(calls, scores or (), strict=scores is not None):
            call.end(each)

    def _take_next(self) -> list[_ShortCall]:
        """Remove and return the calls of the next order, without those whose callers have been cancelled."""
        calls: list[_ShortCall] = []
        room, room_bytes = self._max_completions(), MAX_BYTES
        if not room:
            _end_calls(self._waiting)
            self._waiting.clear()
        while self._waiting:
            first = self._waiting[0]
            size = len(first.request.completions)
            if calls and (size > room or first.num_bytes > room_bytes):
                break
            self._waiting.popleft()
            if not first.outcome.done():
                calls.append(first)
                room, room_bytes = room - size, room_bytes - first.num_bytes
        return calls


def _end_calls(calls: Iterable[_ShortCall], _: object = None) -> None:
    """Give the callers of ``calls`` that have no scores ``None``."""
    for call in calls:
        call.end(None)
