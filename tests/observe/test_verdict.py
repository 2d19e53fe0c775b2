"""The verdict names the side that waits, how much, and a setting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe import Bound, judge
from headrace.types.observation import Fractions

frac = st.floats(0, 1)


@pytest.mark.parametrize(
    ("times", "bound", "percent", "setting"),
    [
        (Fractions(engine_idle=0.02, learner_idle=0.38), Bound.GENERATION, "38%", "launch.engine_threads"),
        (Fractions(engine_idle=0.25, learner_idle=0.38), Bound.GENERATION, "38%", "flow.lead"),
        (Fractions(engine_idle=0.42, learner_idle=0.03), Bound.LEARNER, "42%", "launch.learner_threads"),
        (Fractions(engine_idle=0.6, learner_idle=0.7, scoring=0.35), Bound.SCORING, "35%", "flow.max_age"),
        (Fractions(engine_idle=0.3, learner_idle=0.3, sync=0.28), Bound.SYNC, "28%", "flow.lead"),
        (Fractions(engine_idle=0.0, learner_idle=0.0, sync=0.2), Bound.SYNC, "20%", "flow.lead"),
        (Fractions(engine_idle=0.4, learner_idle=0.6), Bound.TURNS, "60%", "flow.max_age"),
    ],
)
def test_each_way_of_waiting_has_its_verdict(times: Fractions, bound: Bound, percent: str, setting: str) -> None:
    verdict = judge(times)
    assert verdict.bound is bound
    assert percent in verdict.finding
    assert setting in verdict.advice
    assert str(verdict).startswith(f"{bound}: ")


def test_a_run_in_which_nobody_waits_long_is_balanced_and_needs_no_advice() -> None:
    verdict = judge(Fractions(engine_idle=0.06, learner_idle=0.09, scoring=0.02, sync=0.03))
    assert verdict.bound is Bound.BALANCED
    assert verdict.advice == ""


@given(frac, frac, frac, frac)
def test_every_interval_has_a_verdict_with_a_fraction_of_the_time(e: float, le: float, sc: float, sy: float) -> None:
    verdict = judge(Fractions(engine_idle=e, learner_idle=le, scoring=sc, sync=sy))
    assert 0 <= verdict.frac <= 1
    assert bool(verdict.advice) is (verdict.bound is not Bound.BALANCED)
    assert verdict.bound is not Bound.BALANCED or max(e, le, sc, sy) < 0.5
