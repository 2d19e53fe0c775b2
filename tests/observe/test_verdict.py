"""The verdict names the side that waits, how much, what it costs, and a setting."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe import Bound, judge
from headrace.types.observation import Account
from tests.observe.staged import Stage

frac = st.floats(0, 1)


def account(*, engine_idle: float = 0.0, learner_idle: float = 0.0, **parts: object) -> Account:
    """Of 100 seconds; times of ``parts`` in seconds."""
    busy = {"engine_busy_s": 100 * (1 - engine_idle), "learner_busy_s": 100 * (1 - learner_idle)}
    return Account(**{"seconds": 100.0, "trained_tokens": 6200, "generated_tokens": 7000, **busy, **parts})


@pytest.mark.parametrize(
    ("times", "bound", "percent", "setting"),
    [
        (account(engine_idle=0.02, learner_idle=0.38), Bound.GENERATION, "38%", "launch.engine_threads"),
        (account(engine_idle=0.25, learner_idle=0.38), Bound.GENERATION, "38%", "flow.lead"),
        (account(learner_idle=0.38, prefill_s=70.0), Bound.PREFILL, "70%", "flow.group_size"),
        (account(learner_idle=0.38, straggler_s=22.0), Bound.STRAGGLERS, "22%", "flow.max_age"),
        (account(learner_idle=0.38, held_back_s=80.0), Bound.CAPACITY, "80%", "flow.capacity"),
        (account(engine_idle=0.42, learner_idle=0.03), Bound.LEARNER, "42%", "launch.learner_threads"),
        (account(engine_idle=0.6, learner_idle=0.7, scoring_s=35.0), Bound.SCORING, "35%", "flow.max_age"),
        (account(engine_idle=0.3, learner_idle=0.3, sync_s=28.0), Bound.SYNC, "28%", "flow.lead"),
        (account(sync_s=20.0), Bound.SYNC, "20%", "flow.lead"),
        (account(engine_idle=0.4, learner_idle=0.6), Bound.TURNS, "40%", "flow.max_age"),
    ],
)
def test_each_way_of_waiting_has_its_verdict(times: Account, bound: Bound, percent: str, setting: str) -> None:
    verdict = judge(times)
    assert verdict.bound is bound
    assert percent in verdict.finding
    assert setting in verdict.advice
    assert str(verdict).startswith(f"{bound}: ")


def test_two_sides_that_work_at_once_are_not_said_to_take_turns() -> None:
    verdict = judge(account(engine_idle=0.66, learner_idle=0.38, together_s=21.0))
    assert verdict.bound is Bound.LEARNER
    assert verdict.advice.startswith("The learner stands idle too: raise flow.lead")
    assert judge(account(engine_idle=0.66, learner_idle=0.38, together_s=10.0)).bound is Bound.TURNS


def test_a_run_in_which_nobody_waits_long_is_balanced_and_needs_no_advice() -> None:
    verdict = judge(account(engine_idle=0.06, learner_idle=0.09, scoring_s=2.0, sync_s=3.0))
    assert verdict.bound is Bound.BALANCED
    assert verdict.advice == ""
    assert verdict.cost_tok_s == 0


def test_the_cost_is_what_would_be_trained_if_the_learner_never_waited() -> None:
    assert judge(account(learner_idle=0.38)).cost_tok_s == pytest.approx(62 / 0.62 - 62)
    assert judge(account(engine_idle=0.5)).cost_tok_s == pytest.approx(70)


def test_sync_stragglers_and_waste_are_told_besides() -> None:
    wasted = {"stale": 500, "zero_variance": 900}
    said = judge(account(learner_idle=0.38, exposed_sync_s=4.0, straggler_s=6.0, wasted_tokens=wasted)).besides
    assert said == (
        "Besides: exposed sync 4% of the time; stragglers 6%; 20% of the sampled tokens are never trained "
        "(zero_variance 900, stale 500)."
    )
    assert judge(account(learner_idle=0.38)).besides == ""


@given(st.tuples(*[frac] * 7))
def test_every_interval_has_a_verdict_with_a_fraction_of_the_time(parts: tuple[float, ...]) -> None:
    engine, learner, scoring, sync, stragglers, held, prefill = parts
    times = account(
        engine_idle=engine,
        learner_idle=learner,
        scoring_s=100 * scoring,
        sync_s=100 * sync,
        straggler_s=100 * stragglers,
        held_back_s=100 * held,
        prefill_s=100 * prefill * (1 - engine),
    )
    verdict = judge(times)
    assert 0 <= verdict.frac <= 1
    assert 0 <= verdict.cost_tok_s < 20 * 70
    assert bool(verdict.advice) is (verdict.bound is not Bound.BALANCED)
    assert verdict.bound is not Bound.BALANCED or max(engine, learner, scoring, sync) < 0.5


STAGES = {
    Bound.GENERATION: Stage(token_s=0.04),
    Bound.LEARNER: Stage(learn_s=0.0024),
    Bound.SCORING: Stage(reward_s=2.0, flow={"max_age": 1, "lead": 1}),
    Bound.STRAGGLERS: Stage(
        length=lambda seed: 601 if seed % 24 == 0 else 24 + seed % 2, flow={"max_age": 1, "lead": 1}
    ),
    Bound.SYNC: Stage(stage_s=1.5, flow={"max_age": 1, "lead": 1}),
    Bound.CAPACITY: Stage(room=64, learn_s=0.0003, flow={"capacity": 4}),
    Bound.PREFILL: Stage(prompt_s=0.08),
    Bound.BALANCED: Stage(),
    Bound.TURNS: Stage(flow={"max_age": 0, "lead": 0}),
}


@pytest.mark.parametrize("bound", STAGES)
def test_a_staged_run_gets_the_verdict_on_what_is_slow_in_it(tmp_path: Path, bound: Bound) -> None:
    _, seen = STAGES[bound].run(tmp_path)
    total = seen.accountant.total()
    assert judge(total).bound is bound, (str(judge(total)), total)
