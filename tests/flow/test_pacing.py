"""Pacing: groups start as late as the learner can bear, whatever is predicted nothing stalls, and the bound holds."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.base.heap import gc_frozen
from headrace.flow import FlowConfig, lateness
from headrace.flow.lateness import Cohort, expected_wait_s
from headrace.flow.pacing import MOST_DURATIONS, Eager, JustInTime, JustInTimePacer, OpenGroups, Pacer, _AwaitedBatch
from headrace.run.session import load_config
from headrace.wings.plan import Simulation, World
from headrace.wings.plan.costs import FailureCost, Linear, SyncCost, TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.spread import ConstantSpread, Lognormal, Pareto, Spread, Uniform
from headrace.wings.plan.workload import Workload

HISTORIES = 240
MANY_HISTORIES = 10_000
BURN_IN = 12
"""First steps that are not judged: without history every group starts at once."""
TURNS = {"turns": 4, "observed_tokens": 10, "turn_s": Lognormal(mean=0.5, cv=0.3)}


def world(
    *,
    answers: Spread | int = 40,
    tok_s: float = 800,
    steps: int = 60,
    work: Any = None,
    num_engines: int = 1,
    **flow: Any,
) -> World:
    """A run of eight groups a step, whose engine needs 0.4 s for an answer of 40 tokens."""
    return World(
        flow=FlowConfig(**{"groups_per_step": 8, "group_size": 2, "max_age": 2} | flow),
        steps=steps,
        engine=Linear(fixed_s=0.01, sequence_s=0.002 if num_engines > 1 else 0.0),
        num_engines=num_engines,
        max_sequences=1000,
        max_new_tokens=4000,
        learner=TrainingRate(tok_s=tok_s),
        sync=SyncCost(snapshot_s=0.005, travel_s=0.05, gap_s=0.001),
        workload=Workload(prompt_tokens=20, answer_tokens=answers, **(work or {})),
    )


def mean_age(outcome: SimulatedOutcome) -> float:
    return mean_of(outcome.steps[BURN_IN:])


def mean_of(steps: Any) -> float:
    return sum(age * tokens for step in steps for age, tokens in step.ages.items()) / sum(step.tokens for step in steps)


def both(given: World, *, seed: int = 0) -> tuple[SimulatedOutcome, SimulatedOutcome]:
    """Return what becomes of a run that starts every group at once, and of the same run just in time."""
    eager = replace(given, flow=given.flow.model_copy(update={"pacing": Eager()}))
    return Simulation(eager, seed=seed).run(), Simulation(given, seed=seed).run()


@pytest.mark.parametrize("answers", [40, Lognormal(mean=40, cv=0.5)])
@pytest.mark.parametrize("max_age", [2, 4])
def test_idle_engine_samples_as_late_as_it_can_at_no_cost(answers: Any, max_age: int) -> None:
    eager, late = both(world(answers=answers, tok_s=400, max_age=max_age))
    assert mean_age(eager) > 0.95 * max_age
    assert mean_age(late) < 1.15
    assert late.seconds < 1.01 * eager.seconds


@pytest.mark.parametrize("answers", [40, Lognormal(mean=40, cv=1.0)])
def test_slow_engine_is_never_held_back(answers: Any) -> None:
    eager, late = both(world(answers=answers, tok_s=8000, max_age=4))
    assert late.seconds == pytest.approx(eager.seconds, rel=0.005)
    assert mean_age(late) <= mean_age(eager)


def test_slow_environment_gets_the_age_it_needs_and_no_more() -> None:
    eager, late = both(world(answers=10, tok_s=800, max_age=8, steps=80, work=TURNS))
    assert late.seconds < 1.015 * eager.seconds
    assert mean_age(eager) > 7
    assert mean_age(late) < 0.65 * mean_age(eager)


def test_answers_a_hundred_times_as_long_end_the_holding_back() -> None:
    given = world(answers=20, tok_s=400, max_age=3, steps=30)
    work = given.workload.model_copy(update={"answer_tokens": Jump(value=20)})
    eager, late = both(replace(given, workload=work))
    assert late.seconds < 1.03 * eager.seconds


def test_times_that_become_a_hundred_times_as_long_and_short_again_leave_no_trace() -> None:
    """The learner waits for little more than an eager run, and holds groups back as before when all is over."""
    given = world(tok_s=400, max_age=3, steps=90)
    work = given.workload.model_copy(update={"reward_s": Surge(value=0.01)})
    eager, late = both(replace(given, workload=work))
    assert late.seconds < 1.03 * eager.seconds
    assert mean_of(late.steps[-20:]) < 1.15
    assert mean_of(eager.steps[-20:]) > 2.5


def test_environment_whose_times_have_no_mean_costs_little_more_than_eager() -> None:
    given = world(answers=10, tok_s=800, max_age=4, steps=150)
    work = given.workload.model_copy(update={"reward_s": NoMean(value=0.02)})
    eager, late = both(replace(given, workload=work))
    assert late.seconds < 1.05 * eager.seconds
    assert mean_age(late) <= mean_age(eager)


def test_learner_that_is_faster_than_the_engine_waits_no_longer_than_without_pacing() -> None:
    eager, late = both(world(tok_s=1e6, max_age=4))
    assert late.seconds == pytest.approx(eager.seconds, rel=0.001)


@pytest.mark.parametrize("answers", [40, Lognormal(mean=40, cv=0.5)])
def test_ages_and_waits_do_not_swing_where_durations_are_steady(answers: Any) -> None:
    _, late = both(world(answers=answers, tok_s=400, max_age=4, steps=100))
    for steps in (late.steps[40:70], late.steps[70:]):
        assert 1.0 <= mean_of(steps) < 1.15
    step_s = (late.steps[-1].end_s - late.steps[40].end_s) / len(late.steps[41:])
    assert max(step.wait_s for step in late.steps[40:]) < 0.3 * step_s


SHARED = Linear(fixed_s=0.002, sequence_s=0.002)
"""An engine of which each sequence takes time from the others."""


@pytest.mark.parametrize(
    ("given", "within", "apart"),
    [
        (world(tok_s=400), 0.02, 0.01),
        (world(answers=Lognormal(mean=40, cv=1.0), tok_s=400, max_age=4), 0.02, 0.08),
        (world(answers=Lognormal(mean=40, cv=0.5), tok_s=800), 0.02, 0.08),
        (world(answers=Lognormal(mean=40, cv=1.0), tok_s=800), 0.02, 0.2),
        (world(answers=10, max_age=8, work=TURNS), 0.02, 0.25),
        (world(answers=Lognormal(mean=40, cv=0.5), tok_s=8000, max_age=4), 0.02, 2.0),
        (replace(world(answers=Lognormal(mean=40, cv=1.0)), engine=SHARED), 0.02, 1.0),
        (world(answers=Lognormal(mean=40, cv=0.5), tok_s=400, filters=["zero_variance"]), 0.08, 0.35),
    ],
)
@pytest.mark.parametrize("pacing", [Eager(), JustInTime()])
def test_duration_of_a_synchronous_run_is_known_without_one(
    given: World, within: float, apart: float, pacing: Any
) -> None:
    """It is in the range that is told, which is narrow where batches do not share the engine. The last world drops two
    of three groups."""
    run = Simulation(replace(given, flow=given.flow.model_copy(update={"pacing": pacing})), seed=0)
    kept = KeepsTurns(run.flow._pacer)
    run.flow._pacer = kept
    run.run()
    assert len(kept.found) == given.steps
    truth = Simulation(replace(given, flow=given.flow.model_copy(update={"max_age": 0})), seed=0).run()
    least_s, most_s = (sum(each) for each in zip(*kept.found, strict=True))
    assert (1 - within) * least_s < truth.seconds < (1 + within) * most_s
    assert most_s < (1 + apart) * least_s


def test_first_groups_start_at_once_because_nothing_is_known() -> None:
    eager, late = both(world(steps=3))
    assert late.seconds == eager.seconds
    assert [step.ages for step in late.steps] == [step.ages for step in eager.steps]


def test_same_seed_gives_the_same_run() -> None:
    given = world(answers=Pareto(mean=40, alpha=1.3, cap=4000), max_age=3)
    first, second = (Simulation(given, seed=3).run() for _ in range(2))
    assert first == second


class Wrong(JustInTimePacer):
    """A pacer whose predictions are made up."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(learner_waits=0.02, window=24)
        self._rng = rng

    def num_now(self, count: int, groups: OpenGroups, now_s: float) -> tuple[int, float | None]:
        if self._rng.random() < 0.5:  # predictions that are made up
            return super().num_now(count, groups, now_s)
        next_ones = (groups.version + 2 - groups.step) * groups.batch_size - groups.num_started
        least = min(count, max(0, next_ones))
        num = self._rng.randint(least, count)
        return num, None if num == count else now_s + self._rng.choice([0.3, 5.0, 1e3, 1e9])

    def want_s(self, step: int, now_s: float) -> float:
        return now_s + self._rng.choice([-1e9, -1.0, 0.0, 0.3, 5.0, 1e3, 1e9])

    def record_group_ended(self, number: int, now_s: float, *, ready: bool) -> None:
        super().record_group_ended(number, now_s - self._rng.choice([-1e9, 0.0, 1e3]), ready=self._rng.random() < 0.7)


