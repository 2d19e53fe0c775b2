"""Pacing: when a group that the staleness policy would admit really starts.

A token that waits in a queue grows old for nothing. ``eager`` starts a group as soon as the policy allows it;
``just_in_time``, the default, holds it back until the learner would otherwise have to wait for its batch:

    learner       │ step n − 1 │   step n    │  step n + 1 │
    committed           n − 1 ▲        n ▲
    eager         ▒▒▒▒ n + 1 ▒▒▒▒ · · · waits · · · ·┤            sampled by version n − 1, trained at age 2
    just in time                 │       ├▒▒ n + 1 ▒▒┤            sampled by version n, trained at age 1
                                 └ want − lead time  └ want

A group for step s starts, with v committed, as soon as one of these holds:

    s ≤ v + 1                    no newer weights can come before step s begins, unless the learner waits for them
    now ≥ want(s) − lead time    the learner would wait for the batch if the group started later

``want(s)`` is when the learner will have trained all steps before s, by the median of its last steps; now, if it has
nothing to do. The lead time is found from the last batches. Each tells how long before the learner wanted it, by the
prediction of that time, it had to be begun:

    needed = (all groups ready − first group admitted) + (predicted want − real want) + time to lay it out

Scoring, environments, replaced groups, the engine's load and errors of the prediction are all in it. The lead time is
the smallest with which the learner would have waited for at most half of the share ``learner_waits`` of the time: the
mean of max(0, needed − lead time) is that share of a step. One long batch raises it at once, and is forgotten after a
window of batches. The next batches are not the last ones, so a margin is added: what the learner really waits beyond
its share raises it at once, and every step without a wait lowers it a little. A batch for which the learner waits right
now counts with the time it has taken so far, so durations that become a hundred times as long end the holding back
before the first of them is over.

What this assumes: nothing for safety, for it only withholds what the policy would admit, and never a group of the next
step after the committed version, so the bound stays the policy's and a run cannot stall whatever is predicted. For
little waiting: that the next batch resembles one of the last. Times without a mean, a slow engine or a slow environment
need ever longer lead times, which is ``eager``; without history it is ``eager`` too.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.base.config.kinds import Kinds

EVIDENCE = 2
"""Number of trained steps and of ready batches without which no group is held back."""
SURE = 4
"""Number of steps below which the shortest one is taken as the duration, because first steps take longer."""
STEPS = 8
"""Number of steps whose median duration is expected of the next ones."""
MOST_VERSIONS = 64
"""Number of versions whose commits are remembered."""
GAIN = 4.0
"""Factor by which a wait beyond the share that is allowed raises the margin, and a step without one lowers it."""
CLOSE = 0.02
"""Share of a step for which it is not worth to hold a group back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeNeed:
    """The age that the batch of a step needed, and what less would have cost."""

    age: int
    """The smallest age, at least 1, at which the batch, begun when the weights of that age were committed, would have
    been ready in time."""
    less_s: float
    """Seconds that the learner would have waited for a batch that was begun one version later."""
    turns_s: float
    """Seconds that the step would have taken if generation and training took turns: its batch from the first group's
    start to the last one's end, its training, and the commit of the weights before. Where batches share a busy engine,
    each of them counts as long as it took beside the others."""
    turns_least_s: float
    """The same if a batch that shares the engine with those before it needs only the time after their end."""


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    """What is known of a step that is not trained."""

    begun_s: float | None = None
    """When the first group of its batch started; ``None``: before this process did."""
    want_s: float | None = None
    """When the learner was to want the batch, by what was known then; ``None`` without history."""
    ready_s: float = 0.0
    """When the last group of its batch was ready."""
    taken_s: float = 0.0
    ordered_s: float | None = None
    """When the batch was given to the learner; ``None``: it is not taken."""


