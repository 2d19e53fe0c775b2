"""The simulated engine: a model of one inference engine with continuous batching. It has an event only when a sequence
joins or leaves the batch, not for every decoding step.

All sequences of the batch receive one token in every step, so the progress of each sequence follows from one number:
the engine's step count. Between two events the step time is constant, computed for the middle of the interval.

    put ──▶ waiting ──▶ joins the batch, prefill ──▶ a token per step ──▶ finished
               ▲                                            │
               └────────── the cache is full: the newest ◀──┘
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from headrace.base.types.weights import Interrupt
from headrace.wings.plan.costs import EngineCost
from headrace.wings.plan.events import EventQueue

TOLERANCE = 1e-6
"""Tolerance in tokens for rounding errors at the end of a sequence."""
FILL_LIMIT = 0.95
"""Fraction of the cache up to which sequences may join the batch. When the cache is full, sequences are preempted until
it is filled to this fraction."""
_RECOMPUTING_INTERRUPTS = (Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.SLEEP)
"""Interrupts that discard the cache of running sequences, but keep their tokens."""
WAITING_INTERRUPTS = (Interrupt.DRAIN, Interrupt.BATCH)
"""Interrupts that let running sequences finish before the weights change."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedAnswer:
    """An answer of the model that a simulated engine samples; it waits in the queue or is in the batch."""

    on_ended: Callable[[SimulatedAnswer], None]
    """The function that is called with the answer when its last token has been sampled."""
    tokens_left: float
    """Number of tokens that remained to be sampled when the answer last joined or left a batch. It may be fractional,
    because an answer may leave between two steps."""
    context: float
    """Number of tokens of the prompt and of the sampled part of the answer, when the answer last joined or left a
    batch."""
    uncached: float
    """Number of context tokens to prefill when the answer joins a batch; the other context tokens are cached."""
    versions: dict[int, float] = field(default_factory=dict)
    """Number of tokens sampled so far, by the version of the weights that sampled them."""
    joined_at: float = 0.0
    """Step count of the engine when the answer joined the batch."""
    engine: SimulatedEngine | None = None
    """Engine on which the answer runs or waits; ``None`` if it is on no engine."""
    running: bool = False
    """Whether the answer is in the batch."""


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Totals of one simulated engine since its start, or the sums of these totals over several engines."""

    busy_s: float = 0.0
    """Time spent in steps, prefill included."""
    prefill_s: float = 0.0
    """Time spent on prefill."""
    generated: float = 0.0
    """Number of sampled tokens, including those discarded later."""
    wasted: float = 0.0
    """Number of tokens discarded by commits."""
    preempted: int = 0
    """Number of sequences that were preempted because the cache was full."""
    restarted: int = 0
    """Number of sequences that were restarted because of a commit."""


class SimulatedEngine:
    """One engine: a group of accelerators that serves one copy of the model. After every change, its owner must call
    :meth:`settle`, which schedules the engine's next event."""

    def __init__(
        self,
        events: EventQueue,
        cost: EngineCost,
        *,
        max_sequences: int,
        cache_tokens: float,
        changed: dict[SimulatedEngine, None],
    ) -> None:
        """Create an idle engine with version 0, whose steps take the time of ``cost``. Its batch contains at most
        ``max_sequences`` answers, and its cache at most ``cache_tokens`` tokens. The engine adds itself to ``changed``
        whenever its next event may have changed; the owner must then call :meth:`settle`."""
        self._events, self._cost = events, cost
        self._max_sequences, self._cache_tokens = max_sequences, cache_tokens
        self._changed = changed
        self.counts = EngineCounts()
        self.num = 0
        """Number of sequences in the batch."""
        self.context = 0.0
        """Number of tokens in the cache."""
        self.waiting: deque[SimulatedAnswer] = deque()
        """Answers that wait to join the batch, in order."""
        self.up = True
        """Whether the engine runs; ``False`` between a failure and the restart."""
        self.draining = False
        """Whether the engine lets its sequences finish in order to commit."""
        self._num_may_join = 0
        """While the engine drains, number of waiting sequences that it still serves before the commit."""
        self._steps = 0.0
        """Step count: number of steps of the engine so far, which may be fractional."""
        self._batch: list[tuple[float, int, SimulatedAnswer]] = []
        """Heap of the batch: (step count at which the answer ends, tie breaker, answer). It may contain outdated
        entries, which are removed when they reach the top."""
        self._batch_by_arrival: list[SimulatedAnswer] = []
        """Answers of the batch in the order in which they joined it; it may contain answers that have left."""
        self._tie_breakers = count()
        """Numbers the entries of the heap, so that equal ends are not compared further."""
        self._updated_s = self._stalled_until_s = 0.0
        """Time up to which the state is updated, and time until which prefill or a commit stops decoding."""
        self._token_s = 0.0
        """Duration of one step in seconds, constant until the next event."""
        self._event_number = 0
        """Number of the newest scheduled event; events with another number are outdated."""
        self._version_starts: list[float] = [0.0]
        """Step count at which each of ``_versions`` came into use."""
        self._versions: list[int] = [0]
        """The versions that this engine has used, in order."""

    @property
    def version(self) -> int:
        """Return the version of the weights in use."""
        return self._versions[-1]

    @property
    def load(self) -> int:
        """Return the number of answers in the batch and in the queue. The fleet routes requests by this number."""
        return self.num + len(self.waiting)

    # --- sequences

    def put(self, answer: SimulatedAnswer) -> None:
        """Add an answer to the queue; it joins the batch when there is room."""
        answer.engine = self
        self.waiting.append(answer)
        self._changed[self] = None

    def withdraw(self, answer: SimulatedAnswer) -> None:
        """Remove an answer that is no longer needed from the batch or the queue."""
        self.advance()
        if answer.running:
            self._remove_from_batch(answer)
        elif answer in self.waiting:
            self.waiting.remove(answer)
        answer.engine = None
        self._changed[self] = None

    def settle(self) -> None:
        """Add waiting answers to the batch, and schedule the engine's next event: the end of an answer, or a full
        cache."""
        self.advance()
        if self.up:
            self._fill_batch()
        self._event_number += 1
        if not self.num:
            return
        # with every step the context grows by one token per sequence; the step time is that of the interval's middle
        steps_ahead = min(self._first_end() - self._steps, max(0.0, self._cache_tokens - self.context) / self.num)
        self._token_s = self._cost.step_s(self.num, self.context + self.num * steps_ahead / 2)
        self._events.at(
            max(self._updated_s, self._stalled_until_s) + steps_ahead * self._token_s,
            self._on_event,
            self._event_number,
        )

    def advance(self) -> None:
        """Update step count, cache and totals to the current time, with the constant step time since the last event."""
        now_s, since_s = self._events.now_s, self._updated_s
        if now_s == since_s:
            return
        self._updated_s = now_s
        since_s = max(since_s, self._stalled_until_s)
        if not self.num or now_s <= since_s:
            return
        tokens = (now_s - since_s) / self._token_s
        self._steps += tokens
        self.context += tokens * self.num
        self.counts.generated += tokens * self.num
        self.counts.busy_s += now_s - since_s

    def _on_event(self, number: int) -> None:
        """Handle the time at which the next answer ends or the cache is full. ``number`` is the number that the event
        got when it was scheduled; an event with an outdated number is ignored."""
        if number != self._event_number:
            return  # outdated: the engine was settled again after this event was scheduled
        self.advance()
        ended = []
        while self.num and self._first_end() <= self._steps + TOLERANCE:
            answer = self._batch[0][2]
            self._remove_from_batch(answer, finished=True)
            ended.append(answer)
        if not ended and self.context >= self._cache_tokens - TOLERANCE * self.num:
            self._preempt()
        self._changed[self] = None
        for answer in ended:
            answer.on_ended(answer)
            answer.engine = None

    def _first_end(self) -> float:
        """Return the step count at which the first answer of the batch ends."""
        while not self._is_valid(self._batch[0]):
            heapq.heappop(self._batch)
        return self._batch[0][0]

    def _is_valid(self, entry: tuple[float, int, SimulatedAnswer]) -> bool:
        """Return whether an entry of the heap is up to date: its answer still runs on this engine and has not been
        restarted since the entry was added."""
        end, _, answer = entry
        return answer.running and answer.engine is self and end == answer.joined_at + answer.tokens_left

    def _running_answers(self) -> list[SimulatedAnswer]:
        """Return the answers in the batch, in the order in which they end."""
        return [entry[2] for entry in sorted(self._batch) if self._is_valid(entry)]

    def _fill_batch(self) -> None:
        """Move waiting sequences into the batch while the batch and the cache have free places."""
        while self.waiting and self.num < self._max_sequences and (not self.draining or self._num_may_join):
            answer = self.waiting[0]
            if self.num and self.context + answer.context > FILL_LIMIT * self._cache_tokens:
                return
            self.waiting.popleft()
            self._num_may_join = max(0, self._num_may_join - 1)
            answer.running, answer.joined_at = True, self._steps
            self.num += 1
            self.context += answer.context
            self._prefill(answer.uncached)
            answer.uncached = answer.context
            heapq.heappush(self._batch, (self._steps + answer.tokens_left, next(self._tie_breakers), answer))
            self._batch_by_arrival.append(answer)

    def _prefill(self, tokens: float) -> None:
        """Add the time to prefill ``tokens`` tokens, during which no sequence of the batch receives tokens."""
        seconds = self._cost.prefill_s(tokens)
        self._stalled_until_s = max(self._stalled_until_s, self._updated_s) + seconds
        self.counts.prefill_s += seconds
        self.counts.busy_s += seconds

    def _remove_from_batch(self, answer: SimulatedAnswer, *, finished: bool = False) -> None:
        """Remove an answer from the batch, and record its new tokens by the version that sampled them. ``finished``:
        its last token has been sampled, and its entry is the first of the heap."""
        received = answer.tokens_left if finished else min(answer.tokens_left, self._steps - answer.joined_at)
        for version, tokens in self._tokens_by_version(answer.joined_at, answer.joined_at + received):
            answer.versions[version] = answer.versions.get(version, 0.0) + tokens
        self.num -= 1
        self.context -= answer.context + (self._steps - answer.joined_at)
        answer.context += received
        answer.tokens_left -= received
        answer.uncached = answer.context
        answer.running = False
        if finished:
            heapq.heappop(self._batch)
        if len(self._batch_by_arrival) > 2 * self.num + 64:
            self._batch_by_arrival = [each for each in self._batch_by_arrival if each.running and each.engine is self]

    def _tokens_by_version(self, begin: float, end: float) -> Iterator[tuple[int, float]]:
        """Yield (version, number of steps) for each version that was in use between the step counts ``begin`` and
        ``end``."""
        place = bisect_right(self._version_starts, begin) - 1
        while begin < end:
            until = self._version_starts[place + 1] if place + 1 < len(self._version_starts) else end
            if until > begin:
                yield self._versions[place], min(until, end) - begin
            begin, place = max(begin, until), place + 1

    def _preempt(self) -> None:
        """Move the sequences that joined the batch last back to the head of the queue, until the cache is filled to at
        most :data:`FILL_LIMIT`."""
        while self.num > 1 and self.context > FILL_LIMIT * self._cache_tokens:
            answer = self._batch_by_arrival.pop()
            if not answer.running or answer.engine is not self:
                continue
            self._remove_from_batch(answer)
            self.waiting.appendleft(answer)
            self._num_may_join += self.draining
            self.counts.preempted += 1

    def progress(self, answer: SimulatedAnswer) -> float:
        """Return the number of tokens that an answer has received since it joined the batch; 0 if it is not in the
        batch."""
        self.advance()
        return min(answer.tokens_left, self._steps - answer.joined_at) if answer.running else 0.0

    # --- weights

    def drain(self, mode: Interrupt) -> None:
        """Begin to drain the engine before a commit: running answers finish, and no other answers join the batch. With
        ``Interrupt.BATCH``, the answers that are in the queue now are served too. ``mode`` is the interrupt of that
        commit."""
        self.draining = True
        self._num_may_join = len(self.waiting) if mode is Interrupt.BATCH else 0
        self._changed[self] = None

    @property
    def drained(self) -> bool:
        """Return whether all answers that have to finish before the commit have finished."""
        return not self.num and not self._num_may_join

    def swap(self, version: int, mode: Interrupt, gap_s: float) -> None:
        """Commit ``version``, which stops the engine for ``gap_s`` seconds. The interrupt ``mode`` decides what becomes
        of running answers: they continue, are prefilled again, or restart."""
        self.advance()
        self.draining = False
        self._stalled_until_s = max(self._stalled_until_s, self._updated_s) + gap_s
        if mode is Interrupt.ABORT_RETRY:
            self._restart_running()
        if self._version_starts[-1] == self._steps:
            self._versions[-1] = version
        else:
            self._version_starts.append(self._steps)
            self._versions.append(version)
        if mode in _RECOMPUTING_INTERRUPTS and self.num:
            self._prefill(self.context)
        self._changed[self] = None

    def _restart_running(self) -> None:
        """Restart all running answers; the tokens that they have received since they joined the batch are discarded and
        counted as wasted."""
        for answer in self._running_answers():
            received = self._steps - answer.joined_at
            self.counts.wasted += received
            self.counts.restarted += 1
            self.context -= received
            answer.joined_at = self._steps
            self._prefill(answer.context)
            heapq.heappush(self._batch, (self._steps + answer.tokens_left, next(self._tie_breakers), answer))

    # --- life

    def fail(self) -> list[SimulatedAnswer]:
        """Stop the engine as after a failure, and return its unfinished answers with the tokens sampled so far."""
        self.advance()
        running = self._running_answers()
        for answer in running:
            self._remove_from_batch(answer)
        unfinished = [*running, *self.waiting]
        self.waiting.clear()
        self._batch.clear()
        self._batch_by_arrival.clear()
        self.up = self.draining = False
        self._num_may_join, self.context = 0, 0.0
        self._changed[self] = None
        return unfinished

    def restart(self, version: int) -> None:
        """Start the engine again after a failure, with the weights of ``version``."""
        self.advance()
        self.up = True
        self._version_starts.append(self._steps)
        self._versions.append(version)
        self._changed[self] = None
