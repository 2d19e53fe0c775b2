"""The pacing keeps its promises under every order of events: thousands of histories, crashes included."""

from __future__ import annotations

import random

import pytest

from headrace.base.types.group import GroupState
from headrace.flow import FlowConfig
from headrace.flow.policies import Bounded
from headrace.flow.state import FlowLimits, FlowState
from tests.flow.driver import Driver

HISTORIES = 80
"""Of each of the settings below."""
BOUNDS = [(max_age, lead) for max_age in range(4) for lead in range(max_age + 1)]
ORDERS = ("strict", "ready_first")


def settings(max_age: int, lead: int, order: str, **changes: int | None) -> FlowConfig:
    values = {"groups_per_step": 2, "group_size": 2, "max_age": max_age, "lead": lead, "order": order, **changes}
    return FlowConfig(**values)


def histories(config: FlowConfig, count: int, *, steps: int, events: int) -> list[Driver]:
    drivers = []
    for seed in range(count):
        rng = random.Random(f"{config!r}/{seed}")
        driver = Driver(config, steps=steps, rng=rng)
        driver.random_events(rng.randrange(events))
        driver.finish()
        driver.check_end()
        drivers.append(driver)
    return drivers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(("max_age", "lead"), BOUNDS)
def test_bound_and_books_hold_and_the_last_step_comes_in_any_order_of_events(
    max_age: int, lead: int, capacity: int | None, order: str
) -> None:
    config = settings(max_age, lead, order, capacity=capacity)
    drivers = histories(config, HISTORIES, steps=5, events=90)
    oldest = max(driver.max_age for driver in drivers)
    assert oldest <= max_age
    if lead == max_age and capacity is None:
        assert oldest == max_age, "the histories never come near the bound: they prove nothing"


@pytest.mark.parametrize("order", ORDERS)
def test_larger_batches_and_more_crashes_change_nothing(order: str) -> None:
    histories(settings(2, 2, order, groups_per_step=3, group_size=3), 40, steps=6, events=300)
    histories(settings(3, 1, order, groups_per_step=1), 80, steps=9, events=300)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("max_age", "lead"), BOUNDS)
def test_bound_and_books_hold_in_a_long_soak(max_age: int, lead: int, order: str) -> None:
    for groups_per_step in (1, 2, 4):
        config = settings(max_age, lead, order, groups_per_step=groups_per_step, group_size=3)
        histories(config, 400, steps=8, events=400)


@pytest.mark.parametrize("order", ORDERS)
def test_without_lead_nothing_runs_while_a_batch_is_trained(order: str) -> None:
    config = settings(3, 0, order)
    for driver in histories(config, 50, steps=5, events=1):
        assert driver.overlaps == 0
        assert driver.max_age == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_lead_of_one_batch_generates_while_a_batch_is_trained(order: str) -> None:
    overlaps = [driver.overlaps for driver in histories(settings(1, 1, order), 50, steps=6, events=1)]
    assert sum(overlaps) > 50


def admitted(state: FlowState, policy: Bounded) -> list[int]:
    numbers = [state.submit() for _ in range(policy.admit(state))]
    for number in numbers:
        state.move(number, GroupState.ADMITTED)
    return numbers


def make_ready(state: FlowState, numbers: list[int]) -> None:
    for number in numbers:
        for place in (GroupState.RUNNING, GroupState.SCORED, GroupState.READY):
            state.move(number, place)


def take(state: FlowState, policy: Bounded) -> tuple[int, ...] | None:
    selection = policy.select(state)
    if not selection.take:
        return None
    for number in selection.take:
        state.move(number, GroupState.TAKEN)
    state.next_step += 1
    return selection.take


def test_taken_group_keeps_its_slot_until_the_weights_are_committed() -> None:
    policy, state = Bounded(), FlowState(limits=FlowLimits(batch_size=2, max_age=0, lead=0))
    numbers = admitted(state, policy)
    make_ready(state, numbers)
    assert take(state, policy) == (0, 1)
    assert policy.admit(state) == 0
    for number in numbers:
        state.move(number, GroupState.TRAINED)
    assert policy.admit(state) == 0
    for number in numbers:
        state.move(number, GroupState.RELEASED)
    assert policy.admit(state) == 2


def test_lead_admits_that_many_batches_ahead() -> None:
    for lead in range(4):
        state = FlowState(limits=FlowLimits(batch_size=3, max_age=3, lead=lead))
        assert Bounded().admit(state) == 3 * (lead + 1)


def test_capacity_limits_what_runs_and_not_what_is_ready() -> None:
    policy, state = Bounded(), FlowState(limits=FlowLimits(batch_size=2, max_age=3, lead=3, capacity=3))
    numbers = admitted(state, policy)
    assert len(numbers) == 3
    assert policy.admit(state) == 0
    make_ready(state, numbers[:2])
    assert policy.admit(state) == 2


def test_ready_first_lets_a_straggler_be_overtaken_until_it_is_due() -> None:
    policy, state = Bounded(), FlowState(limits=FlowLimits(batch_size=1, max_age=2, lead=2))
    assert admitted(state, policy) == [0, 1, 2]
    make_ready(state, [1, 2])
    assert take(state, policy) == (1,)
    assert take(state, policy) == (2,)
    assert not policy.select(state).take
    make_ready(state, [0])
    assert take(state, policy) == (0,)


def test_batch_waits_where_a_straggler_would_otherwise_miss_its_bound() -> None:
    policy, state = Bounded(), FlowState(limits=FlowLimits(batch_size=1, max_age=0, lead=0))
    assert admitted(state, policy) == [0]
    other = state.submit()
    state.move(other, GroupState.ADMITTED)  # more than pacing would admit
    make_ready(state, [other])
    assert not policy.select(state).take


def test_strict_order_waits_for_the_group_that_was_admitted_first() -> None:
    policy, state = Bounded(), FlowState(limits=FlowLimits(batch_size=1, max_age=2, lead=2, strict=True))
    assert admitted(state, policy) == [0, 1, 2]
    make_ready(state, [1, 2])
    assert not policy.select(state).take
    make_ready(state, [0])
    assert [take(state, policy) for _ in range(3)] == [(0,), (1,), (2,)]
