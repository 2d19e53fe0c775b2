"""Settings that cannot work are refused with name, value, reason and remedy."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from headrace.base.clock import run_virtual
from headrace.flow import FlowConfig
from headrace.flow.flow import Signal
from headrace.flow.state import FlowLimits


@pytest.mark.parametrize(
    ("values", "words", "remedy"),
    [
        ({"lead": 2, "max_age": 1}, "flow.lead=2 is more than flow.max_age=1", "flow.lead <= 1"),
        ({"capacity": 8, "groups_per_step": 16}, "flow.capacity=8 is smaller than one batch", "capacity >= 16"),
        (
            {"policy": "synchronous", "max_age": 1},
            "flow.max_age=1 does not fit flow.policy='synchronous'",
            "leave flow.max",
        ),
        ({"policy": "one_ahead", "max_age": 3}, "flow.max_age=3 does not fit flow.policy='one_ahead'", "bounded"),
        ({"policy": "one_ahead", "capacity": 16}, "flow.capacity=16 does not fit", "leave flow.capacity out"),
        ({"policy": "windowed", "order": "strict"}, "flow.order='strict' does not fit", "leave flow.order out"),
        ({"policy": {"kind": "windowed", "window": 5}}, "flow.policy.window=5 never acts", "flow.policy.window <= 3"),
        ({"policy": {"kind": "unbounded", "stale": "wait", "per": "token"}}, "per='token' has no effect", "'reject'"),
        ({"policy": {"kind": "unbounded", "stale": "wait"}, "order": "strict"}, "not due", "ready_first"),
        ({"max_age": "auto", "policy": {"kind": "unbounded", "per": "token"}}, "not mask the same tokens", "a number"),
        ({"age_tuning": {"limit": 8}}, "flow.age_tuning has no effect with flow.max_age=1", "flow.max_age = 'auto'"),
        ({"max_age": "auto", "lead": 5}, "flow.lead=5 is more than flow.max_age=4", "flow.lead <= 4"),
        ({"max_age": 0, "capacity": "auto"}, "flow.capacity='auto' has no effect", "raise flow.max_age"),
        ({"max_age": "auto", "age_tuning": {"start": 5}}, "age_tuning.start=5 is more than", "start <= 4"),
        ({"min_episodes": 5, "group_size": 4}, "flow.min_episodes=5 is more than flow.group_size=4", "<= 4"),
        ({"min_episodes": 2, "group_size": 1}, "flow.min_episodes=2 is more than flow.group_size=1", "<= 1"),
        ({"group_size": 1, "filters": ["zero_variance"]}, "a group of one has nothing to compare", "leave it out"),
        ({"group_size": 1, "filters": ["dynamic_sampling"]}, "leave no room", "raise flow.group_size"),
    ],
)
def test_sizes_that_cannot_work_are_refused(values: dict[str, int], words: str, remedy: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:  # what loads a run file takes the record's error out
        FlowConfig(**values)
    assert remedy in str(refused.value)


def test_group_of_one_is_whole_with_one_episode() -> None:
    assert FlowConfig(group_size=1).min_episodes == 1
    assert FlowConfig(group_size=4).min_episodes == 2
    assert FlowConfig(**FlowConfig(group_size=1).model_dump(mode="json")) == FlowConfig(group_size=1)


def test_lead_is_the_bound_where_it_is_not_set() -> None:
    assert FlowConfig(max_age=3).effective_lead == 3
    assert FlowConfig(max_age=3, lead=0).effective_lead == 0


def test_name_of_a_policy_stands_for_its_table_and_fills_in_what_it_fixes() -> None:
    whole = FlowConfig(policy={"kind": "one_ahead"})
    assert FlowConfig(policy="one_ahead") == whole
    assert (whole.max_age, whole.lead, whole.order) == (1, 1, "strict")
    assert FlowConfig(policy="synchronous").largest_age == 0
    assert FlowConfig(policy="unbounded", lead=9).effective_lead == 9
    for config in (whole, FlowConfig(max_age="auto", capacity="auto"), FlowConfig(policy="windowed", max_age=2)):
        assert FlowConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize("policy", ["Bounded", "buonded", 3])
def test_policy_that_does_not_exist_is_refused(policy: object) -> None:
    with pytest.raises(ValidationError, match="policy"):
        FlowConfig(policy=policy)


def test_limits_of_a_run_come_from_the_settings() -> None:
    config = FlowConfig(groups_per_step=4, max_age="auto", lead=2, capacity="auto", order="strict")
    assert config.limits() == FlowLimits(batch_size=4, max_age=1, lead=2, capacity=4, strict=True)
    assert FlowConfig(max_age=2).limits() == FlowLimits(batch_size=16, max_age=2)


def test_every_waiter_is_woken_and_only_by_a_ring_that_comes_after() -> None:
    async def main() -> list[str]:
        signal, log = Signal(), []

        async def waiter(name: str) -> None:
            await signal.wait()
            log.append(name)

        signal.notify()  # nobody waits yet: it is no promise for later
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(waiter(name))
            await asyncio.sleep(1)
            assert log == []
            signal.notify()
            signal.notify()
        return log

    assert run_virtual(main()) == ["a", "b"]


def test_ring_between_a_look_and_the_wait_cannot_be_lost() -> None:
    """The loops look at the state and wait without yielding in between: a ring wakes them or comes before the look."""

    async def main() -> int:
        signal, state, seen = Signal(), [0], 0

        async def writer() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
                state[0] += 1
                signal.notify()

        async with asyncio.TaskGroup() as group:
            group.create_task(writer())
            while seen < 100:
                while seen == state[0]:
                    await signal.wait()
                seen = state[0]
        return seen

    assert run_virtual(main()) == 100
