"""Limits that tune themselves: what they do, and what they say of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.messages.controller import EngineStats
from headrace.flow.state import FlowLimits, FlowState
from headrace.flow.tuning import AgeTuner, AgeTuning, Concurrency

FRESH = EngineStats(cache_blocks=100)


def looks(cap: Concurrency, stats: EngineStats, *, times: int = 1, limit: int = 64) -> tuple[Concurrency, list[str]]:
    """The cap after so many looks at an engine whose groups fill the cap."""
    said = []
    for _ in range(times):
        cap, why = cap.observe(stats, num_running=cap.capacity, limit=limit)
        said.append(why)
    return cap, said


def test_cap_doubles_until_the_first_sign_of_pressure_and_then_climbs_by_steps() -> None:
    cap, said = looks(Concurrency(floor=8, capacity=8, last_stats=FRESH), FRESH, times=2)
    assert cap.capacity == 32
    assert said[0] == "capacity 8 → 16 groups: all of it is in use and nothing waits (cache 0% used)"
    cap, said = looks(cap, msgspec.structs.replace(FRESH, preempted=2))
    assert (cap.capacity, said) == (24, ["capacity 32 → 24 groups: 2 sequences had to leave the cache"])
    cap, _ = looks(cap, msgspec.structs.replace(FRESH, preempted=2), times=3)
    assert cap.capacity == 30


def test_cap_doubles_again_when_an_engine_was_added() -> None:
    cap = Concurrency(floor=4, capacity=16, last_stats=FRESH, searching=False)
    cap, _ = looks(cap, FRESH)
    assert cap.capacity == 17
    cap, _ = looks(cap, EngineStats(cache_blocks=200))
    assert cap.capacity == 34
    cap, _ = looks(replace(cap, searching=False), FRESH)
    assert cap.capacity == 35, "one that was removed is no reason"


def test_second_cut_waits_until_the_first_has_taken_effect() -> None:
    cap = Concurrency(floor=4, capacity=16, last_stats=FRESH)
    for preempted in range(1, 5):
        cap, _ = cap.observe(msgspec.structs.replace(FRESH, preempted=preempted), num_running=16, limit=64)
    assert cap.capacity == 12
    cap, _ = cap.observe(msgspec.structs.replace(FRESH, preempted=5), num_running=12, limit=64)
    assert cap.capacity == 9


@pytest.mark.parametrize(
    ("stats", "capacity", "words"),
    [
        ({"cache_blocks_used": 97}, 12, "the cache is 97% full"),
        ({"running": 10, "waiting": 6}, 14, "6 requests wait while 10 run"),
        ({"running": 10, "waiting": 1}, 16, ""),
        ({"cache_blocks_used": 90}, 16, ""),
    ],
)
def test_cap_follows_cache_and_queue(stats: dict[str, int], capacity: int, words: str) -> None:
    cap, (said,) = looks(Concurrency(floor=8, capacity=16, last_stats=FRESH), msgspec.structs.replace(FRESH, **stats))
    assert cap.capacity == capacity
    assert words in said


def test_cap_that_is_not_reached_stays() -> None:
    cap, why = Concurrency(floor=4, capacity=16, last_stats=FRESH).observe(FRESH, num_running=15, limit=64)
    assert (cap.capacity, why) == (16, "")


counts = st.integers(0, 200)


@given(
    floor=st.integers(1, 20),
    seen=st.lists(st.tuples(counts, counts, counts, st.integers(0, 100), counts, st.integers(0, 100)), max_size=20),
)
def test_cap_stays_between_one_batch_and_the_lead_and_says_every_change(
    floor: int, seen: list[tuple[int, int, int, int, int, int]]
) -> None:
    cap, preempted = Concurrency(floor=floor, capacity=floor, last_stats=FRESH), 0
    for running, waiting, more, used, num_running, limit in seen:
        preempted += more
        stats = EngineStats(
            running=running, waiting=waiting, preempted=preempted, cache_blocks=100, cache_blocks_used=used
        )
        before = cap.capacity
        cap, why = cap.observe(stats, num_running=num_running, limit=limit)
        assert floor <= cap.capacity <= max(limit, floor)
        if cap.capacity != min(before, max(limit, floor)):
            assert why


GOOD = {"ess": 0.99, "staleness_k3": 1e-4}


def steps(tuner: AgeTuner, metrics: dict[str, float], *, times: int = 1) -> tuple[AgeTuner, list[str]]:
    """The tuning after so many steps that reach the bound."""
    said = []
    for _ in range(times):
        tuner, why = tuner.after_step(metrics, tuner.max_age)
        said += [why] if why else []
    return tuner, said


def test_bound_rises_after_good_steps_that_reached_it_up_to_its_limit() -> None:
    tuner = AgeTuner(settings=AgeTuning(limit=2, patience=3), max_age=1)
    tuner, said = steps(tuner, GOOD, times=3)
    assert tuner.max_age == 2
    assert said == ["max_age 1 → 2: 3 good steps in a row reached it; the last: effective sample size 0.99, KL 0.0001"]
    tuner, said = steps(tuner, GOOD, times=30)
    assert (tuner.max_age, said) == (2, [])


def test_steps_that_do_not_reach_the_bound_do_not_raise_it() -> None:
    tuner = AgeTuner(settings=AgeTuning(patience=2), max_age=2)
    for _ in range(10):
        tuner, _ = tuner.after_step(GOOD, oldest_age=1)
    assert tuner.max_age == 2


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"ess": 0.5, "stale_k3": 0.0}, "effective sample size 0.5 < 0.9"),
        ({"ess": 0.99, "stale_k3": 0.02}, "KL of stale tokens 0.02 > 0.005"),
        ({"ess": 0.99, "stale_k3": 0.02, "staleness_k3": 0.01}, "KL of stale tokens 0.01 > 0.005"),
    ],
)
def test_bad_step_lowers_the_bound_once_and_the_steps_of_the_old_bound_are_not_judged(
    metrics: dict[str, float], words: str
) -> None:
    tuner, said = steps(AgeTuner(settings=AgeTuning(), max_age=3), metrics, times=4)
    assert tuner.max_age == 2
    assert said == [f"max_age 3 → 2: {words}"]
    tuner, _ = steps(tuner, metrics, times=20)
    assert tuner.max_age == 1


def test_steps_without_the_figures_or_without_stale_tokens_move_nothing() -> None:
    tuner = AgeTuner(settings=AgeTuning(patience=1), max_age=2)
    assert tuner.after_step({}, oldest_age=2) == (tuner, "")
    assert tuner.after_step({"ess": 0.1}, oldest_age=0) == (tuner, "")
    assert tuner.after_step({"ess": None, "stale_k3": None}, oldest_age=2) == (tuner, "")


def test_lowered_bound_leaves_older_tokens_what_they_were_promised() -> None:
    state = FlowState(limits=FlowLimits(batch_size=1, max_age=4), version=3)
    state.set_max_age(2)
    assert [state.allowed_age(version) for version in (0, 3, 4, 9)] == [4, 4, 2, 2]
    state.version = 6
    state.set_max_age(1)
    assert [state.allowed_age(version) for version in (3, 4, 6, 7)] == [4, 2, 2, 1]
    state.set_max_age(3)
    assert [state.allowed_age(version) for version in (3, 4, 7)] == [4, 3, 3]
    state.set_max_age(5)
    assert [state.allowed_age(version) for version in (3, 4, 7)] == [5, 5, 5]


def test_lead_follows_a_tuned_bound_unless_it_is_set() -> None:
    limits = FlowLimits(batch_size=1, max_age=4)
    assert limits.run_ahead == 4
    assert replace(limits, lead=2).run_ahead == 2
