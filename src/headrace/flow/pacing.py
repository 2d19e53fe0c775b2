"""Pacing: it decides when a group starts that the staleness policy would admit now.

A group that waits for the learner ages without a benefit. ``eager`` starts a group as soon as the policy allows it;
``just_in_time``, the default, delays the group until the learner would otherwise have to wait for its batch:

    learner       │ step n − 1 │   step n    │  step n + 1 │
    committed           n − 1 ▲        n ▲
    eager         ▒▒▒▒ n + 1 ▒▒▒▒ · · · waits · · · ·┤            sampled by version n − 1, trained at age 2
    just in time                 │       ├▒▒ n + 1 ▒▒┤            sampled by version n, trained at age 1

Let v be the committed version. A group for step s starts as soon as one of two conditions holds:

    s ≤ v + 1         no newer weights can come before step s begins, unless the learner waits for them
    it is needed      to start it a little later, or with the next weights, would make the learner wait for too long

The second condition is evaluated group by group from three inputs: the time that each running group has run, the
durations of recent groups (:mod:`~headrace.flow.lateness`), and the time at which the learner will want the batch,
which is predicted from the durations of its recent steps. The duration of a group includes scoring, the environment and
the engine's load, and a dropped group counts with an infinite duration. A group is not needed as long as the expected
wait stays within the allowance even if every group that the batch lacks, and a few spare groups, start later. So one
slow group does not make its whole batch start earlier: a group of the next batch starts in addition and takes its
place, and the slow group is trained with the next batch. A group that is due cannot be replaced. Shortly before a
commit it is therefore better to wait for the commit: a group that starts after it is due one step later.

The allowance is ``learner_waits``, a share of the duration of a step. The time that the learner has really waited
beyond its share is a debt, which lowers the allowance until enough steps without a wait have followed.

Correctness depends on no assumption: pacing only delays groups that the policy would admit, and never a group of the
next step after the committed version. So the staleness bound holds and the run cannot stall, whatever is predicted.
That the learner waits little depends on one assumption: groups and steps take about as long as recent ones,
independently of each other. A group that has run longer than all recent groups counts as late, so groups are no longer
delayed soon after durations have become much longer. Without history, with durations that have no mean, or with an
engine or environment so slow that every group is needed at once, ``just_in_time`` behaves like ``eager``.
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
"""Least number of measured steps, and of measured groups, with which a group may be delayed."""
SURE = 4
"""With fewer measured steps than this, the shortest step is the expected duration, because first steps take longer."""
STEPS = 8
"""Number of recent steps whose median duration is the expected duration of the next steps."""
MOST_DURATIONS = 512
"""Greatest number of recent groups whose durations are stored."""
ALLOWED = 0.25
"""The allowed expected wait for one batch, as a fraction of ``learner_waits``. The rest is reserved for delays that the
history does not contain."""
LATER = 1 / 12
"""Time until a delayed group is considered again, as a fraction of a step or of a group's duration, whichever is
longer."""
WORTH = 1 / 8
"""A group starts now only if this shortens the expected wait by more than this fraction of the allowed wait."""
DEBT = 1 / 4
"""Debt, in steps, at which the allowed wait is 0."""
EAGER_DEBT = 1.0
"""Debt, in steps, at which no group is delayed: the engine is slow, or durations have changed."""
MOST_DEBT = 1.5
"""Greatest debt, in steps; a longer wait does not increase it further."""
MOMENT_S = 1e-6
"""A short time, in seconds, that is added to the time of a commit to obtain a time after the commit."""
SPARE = 1 / 8
"""Number of spare groups, as a fraction of a batch: they may start in addition and take the places of slow groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousTime:
    """A lower and an upper bound of how long a step would have taken if generation and training alternated instead of
    overlapping, in seconds."""

    most_s: float
    """The upper bound: the time for the batch, if all of its groups had started at once and each had taken as long as
    it did; for its training; and for the commit of the previous weights. Where groups share a busy engine, a group
    counts with the duration that it had while it shared the engine."""
    least_s: float
    """The lower bound: the same sum, if generating the batch had taken only the time after the groups of all earlier
    batches were ready."""


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
    """A step that has its batch and is not trained yet. Times are seconds on the flow's clock."""

    ordered_s: float
    """When the batch was sent to the learner; until then, when the batch was complete."""
    taken_s: float
    """When the batch was complete."""
    batch_s: tuple[float, float] | None
    """Lower and upper bound, in seconds, of how long the batch would have taken without other batches; ``None`` if some
    of its groups started before this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroups:
    """A description of the groups that are in no batch, which the flow passes to :meth:`Pacer.num_now`."""

    step: int
    """The first step that has no batch."""
    batch_size: int
    """Number of groups in a batch."""
    num_started: int
    """Number of groups that run or are ready and are in no batch."""
    num_ready: int
    """Number of groups that are ready for a batch."""
    version: int
    """The committed version."""
    deadline: Callable[[int], int]
    """A function that returns the last step that may train tokens of a given version."""
    in_order: bool
    """Whether groups are trained in the order in which they start."""


class Pacer:
    """The state of a pacing during a run, which decides how many groups may start. This class starts every group at
    once; it is the base class of pacers that delay groups.

    It also computes how long each step would have taken if generation and training alternated. The flow owns the pacer
    and reports every event to it; times are seconds on the flow's clock.
    """

    def __init__(self) -> None:
        """Create a pacer without history."""
        self.synchronous_time: SynchronousTime | None = None
        """The time that the last trained step would have taken if generation and training alternated; ``None`` if it is
        not known."""
        self._open: dict[int, _OpenStep] = {}
        """The steps that have a batch and are not trained yet, by step."""
        self._next_step: int | None = None
        """The step that the learner trains now or next; ``None`` before the first batch."""
        self._free_s = 0.0
        """When the learner ended the step before ``_next_step``; before the first step, when the first batch was
        complete."""
        self._commit_lag_s = 0.0
        """Seconds from the end of the last committed step to its commit."""
        self._started: dict[int, tuple[float, int]] = {}
        """When each running group started, and the version that was committed then, by the number of the group."""
        self._ready: dict[int, _ReadyGroup] = {}
        self._dropped_s: dict[int, float] = {}
        """Durations in seconds of groups that ran and were dropped, by number. They are removed when a batch with a
        later group is complete."""
        self._all_ready_s = 0.0
        """When the last group of all complete batches became ready."""

    def num_now(self, count: int, groups: OpenGroups, now_s: float) -> tuple[int, float | None]:
        """Return how many of ``count`` groups, which the policy admits, may start now, and the time at which to call
        this method again for the remaining groups: ``None`` if no group remains, or if only an event can let one start.
        ``groups`` describes the groups that are in no batch."""
        return count, None

    def record_group_admitted(self, number: int, version: int, now_s: float) -> None:
        """Record that the group ``number`` starts now, under the committed ``version``."""
        self._started[number] = now_s, version

    def record_group_ended(self, number: int, now_s: float, *, ready: bool) -> None:
        """Record that the group ``number`` has become ready or, if not ``ready``, was dropped."""
        self._ready.pop(number, None)
        started = self._started.pop(number, None)
        if started is None:
            return
        if ready:
            self._ready[number] = _ReadyGroup(started_s=started[0], ready_s=now_s)
        else:
            self._dropped_s[number] = now_s - started[0]

    def record_batch_taken(self, step: int, numbers: Sequence[int], now_s: float) -> None:
        """Record that ``step`` has its batch, which consists of the groups ``numbers``."""
        if self._next_step is None:
            self._next_step, self._free_s = step, now_s
        batch = {number: self._ready.pop(number) for number in numbers if number in self._ready}
        batch_s = None if len(batch) < len(numbers) else self._time_alone_s(batch)
        self._open[step] = _OpenStep(ordered_s=now_s, taken_s=now_s, batch_s=batch_s)
        self._all_ready_s = max([self._all_ready_s, *(group.ready_s for group in batch.values())])

    def _time_alone_s(self, batch: Mapping[int, _ReadyGroup]) -> tuple[float, float]:
        """Return the lower and the upper bound, in seconds, of how long ``batch`` would have taken if its groups had
        started at the same time without other batches. Earlier dropped groups are included, since groups of the batch
        replaced them."""
        first_start_s = min(group.started_s for group in batch.values())
        ready_s = max(group.ready_s for group in batch.values())
        groups = [(number, group.ready_s - group.started_s, True) for number, group in batch.items()]
        dropped = [number for number in self._dropped_s if number < max(batch)]
        groups += [(number, self._dropped_s.pop(number), False) for number in dropped]
        most_s = _together_s([(took_s, kept) for _, took_s, kept in sorted(groups)])
        return min(most_s, max(0.0, ready_s - max(first_start_s, self._all_ready_s))), most_s

    def record_batch_sent(self, step: int, now_s: float) -> None:
        """Record that the batch of ``step`` is laid out and was sent to the learner."""
        self._open[step].ordered_s = now_s

    def record_step_trained(self, step: int, now_s: float) -> None:
        """Record that the learner has trained ``step``, and compute ``synchronous_time`` for it."""
        trained = self._open.pop(step)
        self.synchronous_time = None
        if trained.batch_s is not None:
            step_s = now_s - max(self._free_s, trained.ordered_s)
            rest_s = trained.ordered_s - trained.taken_s + step_s + self._commit_lag_s
            least_s, most_s = trained.batch_s
            self.synchronous_time = SynchronousTime(least_s=least_s + rest_s, most_s=most_s + rest_s)
        self._next_step, self._free_s = step + 1, now_s

    def record_version_committed(self, version: int, now_s: float) -> None:
        """Record that the engines use ``version`` from now on."""
        if version == self._next_step:
            self._commit_lag_s = now_s - self._free_s


def _together_s(groups: Sequence[tuple[float, bool]]) -> float:
    """Return the number of seconds until the last group of a batch is ready if the batch starts as many groups as it
    needs at once, and starts another group whenever one is dropped. ``groups`` contains, in the order of their starts,
    the duration of each group in seconds and whether it is kept (not dropped); the last group is kept.

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
            # another group starts in the place of a dropped one
            heapq.heappush(free_s, end_s)
    return last_s