class Pacer:
    """The memory of a pacing, and its decision when a group may start. This one starts every group at once, and
    measures what age was needed.

    The flow reports what happens; times are seconds on its clock.
    """

    def __init__(self, *, learner_waits: float, window: int) -> None:
        self.learner_waits = learner_waits
        self.need: AgeNeed | None = None
        """What the batch of the last trained step needed; ``None``: not known."""
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._needed_s: deque[float] = deque(maxlen=window)
        """How long before the learner wanted them, as predicted, the last batches had to be begun."""
        self._open: dict[int, _OpenStep] = {}
        self._next_step: int | None = None
        """The step that the learner trains next, or now; ``None`` before the first."""
        self._free_s = 0.0
        """When the learner had trained the step before that one."""
        self._commits_s: dict[int, float] = {}
        self._all_ready_s = 0.0
        """When the last group of all trained batches was ready."""
        self._margin_s = 0.0
        """Added to the lead time because the learner has waited for more than its share."""

    def start_s(self, step: int, *, version: int, now_s: float) -> float:
        """Return when a group for ``step`` may start while ``version`` is committed; ``now_s`` or less for now."""
        return now_s

    @property
    def step_s(self) -> float:
        """The expected duration of a step."""
        if len(self._steps_s) < SURE:
            return min(self._steps_s, default=0.0)
        return statistics.median(self._steps_s)

    @property
    def experienced(self) -> bool:
        """Whether enough was seen to predict anything."""
        return min(len(self._steps_s), len(self._needed_s)) >= EVIDENCE

    def want_s(self, step: int, now_s: float) -> float:
        """Return when the learner will have trained all steps before ``step``, by what is known now."""
        current = step if self._next_step is None else self._next_step
        ordered_s = self._open[current].ordered_s if current in self._open else None
        if ordered_s is None:
            return now_s + (step - current) * self.step_s
        end_s = max(now_s, max(self._free_s, ordered_s) + self.step_s)
        return end_s + (step - current - 1) * self.step_s

    def admitted(self, step: int, now_s: float) -> None:
        """Note that a group for ``step`` starts."""
        if step not in self._open:
            want_s = self.want_s(step, now_s) if len(self._steps_s) >= EVIDENCE else None
            self._open[step] = _OpenStep(begun_s=now_s, want_s=want_s)

    def taken(self, step: int, ready_s: float, now_s: float) -> None:
        """Note that ``step`` has its batch, the last group of which was ready at ``ready_s``."""
        if self._next_step is None:
            self._next_step, self._free_s = step, now_s
        taken = self._open.setdefault(step, _OpenStep())
        taken.ready_s, taken.taken_s, taken.ordered_s = ready_s, now_s, now_s

    def ordered(self, step: int, now_s: float) -> None:
        """Note that the batch of ``step`` is laid out and given to the learner."""
        self._open[step].ordered_s = now_s

    def trained(self, step: int, now_s: float) -> None:
        """Note that the learner has trained ``step``."""
        trained = self._open.pop(step)
        assert trained.ordered_s is not None
        self.need = None
        step_s = now_s - max(self._free_s, trained.ordered_s)
        self._steps_s.append(step_s)
        self._adapt_margin(max(0.0, trained.ordered_s - self._free_s))
        if trained.begun_s is not None:
            took_s = trained.ready_s - trained.begun_s + trained.ordered_s - trained.taken_s
            late_s = 0.0 if trained.want_s is None else trained.want_s - self._free_s
            self._needed_s.append(took_s + late_s)
            self.need = self._need_of(step, took_s, step_s, trained)
        self._all_ready_s = max(self._all_ready_s, trained.ready_s)
        self._next_step, self._free_s = step + 1, now_s

    def _adapt_margin(self, waited_s: float) -> None:
        """Raise the margin if the learner has waited for more than its share of a step, and lower it otherwise.

        A longer lead time takes effect only after as long, so the more steps it spans, the more it has to grow at once.
        """
        over_s = waited_s - self.learner_waits * self.step_s
        spanned = max(self._needed_s, default=0.0) / self.step_s if over_s > 0 and self.step_s > 0 else 1.0
        if self.experienced:
            self._margin_s = max(0.0, self._margin_s + GAIN * max(1.0, spanned) * over_s)

    def _need_of(self, step: int, took_s: float, step_s: float, trained: _OpenStep) -> AgeNeed | None:
        """Return the age that a step needed whose batch took ``took_s``, and was wanted when the learner was free."""
        assert trained.begun_s is not None
        commit_s = max(0.0, self._commits_s.get(step, self._free_s) - self._free_s)
        shared_s = max(0.0, self._all_ready_s - trained.begun_s)
        waits_s, before_s = 0.0, took_s
        for age in range(1, step + 1):
            if step - age not in self._commits_s:
                return None
            waits_s = took_s - (self._free_s - self._commits_s[step - age])
            if waits_s <= self.learner_waits * self.step_s:
                return AgeNeed(
                    age=age,
                    less_s=max(0.0, before_s),
                    turns_s=took_s + step_s + commit_s,
                    turns_least_s=max(0.0, took_s - shared_s) + step_s + commit_s,
                )
            before_s = waits_s
        return None

    def committed(self, version: int, now_s: float) -> None:
        """Note that the engines use ``version``."""
        self._commits_s[version] = now_s
        self._commits_s.pop(version - MOST_VERSIONS, None)


