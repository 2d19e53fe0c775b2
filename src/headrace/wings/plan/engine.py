"""A model of one engine: continuous batching, of which only the moments count when something joins or leaves the batch.

All sequences of the batch get their tokens in the same steps, so that one number says how far each of them is: how many
steps the engine has made. Between two events it makes them at one pace, that of the middle of the interval.

    put ──▶ waiting ──▶ joins, its prompt is read ──▶ a token a step ──▶ finished
               ▲                                            │
               └────────── the cache is full: the last ◀────┘
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from headrace.base.types.weights import Interrupt
from headrace.wings.plan.agenda import Agenda
from headrace.wings.plan.costs import EngineCost

NEARLY = 1e-6
"""Tokens that rounding may leave of a sequence that has ended."""
ROOM = 0.95
"""Of the cache: nothing joins beyond it, and where the cache is full sequences leave until no more is taken."""
_RECOMPUTES = (Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.SLEEP)
"""The cache of running sequences is lost; their tokens are not."""
WAITS = (Interrupt.DRAIN, Interrupt.BATCH)
"""Running sequences end before the weights change."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedAnswer:
    """One answer that is being sampled."""

    ended: Callable[[SimulatedAnswer], None]
    """Told when its last token is there."""
    left: float
    """Tokens that are still to be sampled."""
    context: float
    """Tokens before those."""
    read: float
    """Of the context, those that have to be computed when it joins: the others are in the cache."""
    versions: dict[int, float] = field(default_factory=dict)
    """Tokens that it got, by version."""
    begun: float = 0.0
    """Steps that the engine had made when it joined."""
    engine: SimulatedEngine | None = None
    """Where it runs or waits."""
    running: bool = False
    """Whether it is in the batch."""


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """What one engine has done, or several."""

    busy_s: float = 0.0
    """In steps, those on prompts included."""
    prefill_s: float = 0.0
    """Of that, on prompts."""
    generated: float = 0.0
    """Tokens, those thrown away included."""
    wasted: float = 0.0
    """Tokens that a commit has thrown away."""
    preempted: int = 0
    """Sequences that left because the cache was full."""
    restarted: int = 0
    """Sequences that began again because of a commit."""


