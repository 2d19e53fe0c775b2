"""The result of a simulated run: its time and tokens by use, in the same form (:class:`Account`) as those of a real
run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.base.types.observation import Account, Cause


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the simulation at the end of a step. Times are seconds since the beginning of the run. ``tokens``,
    ``ages``, ``wait_s`` and ``straggler_s`` are of this step; all other amounts are totals since the beginning."""

    end_s: float
    """Time at which training of the step ended."""
    tokens: float
    """Number of tokens that carried loss in this step."""
    ages: dict[int, float]
    """Number of tokens that carried loss, by age: the learner's version minus the version that sampled the token."""
    wait_s: float
    """Time that the learner waited for this step's batch."""
    straggler_s: float
    """Part of ``wait_s`` after nine of ten episodes of the batch had ended, in seconds."""
    learner_busy_s: float
    """Time that the learner spent on training and on copies of its weights."""
    exposed_sync_s: float
    """Time for which the weight sync blocked the learner."""
    engine_busy_s: float
    """Busy time of an engine, averaged over the engines."""
    both_busy_s: float
    """Time in which both an engine and the learner were busy, averaged over the engines."""
    prefill_s: float
    """Part of ``engine_busy_s`` spent on prefill."""
    generated: float
    """Number of sampled tokens."""
    scoring_s: float
    """Time in which engines and learner were both idle while a reward was computed."""
    sync_s: float
    """Time in which engines and learner were both idle while a version was in transit."""
    wasted: float
    """Number of sampled tokens that will not be trained."""


_BEGINNING = StepSnapshot(
    end_s=0.0, tokens=0.0, ages={}, wait_s=0.0, straggler_s=0.0, learner_busy_s=0.0, exposed_sync_s=0.0,
    engine_busy_s=0.0, both_busy_s=0.0, prefill_s=0.0, generated=0.0, scoring_s=0.0, sync_s=0.0, wasted=0.0,
)  # fmt: skip


class SimulatedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one simulated run."""

    seconds: float
    """Time from the first group to the commit of the last version."""
    steps: tuple[StepSnapshot, ...]
    """The state at the end of each step, in order."""
    wasted_tokens: dict[str, float]
    """Number of wasted tokens by reason."""
    dropped_groups: dict[str, int]
    """Number of dropped groups by reason."""
    preempted: int
    """Number of times a sequence was preempted because the cache was full."""
    num_episodes: int
    """Number of episodes of the submitted groups."""

    @property
    def num_warmup_steps(self) -> int:
        """Return the number of initial steps that figures leave out, because queues are still being filled in them: a
        quarter of all steps."""
        return len(self.steps) // 4

    def account(self, first_step: int | None = None) -> Account:
        """Return the account of the time and the tokens of the simulated run from the beginning of the step with index
        ``first_step`` to the end of the last step: busy time, idle time by cause, and tokens by use. ``None`` stands
        for the first step after the warm-up (:attr:`num_warmup_steps`)."""
        num_skipped = self.num_warmup_steps if first_step is None else first_step
        begin = self.steps[num_skipped - 1] if num_skipped else _BEGINNING
        end, counted = self.steps[-1], self.steps[num_skipped:]
        seconds = end.end_s - begin.end_s
        engine_s = min(seconds, end.engine_busy_s - begin.engine_busy_s)
        learner_s = min(seconds, end.learner_busy_s - begin.learner_busy_s)
        both_busy_s = end.both_busy_s - begin.both_busy_s
        both_idle_s = {
            Cause.SCORING: end.scoring_s - begin.scoring_s,
            Cause.SYNC: end.sync_s - begin.sync_s,
        }
        return Account(
            seconds=seconds,
            engine_busy_s=engine_s,
            engine_waits_s=_split_idle_time(seconds - engine_s, Cause.LEARNER, learner_s - both_busy_s, both_idle_s),
            prefill_s=end.prefill_s - begin.prefill_s,
            learner_busy_s=learner_s,
            learner_waits_s=_split_idle_time(seconds - learner_s, Cause.ENGINE, engine_s - both_busy_s, both_idle_s),
            exposed_sync_s=end.exposed_sync_s - begin.exposed_sync_s,
            straggler_s=sum(step.straggler_s for step in counted),
            generated_tokens=round(end.generated - begin.generated),
            trained_tokens=round(sum(step.tokens for step in counted)),
            wasted_tokens={"untrained": round(end.wasted - begin.wasted)} if end.wasted > begin.wasted else {},
        )

    @property
    def tok_s(self) -> float:
        """Return the number of tokens trained per second, after the initial steps."""
        account = self.account()
        return account.per_second(account.trained_tokens)

    @property
    def step_s(self) -> float:
        """Return the mean duration of a step in seconds, after the initial steps."""
        return self.account().seconds / (len(self.steps) - self.num_warmup_steps)

    @property
    def ages(self) -> Mapping[int, float]:
        """Return the number of trained tokens by age, after the initial steps."""
        total: dict[int, float] = {}
        for step in self.steps[self.num_warmup_steps :]:
            for age, tokens in step.ages.items():
                total[age] = total.get(age, 0.0) + tokens
        return dict(sorted(total.items()))

    @property
    def mean_age(self) -> float:
        """Return the mean age of the trained tokens in versions."""
        ages = self.ages
        return sum(age * tokens for age, tokens in ages.items()) / max(sum(ages.values()), 1e-9)

    @property
    def max_age(self) -> int:
        """Return the largest age of a trained token in versions."""
        return max((age for step in self.steps for age in step.ages), default=0)


def _split_idle_time(
    idle_s: float, busy_side: Cause, busy_s: float, both_idle_s: Mapping[Cause, float]
) -> dict[str, float]:
    """Return the idle seconds of one side (engines or learner) by cause. ``idle_s`` is the total, ``busy_s`` the part
    in which the other side, ``busy_side``, works, and ``both_idle_s`` the parts, by cause, in which both sides are
    idle. The rest has the cause ``Cause.NOBODY``; causes without time are left out."""
    by_cause = {busy_side: busy_s, **both_idle_s}
    waits: dict[str, float] = {}
    for cause, time_s in by_cause.items():
        waits[str(cause)] = min(max(0.0, time_s), idle_s)
        idle_s -= waits[str(cause)]
    waits[str(Cause.NOBODY)] = idle_s
    return {cause: time_s for cause, time_s in waits.items() if time_s > 0}