class PacingSection(Section):
    """The base class of the settings of all kinds of pacing (``flow.pacing`` in a run file)."""

    def pacer(self) -> Pacer:
        """Return a new pacer with these settings, for one run."""
        raise NotImplementedError


class Eager(PacingSection):
    """The pacing that starts every group as soon as the staleness policy allows it."""

    kind: Literal["eager"] = "eager"

    def pacer(self) -> Pacer:
        """Return a new pacer that starts every group at once."""
        return Pacer()


class JustInTime(PacingSection):
    """The pacing that starts a group as late as possible without making the learner wait for long, so that its tokens
    are sampled by newer weights."""

    kind: Literal["just_in_time"] = "just_in_time"
    learner_waits: float = Field(default=0.02, gt=0, lt=1)
    """Greatest share of its time for which the learner may wait for batches because their groups were delayed."""
    window: int = Field(default=24, ge=4)
    """Number of recent steps whose durations predict when the learner wants its next batches."""

    def pacer(self) -> Pacer:
        """Return a new pacer that delays groups with these settings."""
        return JustInTimePacer(learner_waits=self.learner_waits, window=self.window)


AnyPacing = JustInTime | Eager
PACINGS = Kinds(AnyPacing, group="headrace.pacings", setting="flow.pacing", contract=PacingSection)
"""The registry of all kinds of pacing, including kinds of installed packages."""
PacingConfig = Annotated[AnyPacing, PACINGS]


