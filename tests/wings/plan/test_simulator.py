"""Simulated runs by themselves: their books, their laws, and that nothing in them waits for ever."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.base.types.observation import Bound
from headrace.base.types.weights import Interrupt
from headrace.flow import FlowConfig
from headrace.run.observe.verdict import judge
from headrace.wings.plan import Simulation, World
from headrace.wings.plan.costs import ConstantRate, FailureCost, Linear, Roofline, SyncCost, TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.spread import ConstantSpread, Lognormal, Pareto, Uniform
from headrace.wings.plan.workload import Workload
from tests.wings.plan.test_against_controller import POLICIES

SPREADS = [ConstantSpread(value=40), Uniform(high=90), Lognormal(mean=40, cv=1.0), Pareto(mean=40, alpha=1.3, cap=4000)]


def world(**changes: Any) -> World:
    flow = {"groups_per_step": 4, "group_size": 4, **changes.pop("flow", {"max_age": 2})}
    base = World(
        flow=FlowConfig(**flow),
        steps=8,
        engine=Linear(fixed_s=0.01, sequence_s=0.0002, context_s=1e-7, prompt_token_s=1e-5),
        num_engines=3,
        max_sequences=16,
        max_new_tokens=400,
        learner=TrainingRate(tok_s=2000),
        sync=SyncCost(snapshot_s=0.05, travel_s=0.2, gap_s=0.02),
        workload=Workload(prompt_tokens=20, answer_tokens=Lognormal(mean=40, cv=1.0)),
    )
    return replace(base, **changes)


def simulate(given: World, seed: int = 0) -> SimulatedOutcome:
    return Simulation(given, seed=seed, check=True).run()


@settings(max_examples=25)
@given(data=st.data())
def test_books_and_bounds_hold_at_every_event_of_any_run(data: st.DataObject) -> None:
    policy = dict(POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))])
    if data.draw(st.booleans()):
        policy["filters"] = ["zero_variance", {"kind": "length", "max_tokens": 80}]
    if policy.get("policy") not in ("synchronous", "one_ahead") and data.draw(st.booleans()):
        policy["capacity"] = data.draw(st.sampled_from(["auto", 5]))
    many = data.draw(st.booleans())
    workload = Workload(
        prompt_tokens=20,
        answer_tokens=data.draw(st.sampled_from(SPREADS)),
        turns=Uniform(high=4) if many else 1,
        observed_tokens=10 if many else 0,
        turn_s=data.draw(st.sampled_from([0, Lognormal(mean=0.5)])),
        reward_s=data.draw(st.sampled_from([0, 0.3])),
        reward_slots=data.draw(st.sampled_from([None, 2])),
        failed_share=data.draw(st.sampled_from([0.0, 0.1])),
    )
    given_world = world(
        flow=policy,
        steps=4,
        endless=data.draw(st.booleans()),
        workload=workload,
        cache_tokens=data.draw(st.sampled_from([float("inf"), 4000.0])),
        sync=SyncCost(
            snapshot_s=0.05,
            travel_s=0.2,
            gap_s=0.02,
            interrupt=data.draw(st.sampled_from(list(Interrupt))),
            rolling=data.draw(st.sampled_from([None, 2])),
        ),
        failures=data.draw(
            st.sampled_from(
                [
                    FailureCost(),
                    FailureCost(engine_mtbf_s=3.0, engine_restart_s=1.0, learner_mtbf_s=20.0, learner_restart_s=2.0),
                ]
            )
        ),
    )
    outcome = simulate(given_world, seed=data.draw(st.integers(0, 1000)))
    assert outcome.max_age <= given_world.flow.largest_age
    assert len(outcome.steps) >= 4


def test_same_world_and_seed_give_the_same_run_and_another_seed_another() -> None:
    assert simulate(world()) == simulate(world())
    assert simulate(world()) != simulate(world(), seed=1)


def test_trained_lengths_are_those_submitted_under_pacing_and_shorter_where_stale_groups_are_rejected() -> None:
    long = Workload(prompt_tokens=1, answer_tokens=Lognormal(mean=60, cv=1.0))
    sizes = {"groups_per_step": 8, "group_size": 2}
    paced = simulate(world(flow={**sizes, "max_age": 1}, steps=60, workload=long))
    reject = {**sizes, "policy": "unbounded", "max_age": 0, "lead": 6}
    rejected = simulate(world(flow=reject, steps=60, workload=long))
    mean = [sum(step.tokens for step in run.steps) / (60 * 16) for run in (paced, rejected)]
    assert mean[0] == pytest.approx(59, rel=0.1)
    assert mean[1] < 0.8 * mean[0]
    assert rejected.dropped_groups["stale"] > 0


def test_batch_of_equal_answers_takes_the_time_of_the_formula() -> None:
    roof = Roofline(weight_bytes=2e9, kv_bytes=1e5, flop_per_token=2e9, bandwidth=1e12, flops=1e14, overhead_s=0.001)
    given_world = world(
        flow={"policy": "synchronous", "max_age": 0, "groups_per_step": 4, "group_size": 4},
        steps=1, num_engines=1, engine=roof, sync=SyncCost(), learner=TrainingRate(tok_s=float("inf")),
        workload=Workload(prompt_tokens=100, answer_tokens=50),
    )  # fmt: skip
    prefill_s = 4 * 100 * 2e9 / 1e14  # siblings share their prompt
    decode_s = sum((2e9 + 16 * (100 + token + 0.5) * 1e5) / 1e12 + 0.001 for token in range(50))
    assert simulate(given_world).seconds == pytest.approx(prefill_s + decode_s, rel=1e-3)


def test_waits_of_engines_and_learner_are_those_of_their_traces() -> None:
    turns = simulate(world(flow={"policy": "synchronous"})).account(0)
    assert turns.learner_waits_s["engine"] == pytest.approx(turns.engine_busy_s)
    assert turns.engine_waits_s["learner"] == pytest.approx(turns.learner_busy_s)
    assert judge(turns).bound is Bound.TURNS
    ahead = simulate(world()).account(0)
    for busy_s, waits_s in ((ahead.learner_busy_s, ahead.learner_waits_s), (ahead.engine_busy_s, ahead.engine_waits_s)):
        assert busy_s + sum(waits_s.values()) == pytest.approx(ahead.seconds)
    assert ahead.learner_waits_s.get("engine", 0.0) < ahead.engine_busy_s, "part of it while the learner works"


def test_draining_costs_more_than_committing_in_flight_and_starting_again_wastes_tokens() -> None:
    by_mode = {
        mode: simulate(
            world(
                steps=24, num_engines=1, max_sequences=64,
                sync=SyncCost(travel_s=0.1, gap_s=0.01, interrupt=mode), learner=TrainingRate(tok_s=20_000),
            )
        )
        for mode in (Interrupt.INFLIGHT, Interrupt.DRAIN, Interrupt.ABORT_RETRY)
    }  # fmt: skip
    assert by_mode[Interrupt.DRAIN].tok_s < by_mode[Interrupt.INFLIGHT].tok_s
    assert by_mode[Interrupt.ABORT_RETRY].tok_s < by_mode[Interrupt.INFLIGHT].tok_s
    assert by_mode[Interrupt.ABORT_RETRY].wasted_tokens["weight_update"] > 0
    assert by_mode[Interrupt.DRAIN].wasted_tokens == by_mode[Interrupt.INFLIGHT].wasted_tokens == {}


def test_small_cache_preempts_and_slows_down_and_one_too_small_is_refused() -> None:
    equal = Workload(prompt_tokens=20, answer_tokens=40)
    fast = world(num_engines=1, max_sequences=64, learner=TrainingRate(tok_s=50_000), sync=SyncCost(), workload=equal)
    wide, narrow = simulate(fast), simulate(replace(fast, cache_tokens=800.0))
    assert wide.preempted == 0 < narrow.preempted
    assert narrow.tok_s < 0.9 * wide.tok_s
    with pytest.raises(ConfigError, match="does not fit the cache of an engine, which holds 60"):
        simulate(world(cache_tokens=60.0))


def test_engines_that_die_cost_time_and_no_token() -> None:
    fast = world(steps=20, learner=TrainingRate(tok_s=50_000))
    sound = simulate(fast)
    failing = simulate(replace(fast, failures=FailureCost(engine_mtbf_s=4.0, engine_restart_s=2.0)))
    assert failing.seconds > sound.seconds
    assert failing.wasted_tokens == {}


def test_redundant_episodes_are_withdrawn_and_counted() -> None:
    outcome = simulate(world(flow={"max_age": 2, "filters": [{"kind": "redundancy", "keep": 3}]}))
    assert outcome.wasted_tokens["redundant"] > 0


def test_rate_of_a_constant_engine_does_not_depend_on_the_batch() -> None:
    flow = {"policy": "synchronous", "max_age": 0}
    few, many = (
        simulate(world(flow=flow, num_engines=1, max_sequences=most, engine=ConstantRate(tok_s=500), sync=SyncCost()))
        for most in (2, 16)
    )
    assert few.tok_s == pytest.approx(many.tok_s, rel=0.02)
