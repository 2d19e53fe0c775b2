"""What a simulated run came to: where its time and its tokens went, in the words in which a real run is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from headrace.base.types.observation import Account, Cause

if TYPE_CHECKING:
    from headrace.wings.plan.simulator import Simulation


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How things stood when a step was made; times are seconds of the run, totals since its beginning."""

    end_s: float
    tokens: float
    """That carried loss in this step."""
    ages: dict[int, float]
    """Those, by age in versions."""
    wait_s: float
    """How long the learner waited for this step's batch."""
    straggler_s: float
    """Of that, how long nine in ten episodes of the batch had ended."""
    learner_busy_s: float
    exposed_sync_s: float
    engine_busy_s: float
    """Of the mean engine."""
    together_s: float
    """Of that, while the learner trained."""
    prefill_s: float
    """Of that, on prompts."""
    generated: float
    """Tokens."""
    scoring_s: float
    """Engines and learner both stood idle while a reward was being computed."""
    sync_s: float
    """The same while a version was on its way."""
    wasted: float
    """Tokens that will not be trained."""


_BEGINNING = StepSeen(
    end_s=0.0, tokens=0.0, ages={}, wait_s=0.0, straggler_s=0.0, learner_busy_s=0.0, exposed_sync_s=0.0,
    engine_busy_s=0.0, together_s=0.0, prefill_s=0.0, generated=0.0, scoring_s=0.0, sync_s=0.0, wasted=0.0,
)  # fmt: skip


class SimulatedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    seconds: float
    """From the first group to the commit of the last version."""
    steps: tuple[StepSeen, ...]
    wasted_tokens: dict[str, float]
    """By reason."""
    dropped_groups: dict[str, int]
    """By reason."""
    preempted: int
    """Times a sequence left a batch because the cache was full."""
    num_episodes: int
    """Of the groups that were submitted."""

    @classmethod
    def of(cls, run: Simulation) -> SimulatedOutcome:
        """Of a run that has ended."""
        total = run.fleet.counted()
        wasted = dict(run.wasted)
        if total.wasted:
            wasted["weight_update"] = total.wasted
        return cls(
            seconds=run.agenda.now_s,
            steps=tuple(run.steps),
            wasted_tokens=wasted,
            dropped_groups=dict(run.books.dropped),
            preempted=total.preempted,
            num_episodes=run.books.submitted * run.world.flow.group_size,
        )

    @property
    def settled(self) -> int:
        """The number of steps after which it goes on as it will: the first quarter fills queues."""
        return len(self.steps) // 4

    def account(self, first: int | None = None) -> Account:
        """From the end of step ``first`` − 1 (0: from the beginning; unset: settled) to the end of the last."""
        skipped = self.settled if first is None else first
        begin = self.steps[skipped - 1] if skipped else _BEGINNING
        end, counted = self.steps[-1], self.steps[skipped:]
        seconds = end.end_s - begin.end_s
        engine_s = min(seconds, end.engine_busy_s - begin.engine_busy_s)
        learner_s = min(seconds, end.learner_busy_s - begin.learner_busy_s)
        together_s = end.together_s - begin.together_s
        both_wait = {
            Cause.SCORING: end.scoring_s - begin.scoring_s,
            Cause.SYNC: end.sync_s - begin.sync_s,
        }
        return Account(
            seconds=seconds,
            engine_busy_s=engine_s,
            engine_waits_s=_waits(seconds - engine_s, Cause.LEARNER, learner_s - together_s, both_wait),
            prefill_s=end.prefill_s - begin.prefill_s,
            learner_busy_s=learner_s,
            learner_waits_s=_waits(seconds - learner_s, Cause.ENGINE, engine_s - together_s, both_wait),
            exposed_sync_s=end.exposed_sync_s - begin.exposed_sync_s,
            straggler_s=sum(step.straggler_s for step in counted),
            generated_tokens=round(end.generated - begin.generated),
            trained_tokens=round(sum(step.tokens for step in counted)),
            wasted_tokens={"untrained": round(end.wasted - begin.wasted)} if end.wasted > begin.wasted else {},
        )

    @property
    def tok_s(self) -> float:
        """Trained tokens a second, once settled."""
        account = self.account()
        return account.per_second(account.trained_tokens)

    @property
    def step_s(self) -> float:
        """Seconds of a step, once settled."""
        return self.account().seconds / (len(self.steps) - self.settled)

    @property
    def ages(self) -> Mapping[int, float]:
        """Trained tokens by age, once settled."""
        total: dict[int, float] = {}
        for step in self.steps[self.settled :]:
            for age, tokens in step.ages.items():
                total[age] = total.get(age, 0.0) + tokens
        return dict(sorted(total.items()))

    @property
    def mean_age(self) -> float:
        """Of the trained tokens, in versions."""
        ages = self.ages
        return sum(age * tokens for age, tokens in ages.items()) / max(sum(ages.values()), 1e-9)

    @property
    def max_age(self) -> int:
        """The greatest, in versions."""
        return max((age for step in self.steps for age in step.ages), default=0)


def _waits(idle_s: float, other: Cause, other_s: float, both_s: Mapping[Cause, float]) -> dict[str, float]:
    """The time in which one side does nothing, by who works then: the ``other`` side, what both wait for, or nobody."""
    told = {other: other_s, **both_s}
    waits: dict[str, float] = {}
    for cause, time_s in told.items():
        waits[str(cause)] = min(max(0.0, time_s), idle_s)
        idle_s -= waits[str(cause)]
    waits[str(Cause.NOBODY)] = idle_s
    return {cause: time_s for cause, time_s in waits.items() if time_s > 0}