class JustInTimePacer(Pacer):
    """A pacer that delays groups of later steps until the learner would otherwise have to wait for a batch. It predicts
    the wait from the durations of recent groups and steps."""

    def __init__(self, *, learner_waits: float, window: int) -> None:
        """Create a pacer without history. ``learner_waits`` is the share of its time for which the learner may wait,
        and ``window`` the number of recent steps whose durations are stored."""
        super().__init__()
        self.learner_waits = learner_waits
        self._step_durations_s: deque[float] = deque(maxlen=window)
        """Durations of the learner's recent steps, in seconds."""
        self._group_durations_s: deque[float] = deque(maxlen=MOST_DURATIONS)
        """Durations of the recent groups in seconds, from their start until they were ready; infinite for groups that
        were dropped."""
        self._sorted_group_durations_s: Seconds = np.zeros(0)
        """The two lists of durations in ascending order, as of the last trained step."""
        self._sorted_step_durations_s: Seconds = np.zeros(0)
        self._retry_interval_s = 0.0
        """Seconds until a delayed group is considered again."""
        self._debt_s = 0.0
        """The debt: seconds that the learner has waited beyond its share, which lower the allowed wait."""
        self._retry_s: float | None = None
        """The time until which the last result of :meth:`num_now` is valid if no event happens; ``None`` if an event
        has invalidated it."""

    def record_group_ended(self, number: int, now_s: float, *, ready: bool) -> None:
        """Record that the group ``number`` has ended, and its duration. The duration of a dropped group (not ``ready``)
        is infinite."""
        started = self._started.get(number)
        super().record_group_ended(number, now_s, ready=ready)
        if started is not None:
            self._group_durations_s.append(now_s - started[0] if ready else math.inf)
        if not ready:
            self._retry_s = None

    def record_batch_taken(self, step: int, numbers: Sequence[int], now_s: float) -> None:
        """Record that ``step`` has its batch, which consists of the groups ``numbers``. The next call of
        :meth:`num_now` computes a new result."""
        super().record_batch_taken(step, numbers, now_s)
        self._retry_s = None

    def record_step_trained(self, step: int, now_s: float) -> None:
        """Record that the learner has trained ``step``: update the durations of steps and groups, and the debt."""
        ordered_s = self._open[step].ordered_s
        over_s = max(0.0, ordered_s - self._free_s) - self.learner_waits * self.step_s
        self._step_durations_s.append(now_s - max(self._free_s, ordered_s))
        super().record_step_trained(step, now_s)
        self._debt_s = min(max(0.0, self._debt_s + over_s), MOST_DEBT * self.step_s) if self.experienced else 0.0
        self._sorted_group_durations_s = np.sort(np.array(self._group_durations_s))
        self._sorted_step_durations_s = np.sort(np.array(self._step_durations_s))
        usual_s = statistics.median_low(self._group_durations_s) if self._group_durations_s else 0.0
        self._retry_interval_s = LATER * max(self.step_s, usual_s if math.isfinite(usual_s) else 0.0)
        self._retry_s = None

    def record_version_committed(self, version: int, now_s: float) -> None:
        """Record that the engines use ``version`` from now on. The next call of :meth:`num_now` computes a new
        result."""
        super().record_version_committed(version, now_s)
        self._retry_s = None

    @property
    def step_s(self) -> float:
        """Return the expected duration of a step of the learner, in seconds: the median of the last :data:`STEPS`
        steps; the shortest step if there are fewer than :data:`SURE`; 0 before the first step."""
        last_s = list(islice(reversed(self._step_durations_s), STEPS))
        return min(last_s, default=0.0) if len(last_s) < SURE else statistics.median(last_s)

    def want_s(self, step: int, now_s: float) -> float:
        """Return the predicted time, in seconds on the flow's clock, at which the learner will have trained all steps
        before ``step``."""
        current = step if self._next_step is None else self._next_step
        ordered_s = self._open[current].ordered_s if current in self._open else None
        if ordered_s is None:
            return now_s + (step - current) * self.step_s
        end_s = max(now_s, max(self._free_s, ordered_s) + self.step_s)
        return end_s + (step - current - 1) * self.step_s

    @property
    def experienced(self) -> bool:
        """Return whether enough steps and groups have been measured for predictions."""
        return min(len(self._step_durations_s), len(self._sorted_group_durations_s)) >= EVIDENCE

    @property
    def _may_delay(self) -> bool:
        """Return whether groups may be delayed at all: there is enough history, and the debt is below
        :data:`EAGER_DEBT`."""
        return self.experienced and self._debt_s < EAGER_DEBT * self.step_s

    def num_now(self, count: int, groups: OpenGroups, now_s: float) -> tuple[int, float | None]:
        """Return how many of ``count`` groups, which the policy admits, may start now, and the time at which to call
        this method again for the remaining groups (``None``: only after an event). Groups for steps up to the committed
        version + 1 always start."""
        always = (groups.version + 2 - groups.step) * groups.batch_size - groups.num_started
        num = min(count, max(0, always)) if self._may_delay else count
        if num == count:
            return count, None
        if not num and self._retry_s is not None and now_s < self._retry_s:
            return 0, self._retry_s  # since then, groups have at most become ready, as expected
        num = self._enough(num, count, groups, now_s)
        self._retry_s = now_s + self._retry_interval_s
        return num, self._retry_s if num < count else None

    def _enough(self, least: int, most: int, groups: OpenGroups, now_s: float) -> int:
        """Return the smallest number of groups to start now, from ``least`` to ``most``, with which no batch needs one
        more group. The need decreases with each group that starts, so the number is found by doubling strides and then
        bisection."""
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
        """Return whether, if only ``num`` groups start now, the learner is expected to wait for some batch longer than
        is allowed, and one more group would shorten the wait."""
        share_s = ALLOWED * self.learner_waits * self.step_s
        allowed_s = share_s * max(0.0, 1 - self._debt_s / (DEBT * self.step_s))
        for index in range((groups.num_started + num) // groups.batch_size + 1):
            batch = self._batch(index, num, groups, now_s)
            # assume that every missing group and the spare ones start at the next opportunity
            waits_s = batch.wait_s(batch.fresh, self._retry_interval_s)
            if waits_s > allowed_s and not batch.lacking:
                waits_s = min(waits_s, batch.wait_s(0, 0.0))
            # groups that start after the next commit may be due later, so they can be replaced
            if waits_s > allowed_s and batch.commit_s > 0:
                waits_s = min(waits_s, batch.wait_s(batch.fresh, batch.commit_s + MOMENT_S))
            if waits_s > allowed_s and waits_s - batch.wait_s(batch.fresh, 0.0) > WORTH * share_s:
                return True
        return False

    def _batch(self, index: int, num: int, groups: OpenGroups, now_s: float) -> _AwaitedBatch:
        """Return the description of the batch that is ``index`` batches after the next batch, under the assumption that
        ``num`` groups start now."""
        step, size = groups.step + index, groups.batch_size
        needed = (index + 1) * size - groups.num_ready
        started = sorted(Counter(self._started.values()).items())
        cohorts = [
            Cohort(now_s - start_s, count, groups.deadline(version) <= step) for (start_s, version), count in started
        ]
        if num:
            cohorts.append(Cohort(0.0, num, groups.deadline(groups.version) <= step))
        # dropped groups must be replaced: more groups have to start than have to become ready
        pass_rate = max(
            SPARE, np.count_nonzero(np.isfinite(self._sorted_group_durations_s)) / len(self._sorted_group_durations_s)
        )
        lacking = max(0, math.ceil(needed / pass_rate - len(self._started) - num))
        return _AwaitedBatch(
            needed=needed,
            lacking=lacking,
            spare=0 if groups.in_order else max(1, round(SPARE * size)),
            cohorts=_first_as_due(cohorts, needed) if groups.in_order else cohorts,
            want_s=self._want_times_s(step, now_s),
            took_s=self._sorted_group_durations_s,
            commit_s=self._next_commit_s(groups.version, now_s) - now_s,
            due=(groups.deadline(groups.version) <= step, groups.deadline(groups.version + 1) <= step),
        )

    def _want_times_s(self, step: int, now_s: float) -> Seconds:
        """Return the times, in seconds from now and in ascending order, at which the learner may want the batch of
        ``step``: one estimate for each duration of a recent step."""
        current = step if self._next_step is None else self._next_step
        if step <= current:
            return np.zeros(1)
        ordered_s = self._open[current].ordered_s if current in self._open else None
        if ordered_s is None:
            return (step - current) * self._sorted_step_durations_s
        left_s = self._sorted_step_durations_s - (now_s - max(self._free_s, ordered_s))
        left_s = left_s[left_s > 0] if left_s[-1] > 0 else np.zeros(1)
        return left_s + (step - current - 1) * self.step_s

    def _next_commit_s(self, version: int, now_s: float) -> float:
        """Return the predicted time, in seconds on the flow's clock, at which the version after ``version`` will be
        committed; infinite before the first step."""
        if self._next_step is None:
            return math.inf
        trained_s = self._free_s if self._next_step > version else self.want_s(self._next_step + 1, now_s)
        return trained_s + self._commit_lag_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwaitedBatch:
    """A batch that is not complete, with the groups that may complete it. It computes the expected wait of the learner
    for this batch."""

    needed: int
    """Number of groups that have to become ready for the batch."""
    lacking: int
    """Number of further groups that have to start for the batch, given the share of recent groups that were not
    dropped."""
    spare: int
    """Number of spare groups: they may start in addition and take the places of slow groups."""
    cohorts: list[Cohort]
    """The groups that have started or start now, combined by the time of their start."""
    want_s: Seconds
    """The times, in seconds from now, at which the learner may want the batch, in ascending order."""
    took_s: Seconds
    """The durations of recent groups in seconds, in ascending order; infinite for groups that were dropped."""
    commit_s: float
    """Seconds until the next version is committed."""
    due: tuple[bool, bool]
    """Whether groups that start before the next commit are due in this batch, and whether groups that start after it
    are: the staleness bound would not allow a later step to train them."""

    @property
    def fresh(self) -> int:
        """Return the number of groups that may still start for the batch, spare groups included."""
        return self.lacking + self.spare

    def wait_s(self, fresh: int, delay_s: float) -> float:
        """Return the expected wait of the learner for the batch, in seconds, if ``fresh`` more groups start after
        ``delay_s`` seconds. If new groups are due in this batch, no spare groups are assumed, since the batch has to
        wait for every group that is due."""
        due_before, due_after = self.due
        is_due = due_after if delay_s > self.commit_s else due_before
        num = min(fresh, self.lacking) if is_due else fresh
        cohorts = [*self.cohorts, Cohort(-delay_s, num, is_due)] if num else self.cohorts
        return expected_wait_s(self.want_s, self.took_s, cohorts, self.needed)


def _first_as_due(cohorts: list[Cohort], count: int) -> list[Cohort]:
    """Return the cohorts of the first ``count`` groups in ``cohorts``, all marked as due. Where groups are trained in
    order, the batch has to wait for each of these groups."""
    first: list[Cohort] = []
    for cohort in cohorts:
        first.append(Cohort(cohort.age_s, min(cohort.size, count), due=True))
        count -= first[-1].size
    return [cohort for cohort in first if cohort.size > 0]
