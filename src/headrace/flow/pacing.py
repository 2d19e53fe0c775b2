"""Pacing: when a group that the staleness policy would admit really starts.

A token that waits in a queue grows old for nothing. ``eager`` starts a group as soon as the policy allows it;
``just_in_time``, the default, holds it back until the learner would otherwise have to wait for its batch:

    learner       │ step n − 1 │   step n    │  step n + 1 │
    committed           n − 1 ▲        n ▲
    eager         ▒▒▒▒ n + 1 ▒▒▒▒ · · · waits · · · ·┤            sampled by version n − 1, trained at age 2
    just in time                 │       ├▒▒ n + 1 ▒▒┤            sampled by version n, trained at age 1

A group for step s starts, with v committed, as soon as one of these holds:

    s ≤ v + 1         no newer weights can come before step s begins, unless the learner waits for them
    it is needed      to start it a little later, or with the next weights, would make the learner wait for too long

Whether it is needed is asked group by group, from what is known of each: the time it has run, the durations of the last
groups (:mod:`~headrace.flow.lateness`), and when the learner will want the batch, by the durations of its last steps.
Scoring, environments, the engine's load and groups that are dropped and replaced are all in a group's duration. The
answer is no as long as the expected wait stays within its allowance even if every group that the batch lacks starts
later, with a few to spare. So a batch of which one answer takes long does not start sooner as a whole: a group of the
next one starts beside it and takes its place, and the long one is trained with the batch after. A group that is due
has no substitute, so that shortly before a commit it is better to wait for it: what starts then has a step more.

The allowance is a share of the step, ``learner_waits``; what the learner has really waited beyond it is a debt, which
lowers the allowance until enough steps went by without a wait.

What this assumes: nothing for safety, for it only withholds what the policy would admit, and never a group of the next
step after the committed version, so the bound stays the policy's and a run cannot stall whatever is predicted. For
little waiting: that groups and steps take about as long as the last ones did, independently of each other. A group
that has run longer than all others did counts as late, so that durations that become a hundred times as long end the
holding back before the first of them is over; times without a mean, a slow engine or a slow environment need every
group at once, which is ``eager``; without history it is ``eager`` too.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from headrace.base.config import Section
from headrace.base.config.kinds import Kinds
from headrace.flow.lateness import Cohort, Seconds, expected_wait_s

EVIDENCE = 2
"""Number of trained steps and of ready batches without which no group is held back."""
SURE = 4
"""Number of steps below which the shortest one is taken as the duration, because first steps take longer."""
STEPS = 8
"""Number of steps whose median duration is expected of the next ones."""
MOST_DURATIONS = 512
"""Greatest number of durations of groups that are remembered."""
ALLOWED = 0.25
"""Part of ``learner_waits`` that the learner may be expected to wait for one batch. The rest is reserved for delays
that history does not contain."""
LATER = 1 / 12
"""Share of a step, or of a group's duration where that is more, by which a group is held back at a time."""
WORTH = 1 / 8
"""Part of the allowed wait that has to be gained by a group that starts now and not later."""
DEBT = 1 / 4
"""Debt, in steps, with which no wait is allowed."""
EAGER_DEBT = 1.0
"""Debt, in steps, with which no group is held back: the engine is slow, or durations have changed."""
MOST_DEBT = 1.5
"""Greatest debt, in steps; what is beyond it is forgotten."""
MOMENT_S = 1e-6
"""Seconds after a commit at which its version is surely the committed one."""
SPARE = 1 / 8
"""Share of a batch that may start in addition, to take the places of groups that take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousTime:
    """How long a step would have taken if generation and training took turns instead of overlapping: two bounds, in
    seconds."""

    most_s: float
    """Seconds for its batch, if all of its groups started at once and each took as long as it did, for its training,
    and for the commit of the weights before. Where groups share a busy engine, each of them counts as long as it took
    beside the others."""
    least_s: float
    """The seconds of the step if the batch had needed the engine only after the earlier batches had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyGroup:
    """A finished group that no batch has taken yet: when it started and when it was ready, in seconds on the flow's
    clock."""

    started_s: float
    """When the group started."""
    ready_s: float
    """When the group was ready."""


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    """A step that has its batch and is not trained yet."""

    ordered_s: float
    """When the batch was given to the learner; until that is known, when the batch was complete."""
    taken_s: float
    """When the batch was complete."""
    batch_s: tuple[float, float] | None
    """Seconds that its batch would have taken by itself, at least and at most; ``None``: some of its groups started
    before this process did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroups:
    """The groups that are in no batch, as the flow describes them to a pacer when it asks how many may start."""

    step: int
    """The first step that has no batch."""
    batch_size: int
    """Number of groups in a batch."""
    num_started: int
    """Number of groups that run or are ready; those that start next come after them."""
    num_ready: int
    """Number of groups that are ready for a batch."""
    version: int
    """The committed version."""
    deadline: Callable[[int], int]
    """A function that returns the last step that may train tokens of a given version."""
    in_order: bool
    """Whether groups are trained in the order in which they start."""


class Pacer:
    """The memory of a pacing during a run, and its decision which groups may start. This class starts every group at
    once; it is the base class of pacers that hold groups back.

    It also measures how long each step would have taken if generation and training took turns. The flow owns it and
    reports what happens; times are seconds on the flow's clock.
    """

    def __init__(self) -> None:
        """Begin without any history."""
        self.synchronous_time: SynchronousTime | None = None
        """The time that the last trained step would have taken if generation and training took turns; ``None`` if it is
        not known."""
        self._open: dict[int, _OpenStep] = {}
        self._next_step: int | None = None
        """The step that the learner trains next, or now; ``None`` before the first."""
        self._free_s = 0.0
        """When the learner had trained the step before that one."""
        self._commit_lag_s = 0.0
        """How long the last commit came after the end of its step."""
        self._started: dict[int, tuple[float, int]] = {}
        """When each group that runs started, and under which version, by number."""
        self._ready: dict[int, _ReadyGroup] = {}
        self._dropped_s: dict[int, float] = {}
        """Durations of the groups that ran and were dropped, by number, until a later group is in a batch."""
        self._all_ready_s = 0.0
        """When the last group of all batches was ready."""

    def num_now(self, count: int, groups: OpenGroups, now_s: float) -> tuple[int, float | None]:
        """Return how many of ``count`` groups, which the policy admits, may start now, and the time at which to ask
        again about the others: ``None`` if there are no others, or if only a change can let them start. ``groups``
        describes the groups that are in no batch."""
        return count, None

    def admitted(self, number: int, version: int, now_s: float) -> None:
        """Note that the group ``number`` starts now, under the committed ``version``."""
        self._started[number] = now_s, version

    def left(self, number: int, now_s: float, *, ready: bool) -> None:
        """Note that the group ``number`` has ended: it is ready or, if not ``ready``, it was dropped."""
        self._ready.pop(number, None)
        started = self._started.pop(number, None)
        if started is None:
            return
        if ready:
            self._ready[number] = _ReadyGroup(started_s=started[0], ready_s=now_s)
        else:
            self._dropped_s[number] = now_s - started[0]

    def taken(self, step: int, numbers: Sequence[int], now_s: float) -> None:
        """Note that ``step`` has its batch, made of the groups ``numbers``."""
        if self._next_step is None:
            self._next_step, self._free_s = step, now_s
        batch = {number: self._ready.pop(number) for number in numbers if number in self._ready}
        batch_s = None if len(batch) < len(numbers) else self._by_itself_s(batch)
        self._open[step] = _OpenStep(ordered_s=now_s, taken_s=now_s, batch_s=batch_s)
        self._all_ready_s = max([self._all_ready_s, *(group.ready_s for group in batch.values())])

    def _by_itself_s(self, batch: Mapping[int, _ReadyGroup]) -> tuple[float, float]:
        """Return two bounds, in seconds, of how long the groups of ``batch`` would have taken if they had started
        together without other batches: at least and at most. Groups that were dropped before count too, since others
        took their places."""
        began_s = min(group.started_s for group in batch.values())
        ready_s = max(group.ready_s for group in batch.values())
        groups = [(number, group.ready_s - group.started_s, True) for number, group in batch.items()]
        before = [number for number in self._dropped_s if number < max(batch)]
        groups += [(number, self._dropped_s.pop(number), False) for number in before]
        most_s = _together_s([(took_s, kept) for _, took_s, kept in sorted(groups)])
        return min(most_s, max(0.0, ready_s - max(began_s, self._all_ready_s))), most_s

    def ordered(self, step: int, now_s: float) -> None:
        """Note that the batch of ``step`` is laid out and has been given to the learner."""
        self._open[step].ordered_s = now_s

    def trained(self, step: int, now_s: float) -> None:
        """Note that the learner has trained ``step``, and compute ``turns`` for it."""
        trained = self._open.pop(step)
        self.synchronous_time = None
        if trained.batch_s is not None:
            step_s = now_s - max(self._free_s, trained.ordered_s)
            rest_s = trained.ordered_s - trained.taken_s + step_s + self._commit_lag_s
            least_s, most_s = trained.batch_s
            self.synchronous_time = SynchronousTime(least_s=least_s + rest_s, most_s=most_s + rest_s)
        self._next_step, self._free_s = step + 1, now_s

    def committed(self, version: int, now_s: float) -> None:
        """Note that the engines now use ``version``."""
        if version == self._next_step:
            self._commit_lag_s = now_s - self._free_s


def _together_s(groups: Sequence[tuple[float, bool]]) -> float:
    """Return after how many seconds the last group of a batch is ready if its groups start at once, and each group that
    is dropped makes room for another. ``groups`` are their durations in seconds, and whether they are kept, in the
    order in which they start; the last one is kept.

    >>> _together_s([(1.0, True), (3.0, False), (2.0, True)])
    5.0
    """
    free_s = [0.0] * sum(kept for _, kept in groups)
    last_s = 0.0
    for took_s, kept in groups:
        end_s = heapq.heappop(free_s) + took_s
        if kept:
            last_s = max(last_s, end_s)
        else:
            heapq.heappush(free_s, end_s)
    return last_s


class PacingSection(Section):
    """The base class of the settings of a pacing, ``flow.pacing`` in a run file."""

    def pacer(self) -> Pacer:
        """Return a new pacer with these settings, for one run."""
        raise NotImplementedError


class Eager(PacingSection):
    """The pacing that starts every group as soon as the staleness policy allows it."""

    kind: Literal["eager"] = "eager"

    def pacer(self) -> Pacer:
        """Return a new pacer that holds no group back."""
        return Pacer()


class JustInTime(PacingSection):
    """The pacing that starts a group as late as possible without making the learner wait for long, so that its tokens
    are sampled by newer weights."""

    kind: Literal["just_in_time"] = "just_in_time"
    learner_waits: float = Field(default=0.02, gt=0, lt=1)
    """Share of the time for which the learner may wait for batches that start late."""
    window: int = Field(default=24, ge=4)
    """Number of the latest steps whose durations predict when the learner wants its next batches."""

    def pacer(self) -> Pacer:
        """Return a new pacer that holds groups back with these settings."""
        return JustInTimePacer(learner_waits=self.learner_waits, window=self.window)


AnyPacing = JustInTime | Eager
PACINGS = Kinds(AnyPacing, group="headrace.pacings", setting="flow.pacing", contract=PacingSection)
"""The registry of all kinds of pacing, those of installed packages included."""
PacingConfig = Annotated[AnyPacing, PACINGS]


class JustInTimePacer(Pacer):
    """A pacer that holds back groups of later steps until the learner would otherwise have to wait for a batch. It
    predicts this from the durations of earlier groups and steps."""

    def __init__(self, *, learner_waits: float, window: int) -> None:
        """Let the learner wait for the share ``learner_waits`` of its time, and remember the durations of the last
        ``window`` steps."""
        super().__init__()
        self.learner_waits = learner_waits
        self._steps_s: deque[float] = deque(maxlen=window)
        """Durations of the last steps of the learner, in seconds."""
        self._took_s: deque[float] = deque(maxlen=MOST_DURATIONS)
        """Durations of the last groups from their start to being ready; infinite for those that were dropped."""
        self._sorted_took_s: Seconds = np.zeros(0)
        self._sorted_steps_s: Seconds = np.zeros(0)
        self._later_s = 0.0
        """For how many seconds a group is held back at a time."""
        self._debt_s = 0.0
        """The seconds that the learner has waited beyond its share; the expected wait is kept lower until they are made
        up for."""
        self._asked_again_s: float | None = None
        """When the last answer of :meth:`num_now` may change even if nothing happens; ``None``: it may have changed
        already."""

    def left(self, number: int, now_s: float, *, ready: bool) -> None:
        """Note that the group ``number`` has ended, and how long it took. One that was dropped, so that ``ready`` is
        false, counts as a group that never becomes ready."""
        started = self._started.get(number)
        super().left(number, now_s, ready=ready)
        if started is not None:
            self._took_s.append(now_s - started[0] if ready else math.inf)
        if not ready:
            self._asked_again_s = None

    def taken(self, step: int, numbers: Sequence[int], now_s: float) -> None:
        """Note that ``step`` has its batch, made of the groups ``numbers``; the next call of :meth:`num_now` decides
        anew."""
        super().taken(step, numbers, now_s)
        self._asked_again_s = None

    def trained(self, step: int, now_s: float) -> None:
        """Note that ``step`` has been trained: update the durations of steps and groups, and the time that the learner
        has waited beyond its share."""
        ordered_s = self._open[step].ordered_s
        over_s = max(0.0, ordered_s - self._free_s) - self.learner_waits * self.step_s
        self._steps_s.append(now_s - max(self._free_s, ordered_s))
        super().trained(step, now_s)
        self._debt_s = min(max(0.0, self._debt_s + over_s), MOST_DEBT * self.step_s) if self.experienced else 0.0
        self._sorted_took_s = np.sort(np.array(self._took_s))
        self._sorted_steps_s = np.sort(np.array(self._steps_s))
        usual_s = statistics.median_low(self._took_s) if self._took_s else 0.0
        self._later_s = LATER * max(self.step_s, usual_s if math.isfinite(usual_s) else 0.0)
        self._asked_again_s = None

    def committed(self, version: int, now_s: float) -> None:
        """Note that the engines now use ``version``; the next call of :meth:`num_now` decides anew."""
        super().committed(version, now_s)
        self._asked_again_s = None

    @property
    def step_s(self) -> float:
        """Return the expected duration of a step of the learner, in seconds: the median of the last ones, or the
        shortest while there are few; 0 before the first."""
        last_s = list(islice(reversed(self._steps_s), STEPS))
        return min(last_s, default=0.0) if len(last_s) < SURE else statistics.median(last_s)

    def want_s(self, step: int, now_s: float) -> float:
        """Return when the learner will have trained all steps before ``step``, in seconds on the flow's clock, as
        predicted now."""
        current = step if self._next_step is None else self._next_step
        ordered_s = self._open[current].ordered_s if current in self._open else None
        if ordered_s is None:
            return now_s + (step - current) * self.step_s
        end_s = max(now_s, max(self._free_s, ordered_s) + self.step_s)
        return end_s + (step - current - 1) * self.step_s

    @property
    def experienced(self) -> bool:
        """Return whether enough steps and groups have been measured to predict anything."""
        return min(len(self._steps_s), len(self._sorted_took_s)) >= EVIDENCE

    @property
    def _holds_back(self) -> bool:
        """Return whether groups may be held back at all: there is enough history, and the learner has not waited for
        much longer than its share."""
        return self.experienced and self._debt_s < EAGER_DEBT * self.step_s

    def num_now(self, count: int, groups: OpenGroups, now_s: float) -> tuple[int, float | None]:
        """Return how many of ``count`` groups, which the policy admits, to start now, and the time at which to ask
        again about the others (``None``: only after an event). Groups for steps up to the committed version + 1 always
        start."""
        next_ones = (groups.version + 2 - groups.step) * groups.batch_size - groups.num_started
        num = min(count, max(0, next_ones)) if self._holds_back else count
        if num == count:
            return count, None
        if not num and self._asked_again_s is not None and now_s < self._asked_again_s:
            return 0, self._asked_again_s  # nothing has changed but that groups are ready, as was expected
        num = self._enough(num, count, groups, now_s)
        self._asked_again_s = now_s + self._later_s
        return num, self._asked_again_s if num < count else None

    def _enough(self, least: int, most: int, groups: OpenGroups, now_s: float) -> int:
        """Return the smallest number of groups to start now, from ``least`` to ``most``, with which no batch needs one
        more. Each group that starts makes the next one less needed, so that doubling strides and then bisection find it
        with few questions."""
        enough, stride = least, 1
        while enough < most and self._needs_one_more(enough, groups, now_s):
            least, enough, stride = enough + 1, min(most, enough + stride), 2 * stride
        while least < enough:
            middle = (least + enough) // 2
            if self._needs_one_more(middle, groups, now_s):
                least = middle + 1
            else:
                enough = middle
        return enough

    def _needs_one_more(self, num: int, groups: OpenGroups, now_s: float) -> bool:
        """Return whether, if only ``num`` groups start now, the learner would wait for some batch longer than is
        allowed, and one more group would shorten the wait."""
        share_s = ALLOWED * self.learner_waits * self.step_s
        allowed_s = share_s * max(0.0, 1 - self._debt_s / (DEBT * self.step_s))
        for index in range((groups.num_started + num) // groups.batch_size + 1):
            batch = self._batch(index, num, groups, now_s)
            waits_s = batch.wait_s(batch.fresh, self._later_s)
            if waits_s > allowed_s and not batch.lacking:
                waits_s = min(waits_s, batch.wait_s(0, 0.0))
            if waits_s > allowed_s and batch.commit_s > 0:
                waits_s = min(waits_s, batch.wait_s(batch.fresh, batch.commit_s + MOMENT_S))
            if waits_s > allowed_s and waits_s - batch.wait_s(batch.fresh, 0.0) > WORTH * share_s:
                return True
        return False

    def _batch(self, index: int, num: int, groups: OpenGroups, now_s: float) -> _AwaitedBatch:
        """Return the description of the batch that is ``index`` batches after the next one, if ``num`` groups start
        now."""
        step, size = groups.step + index, groups.batch_size
        needed = (index + 1) * size - groups.num_ready
        started = sorted(Counter(self._started.values()).items())
        cohorts = [
            Cohort(now_s - start_s, count, groups.deadline(version) <= step) for (start_s, version), count in started
        ]
        if num:
            cohorts.append(Cohort(0.0, num, groups.deadline(groups.version) <= step))
        pass_rate = max(SPARE, np.count_nonzero(np.isfinite(self._sorted_took_s)) / len(self._sorted_took_s))
        lacking = max(0, math.ceil(needed / pass_rate - len(self._started) - num))
        return _AwaitedBatch(
            needed=needed,
            lacking=lacking,
            spare=0 if groups.in_order else max(1, round(SPARE * size)),
            cohorts=_first(cohorts, needed) if groups.in_order else cohorts,
            want_s=self._wants_s(step, now_s),
            took_s=self._sorted_took_s,
            commit_s=self._commit_s(groups.version, now_s) - now_s,
            due=(groups.deadline(groups.version) <= step, groups.deadline(groups.version + 1) <= step),
        )

    def _wants_s(self, step: int, now_s: float) -> Seconds:
        """Return the seconds from now after which the learner may want the batch of ``step``, in ascending order: one
        estimate for each of the last steps' durations."""
        current = step if self._next_step is None else self._next_step
        if step <= current:
            return np.zeros(1)
        ordered_s = self._open[current].ordered_s if current in self._open else None
        if ordered_s is None:
            return (step - current) * self._sorted_steps_s
        left_s = self._sorted_steps_s - (now_s - max(self._free_s, ordered_s))
        left_s = left_s[left_s > 0] if left_s[-1] > 0 else np.zeros(1)
        return left_s + (step - current - 1) * self.step_s

    def _commit_s(self, version: int, now_s: float) -> float:
        """Return when the version after ``version`` will be committed, in seconds on the flow's clock, as predicted
        now; infinite before the first step."""
        if self._next_step is None:
            return math.inf
        trained_s = self._free_s if self._next_step > version else self.want_s(self._next_step + 1, now_s)
        return trained_s + self._commit_lag_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwaitedBatch:
    """A batch that is not complete, and the groups that may complete it; made to compute how long the learner would
    wait for it."""

    needed: int
    """Number of groups that have to become ready for it."""
    lacking: int
    """Number of further groups that have to start for it, given the usual share of groups that are not dropped."""
    spare: int
    """Number of groups that may start in addition, to take the places of slow ones."""
    cohorts: list[Cohort]
    """The groups that have started, or start now, by the time they have run."""
    want_s: Seconds
    """The seconds from now after which the learner may want the batch, ascending."""
    took_s: Seconds
    """The durations of earlier groups in seconds, ascending; infinite for those that were dropped."""
    commit_s: float
    """Seconds until the next version is committed."""
    due: tuple[bool, bool]
    """Whether the batch has to wait for each group that starts before that commit, and for each that starts after it:
    its bound would not let a later step train it."""

    @property
    def fresh(self) -> int:
        """Return the number of groups that may still start for the batch."""
        return self.lacking + self.spare

    def wait_s(self, fresh: int, delay_s: float) -> float:
        """Return the expected wait of the learner for the batch, in seconds, if ``fresh`` more groups start after
        ``delay_s`` seconds. A group that is due cannot take another one's place, so that no spare ones would start
        then."""
        before, after = self.due
        due = after if delay_s > self.commit_s else before
        num = min(fresh, self.lacking) if due else fresh
        cohorts = [*self.cohorts, Cohort(-delay_s, num, due)] if num else self.cohorts
        return expected_wait_s(self.want_s, self.took_s, cohorts, self.needed)


def _first(cohorts: list[Cohort], count: int) -> list[Cohort]:
    """Return the cohorts of the first ``count`` groups in ``cohorts``, all marked as due: groups are trained in order,
    and the batch has to wait for each of them."""
    first: list[Cohort] = []
    for cohort in cohorts:
        first.append(Cohort(cohort.age_s, min(cohort.size, count), due=True))
        count -= first[-1].size
    return [cohort for cohort in first if cohort.size > 0]
