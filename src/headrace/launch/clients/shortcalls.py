"""Short calls of a reward function, which are sent to a worker together: an order costs a worker and the controller
more time than a call of some microseconds, and groups of episodes often end at about the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring import Scores

SendTogether = Callable[[Sequence[ScoreCompletions]], Awaitable[Sequence[Scores] | None]]
"""A function that lets a worker score several requests in one order, and returns the scores of each; ``None`` if the
order was lost or late."""


@dataclass(slots=True, eq=False)
class _ShortCall:
    """A request that waits for its scores."""

    request: ScoreCompletions
    outcome: asyncio.Future[Scores | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The scores of the request; ``None`` if the order was lost or late."""

    def end(self, scores: Scores | None) -> None:
        """Give the caller its scores, unless the caller has been cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(scores)


class ShortCalls:
    """The short calls that wait for an order. While as many orders are out as ``max_orders`` returns, further calls
    wait, and the next order takes all of them, up to ``max_completions`` completions. So an order is the larger the
    busier the workers are, and a single call waits for no other."""

    def __init__(
        self,
        send: SendTogether,
        *,
        start: Callable[[Coroutine[Any, Any, None]], bool],
        max_orders: Callable[[], int],
        max_completions: Callable[[], int],
    ) -> None:
        """Create the queue without calls. ``send`` sends one order. ``start`` starts a task of the pool, and returns
        ``False`` if the pool is ending and starts no more."""
        self._send = send
        self._start = start
        self._max_orders = max_orders
        self._max_completions = max_completions
        self._waiting: deque[_ShortCall] = deque()
        self._num_orders = 0
        """The number of orders that are out or are about to be sent."""
        self._is_starting = False
        """Whether the task of an order was created and has not taken its calls yet."""

    async def score(self, request: ScoreCompletions) -> Scores | None:
        """Score a request together with others, and return its scores. Return ``None`` if its order was lost or late,
        because it is not known which of the calls is the cause."""
        call = _ShortCall(request)
        self._waiting.append(call)
        self._begin_order()
        return await call.outcome

    def _begin_order(self) -> None:
        """Start the task of an order, if calls wait and another order may be out."""
        if not self._waiting or self._is_starting or self._num_orders >= max(1, self._max_orders()):
            return
        self._is_starting = self._start(self._order())
        self._num_orders += self._is_starting
        while self._waiting and not self._is_starting:  # the pool is ending
            self._waiting.popleft().end(None)

    async def _order(self) -> None:
        """Send the calls that wait now in one order, and give the callers their scores. This task begins after the
        calls that were made in the same turn of the event loop, so that they share the order."""
        self._is_starting = False
        calls = self._take()
        self._begin_order()  # calls that do not fit into this order
        scores: Sequence[Scores] | None = None
        try:
            if calls:
                scores = await self._send([call.request for call in calls])
        finally:
            for index, call in enumerate(calls):
                call.end(None if scores is None else scores[index])
            self._num_orders -= 1
            self._begin_order()

    def _take(self) -> list[_ShortCall]:
        """Remove and return the calls of the next order, without those whose callers have been cancelled."""
        calls: list[_ShortCall] = []
        room = max(1, self._max_completions())
        while self._waiting and (not calls or len(self._waiting[0].request.completions) <= room):
            call = self._waiting.popleft()
            if not call.outcome.done():
                calls.append(call)
                room -= len(call.request.completions)
        return calls