class KeepsTurns:
    """A pacer's stand-in that keeps what every step would have taken if generation and training took turns."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.found: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pacer, name)

    def record_step_trained(self, step: int, now_s: float) -> None:
        self._pacer.record_step_trained(step, now_s)
        if self._pacer.synchronous_time is not None:
            self.found.append((self._pacer.synchronous_time.least_s, self._pacer.synchronous_time.most_s))


class Surge(ConstantSpread):
    """Times that are a hundred times as long from the twentieth step to the thirtieth."""

    def draw(self, rng: Any, count: int) -> Any:
        times = super().draw(rng, count)
        times[20 * 16 : 30 * 16] *= 100
        return times


class NoMean(ConstantSpread):
    """Times of a Pareto distribution without a mean."""

    def draw(self, rng: Any, count: int) -> Any:
        return self.value * (1 + rng.pareto(0.9, count))


class Jump(ConstantSpread):
    """Answers that become a hundred times as long at the twelfth step."""

    def draw(self, rng: Any, count: int) -> Any:
        lengths = super().draw(rng, count)
        lengths[12 * 16 :] *= 100
        return lengths


def _history(seed: int) -> None:
    """Simulate one random run; the simulation checks books and bound after every event, and that something can
    happen until the last step is committed."""
    rng = random.Random(seed)
    flow: dict[str, Any] = {"max_age": rng.choice([0, 1, 2, 3, 5])}
    flow["lead"] = rng.choice([None, *range(flow["max_age"] + 1)])
    flow["order"] = rng.choice(["ready_first", "strict"])
    if rng.random() < 0.3:
        flow["filters"] = ["zero_variance"]
    if rng.random() < 0.2:
        flow["policy"], flow["order"] = {"kind": "windowed", "window": 1}, "ready_first"
    if rng.random() < 0.3:
        flow["capacity"] = rng.choice([3, 4, 6])
    answers = rng.choice([20, Uniform(high=90), Lognormal(mean=40, cv=2.0), Pareto(mean=40, alpha=1.05, cap=4000)])
    given = World(
        flow=FlowConfig(groups_per_step=3, group_size=2, **flow),
        steps=7,
        engine=Linear(fixed_s=rng.choice([0.0001, 0.01, 0.1]), sequence_s=rng.choice([0.0, 0.01])),
        max_sequences=rng.choice([4, 1000]),
        max_new_tokens=4000,
        learner=TrainingRate(tok_s=rng.choice([30.0, 800.0, 1e6])),
        sync=SyncCost(snapshot_s=0.005, travel_s=rng.choice([0.0, 0.05, 3.0]), gap_s=0.001),
        workload=Workload(
            prompt_tokens=20,
            answer_tokens=answers,
            turn_s=rng.choice([0, Lognormal(mean=0.5, cv=3.0)]),
            turns=rng.choice([1, 3]),
            observed_tokens=4,
            failed_share=rng.choice([0.0, 0.1]),
        ),
        failures=FailureCost(),
    )
    run = Simulation(given, seed=seed, check=True)
    if seed % 2:
        run.flow._pacer = Wrong(rng)  # adversarial predictions: the flow gets any time at all
    outcome = run.run()
    assert len(outcome.steps) >= given.steps
    assert max((age for step in outcome.steps for age in step.ages), default=0) <= flow["max_age"]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
@gc_frozen()  # each simulation would look through all objects of the process otherwise
def test_bound_books_and_the_last_step_hold_whatever_is_predicted(part: int) -> None:
    for seed in range(part * HISTORIES // 8, (part + 1) * HISTORIES // 8):
        _history(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
@gc_frozen()
def test_bound_books_and_the_last_step_hold_in_ten_thousand_histories(part: int) -> None:
    for seed in range(part * MANY_HISTORIES // 8, (part + 1) * MANY_HISTORIES // 8):
        _history(seed)


def open_groups(*, version: int, step: int, started: int, size: int = 4) -> OpenGroups:
    return OpenGroups(
        step=step, batch_size=size, num_started=started, num_ready=started, version=version,
        deadline=lambda sampled: sampled + 3, in_order=False,
    )  # fmt: skip


def test_groups_of_the_next_step_are_never_held_back() -> None:
    pacer = JustInTime().pacer()
    _trained(pacer, steps=8, step_s=1.0, batch_s=0.1)
    now_s = 8.0
    for started in range(5):
        num, again_s = pacer.num_now(8, open_groups(version=7, step=8, started=started), now_s)
        assert num == 4 - started, "those of step 8 start at once, and those of step 9 only when they are needed"
        assert again_s is not None
        assert now_s < again_s < now_s + 1.0


def _wait_by_trial(rng: random.Random, took_s: list[float], cohorts: list[Cohort], needed: int) -> float:
    """Return when the batch is ready in one trial, in which every group draws its duration among those that are longer
    than it has run."""
    ready_s, due_s = [], 0.0
    for cohort in cohorts:
        for _ in range(cohort.size):
            left_s = rng.choice([each for each in took_s if each > max(0.0, cohort.age_s)]) - cohort.age_s
            ready_s.append(left_s)
            due_s = max(due_s, left_s if cohort.due else 0.0)
    return max(sorted(ready_s)[needed - 1], due_s)


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("needed", [4, 6, 7])
def test_expected_wait_is_the_mean_of_trials(needed: int, due: bool) -> None:
    rng = random.Random(needed)
    took_s = sorted(rng.lognormvariate(0, 0.7) for _ in range(80))
    want_s = sorted(rng.uniform(0.5, 1.5) for _ in range(9))
    cohorts = [Cohort(0.7, 3), Cohort(0.2, 2, due=due), Cohort(-0.4, 2)]
    expected_s = expected_wait_s(np.array(want_s), np.array(took_s), cohorts, needed)
    trials = [_wait_by_trial(rng, took_s, cohorts, needed) - rng.choice(want_s) for _ in range(8_000)]
    assert expected_s == pytest.approx(sum(max(0.0, each) for each in trials) / len(trials), rel=0.08)


@pytest.mark.parametrize("spare", [0, 8, 40])
def test_many_groups_are_judged_as_if_each_was_counted(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(spare)
    took_s = np.sort(rng.lognormal(0.0, 0.6, 300))
    for _ in range(40):
        ages_s, sizes = np.sort(rng.uniform(-0.5, 1.5, 12)), rng.integers(3, 20, 12)
        cohorts = [Cohort(float(age_s), int(size)) for age_s, size in zip(ages_s, sizes, strict=True)]
        given = (np.sort(rng.uniform(0.2, 2.0, 8)), took_s, cohorts, int(sizes.sum()) - spare)
        monkeypatch.setattr(lateness, "EXACT", 0)
        approximated_s = expected_wait_s(*given)
        monkeypatch.setattr(lateness, "EXACT", 10_000)
        assert approximated_s == pytest.approx(expected_wait_s(*given), abs=0.002)


def test_batch_of_a_thousand_groups_is_judged_with_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    pacer, groups = JustInTimePacer(learner_waits=0.02, window=24), open_groups(version=7, step=8, started=0)
    enough = 0
    asked: list[int] = []
    monkeypatch.setattr(
        JustInTimePacer, "_needs_one_more", lambda _, num, *rest: bool(asked.append(num)) or num < enough
    )
    for enough in (0, 1, 2, 37, 512, 1024):
        asked.clear()
        assert pacer._enough(0, 1024, groups, 0.0) == enough
        assert len(asked) <= 22


def test_group_that_was_dropped_or_has_run_longer_than_any_other_is_never_expected() -> None:
    want_s, took_s = np.array([1.0]), np.array([0.5, 0.6, 0.7])
    assert expected_wait_s(want_s, took_s, [Cohort(0.0, 2)], 2) == 0.0
    assert expected_wait_s(np.array([0.0, 1.0]), took_s, [Cohort(0.8, 1), Cohort(0.0, 1)], 2) > 0.3
    assert expected_wait_s(np.array([0.0]), np.array([0.5, np.inf]), [Cohort(0.0, 2)], 2) > 0.3
    assert expected_wait_s(want_s, took_s, [Cohort(0.0, 2)], 3) == np.inf


def _trained(pacer: Pacer, *, steps: int, step_s: float, batch_s: float) -> None:
    """Let the learner train, without a pause, batches of one group, each of which starts with the weights of the
    version before."""
    pacer.record_group_admitted(0, 0, -step_s)
    for step in range(steps):
        now_s = step * step_s
        pacer.record_group_ended(step, now_s - step_s + batch_s, ready=True)
        pacer.record_batch_taken(step, [step], now_s)
        pacer.record_version_committed(step, now_s)
        pacer.record_group_admitted(step + 1, step, now_s)
        pacer.record_step_trained(step, now_s + step_s)


def test_time_of_turns_is_that_of_the_longest_group_and_not_of_those_that_were_begun_before_it() -> None:
    pacer = Eager().pacer()
    for number, started_s in enumerate([0.0, 2.0, 5.0]):
        pacer.record_group_admitted(number, 0, started_s)
    for number, ready_s in enumerate([4.0, 3.0, 8.0]):
        pacer.record_group_ended(number, ready_s, ready=True)
    pacer.record_batch_taken(0, [0, 1, 2], 8.0)
    pacer.record_batch_sent(0, 8.5)
    pacer.record_step_trained(0, 10.5)
    assert pacer.synchronous_time is not None
    assert pacer.synchronous_time.most_s == pacer.synchronous_time.least_s == pytest.approx(4.0 + 0.5 + 2.0)


def test_group_that_was_dropped_lengthens_the_turn_in_which_another_took_its_place() -> None:
    pacer = Eager().pacer()
    for number in range(3):
        pacer.record_group_admitted(number, 0, 0.0)
    for number, ready in enumerate([False, True, True]):
        pacer.record_group_ended(number, 4.0, ready=ready)
    pacer.record_batch_taken(0, [1, 2], 4.0)
    pacer.record_step_trained(0, 5.0)
    assert pacer.synchronous_time is not None
    assert pacer.synchronous_time.most_s == pytest.approx(4.0 + 4.0 + 1.0)


def test_nothing_is_told_of_turns_where_a_group_was_ready_before_the_process_began() -> None:
    pacer = Eager().pacer()
    pacer.record_batch_taken(3, [7], 1.0)
    pacer.record_step_trained(3, 2.0)
    assert pacer.synchronous_time is None


def test_history_is_bounded() -> None:
    pacer = JustInTime(window=8).pacer()
    _trained(pacer, steps=2 * MOST_DURATIONS, step_s=1.0, batch_s=0.4)
    kept = [value for value in vars(pacer).values() if isinstance(value, deque | dict)]
    assert max(map(len, kept)) <= MOST_DURATIONS


def test_pacing_is_a_setting_that_says_when_it_cannot_be() -> None:
    run = {"model": {"path": "m"}}
    assert load_config(run).flow.pacing.kind == "just_in_time"
    assert load_config(run, ["flow.pacing=eager"]).flow.pacing.kind == "eager"
    assert load_config(run, ["flow.pacing.kind=just_in_time", "flow.pacing.learner_waits=0.05"])
    with pytest.raises(ConfigError, match=r"flow\.pacing\.kind='late' does not exist"):
        load_config(run, ["flow.pacing=late"])
    with pytest.raises(ConfigError, match=r"learner_waits=1\.5"):
        load_config(run, ["flow.pacing.kind=just_in_time", "flow.pacing.learner_waits=1.5"])


def test_times_may_be_numbers_of_numpy() -> None:
    """The planner's clock has such; a comparison of two is no index of a tuple."""
    batch = _AwaitedBatch(
        needed=1, lacking=1, spare=1, cohorts=[], want_s=np.array([1.0]), took_s=np.array([1.0, 2.0]), commit_s=0.5,
        due=(True, False),
    )  # fmt: skip
    early_s, late_s = (batch.wait_s(2, np.float64(delay_s)) for delay_s in (0.1, 0.9))
    assert (early_s, late_s) == (batch.wait_s(2, 0.1), batch.wait_s(2, 0.9))
    assert early_s != late_s