class PacingSection(Section):
    """The base class of the settings of a pacing."""

    learner_waits: float = Field(default=0.02, gt=0, lt=1)
    """Share of the time for which the learner may wait for batches that are begun late."""
    window: int = Field(default=24, ge=4)
    """Number of the last batches by which the next one is judged."""

    def pacer(self) -> Pacer:
        """Return the memory of a run that begins."""
        raise NotImplementedError


class Eager(PacingSection):
    """Starts every group as soon as the staleness policy allows it."""

    kind: Literal["eager"] = "eager"

    def pacer(self) -> Pacer:
        return Pacer(learner_waits=self.learner_waits, window=self.window)


class JustInTime(PacingSection):
    """Starts a group as late as the learner can bear."""

    kind: Literal["just_in_time"] = "just_in_time"

    def pacer(self) -> Pacer:
        return JustInTimePacer(learner_waits=self.learner_waits, window=self.window)


AnyPacing = JustInTime | Eager
PACINGS = Kinds(AnyPacing, group="headrace.pacings", setting="flow.pacing", contract=PacingSection)
"""The registry of all kinds of pacing, those of installed packages included."""
PacingConfig = Annotated[AnyPacing, PACINGS]


def lead_time(needed_s: Sequence[float], allowed_s: float) -> float:
    """Return the smallest lead time with which the mean of max(0, needed − lead time) is at most ``allowed_s``.

    >>> lead_time([2.0, 2.0, 6.0], 0.0), lead_time([2.0, 2.0, 6.0], 1.0), lead_time([2.0, 2.0, 6.0], 2.0)
    (6.0, 3.0, 1.3333333333333333)
    """
    budget_s, total_s, found_s = allowed_s * len(needed_s), 0.0, float("-inf")
    for count, longest_s in enumerate(sorted(needed_s, reverse=True), start=1):
        total_s += longest_s
        found_s = max(found_s, (total_s - budget_s) / count)
    return found_s


class JustInTimePacer(Pacer):
    """A pacer that holds groups back by the lead time of the last batches."""

    def start_s(self, step: int, *, version: int, now_s: float) -> float:
        if step <= version + 1 or not self.experienced:
            return now_s
        start_s = self.want_s(step, now_s) - self._lead_time(now_s)
        return start_s if start_s - now_s > CLOSE * self.step_s else now_s

    def _lead_time(self, now_s: float) -> float:
        allowed_s = self.learner_waits * self.step_s / 2
        waited_s = self._waited_for(now_s)
        needed_s = list(self._needed_s)
        found_s = lead_time(needed_s, allowed_s)
        if waited_s is None or waited_s <= found_s:
            return found_s + self._margin_s
        return lead_time([*needed_s[1:], waited_s], allowed_s) + self._margin_s

    def _waited_for(self, now_s: float) -> float | None:
        """Return how long before its want the batch for which the learner waits had to be begun, if it were ready now;
        ``None`` if the learner has one."""
        waiting = None if self._next_step is None else self._open.get(self._next_step)
        if waiting is None or waiting.ordered_s is not None or waiting.begun_s is None:
            return None
        free_s = max(self._free_s, waiting.begun_s)
        return now_s - waiting.begun_s + (free_s if waiting.want_s is None else waiting.want_s) - free_s
