"""Pacing: groups start as late as the learner can bear, whatever is predicted nothing stalls, and the bound holds."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.flow import FlowConfig
from headrace.flow.pacing import Eager, JustInTime, JustInTimePacer, Pacer, lead_time
from headrace.run.session import load_config
from headrace.wings.plan import Simulation, World
from headrace.wings.plan.costs import FailureCost, Linear, SyncCost, TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.spread import ConstantSpread, Lognormal, Pareto, Spread, Uniform
from headrace.wings.plan.workload import Workload

HISTORIES = 24
MANY_HISTORIES = 10_000
BURN_IN = 12
"""First steps that are not judged: without history every group starts at once."""


def world(*, answers: Spread | int = 40, tok_s: float = 800, steps: int = 60, work: Any = None, **flow: Any) -> World:
    """A run of eight groups a step, whose engine needs 0.4 s for an answer of 40 tokens."""
    return World(
        flow=FlowConfig(**{"groups_per_step": 8, "group_size": 2, "max_age": 2} | flow),
        steps=steps,
        engine=Linear(fixed_s=0.01),
        max_sequences=1000,
        max_new_tokens=4000,
        learner=TrainingRate(tok_s=tok_s),
        sync=SyncCost(snapshot_s=0.005, travel_s=0.05, gap_s=0.001),
        workload=Workload(prompt_tokens=20, answer_tokens=answers, **(work or {})),
    )


def mean_age(outcome: SimulatedOutcome) -> float:
    late = outcome.steps[BURN_IN:]
    return sum(age * tokens for step in late for age, tokens in step.ages.items()) / sum(step.tokens for step in late)


def both(given: World) -> tuple[SimulatedOutcome, SimulatedOutcome]:
    """Return what becomes of a run that starts every group at once, and of the same run just in time."""
    eager = replace(given, flow=given.flow.model_copy(update={"pacing": Eager()}))
    return Simulation(eager, seed=0).run(), Simulation(given, seed=0).run()


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
    turns = {"turns": 4, "observed_tokens": 10, "turn_s": Lognormal(mean=0.5, cv=0.3)}
    eager, late = both(world(answers=10, tok_s=800, max_age=8, steps=80, work=turns))
    assert late.seconds < 1.015 * eager.seconds
    assert mean_age(eager) > 7
    assert mean_age(late) < 0.65 * mean_age(eager)


def test_answers_a_hundred_times_as_long_end_the_holding_back() -> None:
    given = world(answers=20, tok_s=400, max_age=3, steps=30)
    work = given.workload.model_copy(update={"answer_tokens": Jump(value=20)})
    eager, late = both(replace(given, workload=work))
    assert late.seconds < 1.03 * eager.seconds


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

    def want_s(self, step: int, now_s: float) -> float:
        return now_s + self._rng.choice([-1e9, -1.0, 0.0, 0.3, 5.0, 1e3, 1e9])

    @property
    def experienced(self) -> bool:
        return True


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


@pytest.mark.parametrize("part", range(4))
def test_bound_books_and_the_last_step_hold_whatever_is_predicted(part: int) -> None:
    for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        _history(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_bound_books_and_the_last_step_hold_in_ten_thousand_histories(part: int) -> None:
    for seed in range(part * MANY_HISTORIES // 8, (part + 1) * MANY_HISTORIES // 8):
        _history(seed)


def test_group_of_the_next_step_is_never_held_back() -> None:
    pacer = Wrong(random.Random(0))
    for version in range(50):
        assert pacer.start_s(version + 1, version=version, now_s=3.0) == 3.0
        assert pacer.start_s(version, version=version, now_s=3.0) == 3.0


def test_lead_time_lets_the_learner_wait_for_the_allowed_mean_and_no_more() -> None:
    rng = random.Random(0)
    for _ in range(200):
        needed = [rng.lognormvariate(0, 2) - 1 for _ in range(rng.randrange(1, 30))]
        allowed = rng.choice([0.0, 0.01, 0.5, 3.0])
        found = lead_time(needed, allowed)
        waits = sum(max(0.0, each - found) for each in needed) / len(needed)
        assert waits == pytest.approx(allowed, abs=1e-9)


def _trained(pacer: Pacer, *, steps: int, step_s: float, batch_s: float) -> None:
    """Let the learner train, without a pause, batches that take ``batch_s`` from the commit of the version before."""
    for step in range(steps):
        now_s = step * step_s
        pacer.committed(step, now_s)
        pacer.admitted(step + 1, now_s)
        if step == 0:
            pacer.admitted(0, now_s)
        pacer.taken(step, max(0.0, now_s - step_s + batch_s), now_s)
        pacer.trained(step, now_s + step_s)


@pytest.mark.parametrize(("batch_s", "age"), [(0.4, 1), (0.9, 1)])
def test_needed_age_and_the_price_of_one_version_less_are_measured(batch_s: float, age: int) -> None:
    pacer = Eager().pacer()
    _trained(pacer, steps=8, step_s=1.0, batch_s=batch_s)
    assert pacer.need is not None
    assert pacer.need.age == age
    assert pacer.need.less_s == pytest.approx(batch_s, abs=1e-6)


def test_history_is_bounded() -> None:
    pacer = JustInTime(window=8).pacer()
    _trained(pacer, steps=500, step_s=1.0, batch_s=0.4)
    kept = [value for value in vars(pacer).values() if isinstance(value, deque | dict)]
    assert max(map(len, kept)) <= 100


def test_pacing_is_a_setting_that_says_when_it_cannot_be() -> None:
    run = {"model": {"path": "m"}}
    assert load_config(run).flow.pacing.kind == "just_in_time"
    assert load_config(run, ["flow.pacing=eager"]).flow.pacing.kind == "eager"
    assert load_config(run, ["flow.pacing.kind=just_in_time", "flow.pacing.learner_waits=0.05"])
    with pytest.raises(ConfigError, match=r"flow\.pacing\.kind='late' does not exist"):
        load_config(run, ["flow.pacing=late"])
    with pytest.raises(ConfigError, match=r"learner_waits=1\.5"):
        load_config(run, ["flow.pacing.kind=just_in_time", "flow.pacing.learner_waits=1.5"])