class SimulatedEngine:
    """One engine, or one group of accelerators that serves one copy of the model."""

    def __init__(
        self,
        agenda: Agenda,
        cost: EngineCost,
        *,
        max_sequences: int,
        cache_tokens: float,
        moved: dict[SimulatedEngine, None],
    ) -> None:
        """``moved`` gets every engine whose next event is not what it was: it is to be settled."""
        self._agenda, self._cost = agenda, cost
        self._max_sequences, self._cache_tokens = max_sequences, cache_tokens
        self._moved = moved
        self.counted = EngineCounts()
        self.num = 0
        """Sequences in the batch."""
        self.context = 0.0
        """Tokens in the cache."""
        self.waiting: deque[SimulatedAnswer] = deque()
        self.up = True
        self.held = False
        """Whether it waits for what runs to end, to commit."""
        self._may_join = 0
        """While it is held: how many of those that wait are to be served before."""
        self._steps = 0.0
        self._batch: list[tuple[float, int, SimulatedAnswer]] = []
        self._joined: list[SimulatedAnswer] = []
        self._numbers = count()
        self._seen_s = self._still_until_s = 0.0
        self._token_s = 0.0
        self._ticket = 0
        self._marks: list[float] = [0.0]
        self._marked: list[int] = [0]

    @property
    def version(self) -> int:
        """The weights that it uses."""
        return self._marked[-1]

    @property
    def load(self) -> int:
        """Sequences that it has, waiting ones included."""
        return self.num + len(self.waiting)

    # --- sequences

    def put(self, answer: SimulatedAnswer) -> None:
        """Serve it when there is room."""
        answer.engine = self
        self.waiting.append(answer)
        self._moved[self] = None

    def withdraw(self, answer: SimulatedAnswer) -> None:
        """It is not wanted any more."""
        self.advance()
        if answer.running:
            self._leave(answer)
        elif answer in self.waiting:
            self.waiting.remove(answer)
        answer.engine = None
        self._moved[self] = None

    def settle(self) -> None:
        """Let join what can, and note when the next thing happens."""
        self.advance()
        if self.up:
            self._fill()
        self._ticket += 1
        if not self.num:
            return
        ahead = min(self._first_end() - self._steps, max(0.0, self._cache_tokens - self.context) / self.num)
        self._token_s = self._cost.step_s(self.num, self.context + self.num * ahead / 2)
        self._agenda.at(max(self._seen_s, self._still_until_s) + ahead * self._token_s, self._due, self._ticket)

    def advance(self) -> None:
        """Bring the books up to now."""
        now_s, since_s = self._agenda.now_s, self._seen_s
        if now_s == since_s:
            return
        self._seen_s = now_s
        since_s = max(since_s, self._still_until_s)
        if not self.num or now_s <= since_s:
            return
        tokens = (now_s - since_s) / self._token_s
        self._steps += tokens
        self.context += tokens * self.num
        self.counted.generated += tokens * self.num
        self.counted.busy_s += now_s - since_s

    def _due(self, ticket: int) -> None:
        if ticket != self._ticket:
            return  # something else has happened since
        self.advance()
        ended = []
        while self.num and self._first_end() <= self._steps + NEARLY:
            answer = self._batch[0][2]
            self._leave(answer, finished=True)
            ended.append(answer)
        if not ended and self.context >= self._cache_tokens - NEARLY * self.num:
            self._preempt()
        self._moved[self] = None
        for answer in ended:
            answer.ended(answer)
            answer.engine = None

    def _first_end(self) -> float:
        """The steps after which the first of the batch has ended."""
        while not self._is_of(self._batch[0]):
            heapq.heappop(self._batch)
        return self._batch[0][0]

    def _is_of(self, entry: tuple[float, int, SimulatedAnswer]) -> bool:
        """Whether it speaks of a sequence as it runs now: some have left, or begun again."""
        end, _, answer = entry
        return answer.running and answer.engine is self and end == answer.begun + answer.left

    def _running(self) -> list[SimulatedAnswer]:
        return [entry[2] for entry in sorted(self._batch) if self._is_of(entry)]

    def _fill(self) -> None:
        while self.waiting and self.num < self._max_sequences and (not self.held or self._may_join):
            answer = self.waiting[0]
            if self.num and self.context + answer.context > ROOM * self._cache_tokens:
                return
            self.waiting.popleft()
            self._may_join = max(0, self._may_join - 1)
            answer.running, answer.begun = True, self._steps
            self.num += 1
            self.context += answer.context
            self._read(answer.read)
            answer.read = answer.context
            heapq.heappush(self._batch, (self._steps + answer.left, next(self._numbers), answer))
            self._joined.append(answer)

    def _read(self, tokens: float) -> None:
        """Prompts take their time from everybody."""
        seconds = self._cost.prefill_s(tokens)
        self._still_until_s = max(self._still_until_s, self._seen_s) + seconds
        self.counted.prefill_s += seconds
        self.counted.busy_s += seconds

    def _leave(self, answer: SimulatedAnswer, *, finished: bool = False) -> None:
        """Out of the batch; what it got is written down."""
        got = answer.left if finished else min(answer.left, self._steps - answer.begun)
        for version, tokens in self._by_version(answer.begun, answer.begun + got):
            answer.versions[version] = answer.versions.get(version, 0.0) + tokens
        self.num -= 1
        self.context -= answer.context + (self._steps - answer.begun)
        answer.context += got
        answer.left -= got
        answer.read = answer.context
        answer.running = False
        if finished:
            heapq.heappop(self._batch)
        if len(self._joined) > 2 * self.num + 64:
            self._joined = [each for each in self._joined if each.running and each.engine is self]

    def _by_version(self, begin: float, end: float) -> Iterator[tuple[int, float]]:
        place = bisect_right(self._marks, begin) - 1
        while begin < end:
            until = self._marks[place + 1] if place + 1 < len(self._marks) else end
            if until > begin:
                yield self._marked[place], min(until, end) - begin
            begin, place = max(begin, until), place + 1

    def _preempt(self) -> None:
        """Those that came last go back to the head of the queue."""
        while self.num > 1 and self.context > ROOM * self._cache_tokens:
            answer = self._joined.pop()
            if not answer.running or answer.engine is not self:
                continue
            self._leave(answer)
            self.waiting.appendleft(answer)
            self._may_join += self.held
            self.counted.preempted += 1

    def progress(self, answer: SimulatedAnswer) -> float:
        """Tokens that it got since it joined the batch."""
        self.advance()
        return min(answer.left, self._steps - answer.begun) if answer.running else 0.0

    # --- weights

    def hold(self, mode: Interrupt) -> None:
        """A commit comes as soon as what runs has ended."""
        self.held = True
        self._may_join = len(self.waiting) if mode is Interrupt.BATCH else 0
        self._moved[self] = None

    @property
    def drained(self) -> bool:
        """Whether nothing is left to be served before the commit."""
        return not self.num and not self._may_join

    def swap(self, version: int, mode: Interrupt, gap_s: float) -> None:
        """Use ``version`` from now on."""
        self.advance()
        self.held = False
        self._still_until_s = max(self._still_until_s, self._seen_s) + gap_s
        if mode is Interrupt.ABORT_RETRY:
            self._begin_again()
        if self._marks[-1] == self._steps:
            self._marked[-1] = version
        else:
            self._marks.append(self._steps)
            self._marked.append(version)
        if mode in _RECOMPUTES and self.num:
            self._read(self.context)
        self._moved[self] = None

    def _begin_again(self) -> None:
        for answer in self._running():
            got = self._steps - answer.begun
            self.counted.wasted += got
            self.counted.restarted += 1
            self.context -= got
            answer.begun = self._steps
            self._read(answer.context)
            heapq.heappush(self._batch, (self._steps + answer.left, next(self._numbers), answer))

    # --- life

    def die(self) -> list[SimulatedAnswer]:
        """What it had and has not ended, with the tokens that were streamed."""
        self.advance()
        running = self._running()
        for answer in running:
            self._leave(answer)
        homeless = [*running, *self.waiting]
        self.waiting.clear()
        self._batch.clear()
        self._joined.clear()
        self.up = self.held = False
        self._may_join, self.context = 0, 0.0
        self._moved[self] = None
        return homeless

    def come_back(self, version: int) -> None:
        """It serves again, with these weights."""
        self.advance()
        self.up = True
        self._marks.append(self._steps)
        self._marked.append(version)
        self._moved[self] = None
