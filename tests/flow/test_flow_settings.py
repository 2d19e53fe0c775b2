"""Settings that cannot work are refused with name, value, reason and remedy."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from headrace.clock import run_virtual
from headrace.flow import FlowConfig
from headrace.flow.signal import Signal


@pytest.mark.parametrize(
    ("values", "words", "remedy"),
    [
        ({"lead": 2, "max_age": 1}, "flow.lead=2 is more than flow.max_age=1", "flow.lead <= 1"),
        ({"capacity": 8, "groups_per_step": 16}, "flow.capacity=8 is smaller than one batch", "capacity >= 16"),
        ({"min_episodes": 5, "group_size": 4}, "flow.min_episodes=5 is more than flow.group_size=4", "<= 4"),
    ],
)
def test_sizes_that_cannot_work_are_refused(values: dict[str, int], words: str, remedy: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:  # what loads a run file takes the record's error out
        FlowConfig(**values)
    assert remedy in str(refused.value)


def test_lead_is_the_bound_where_it_is_not_set() -> None:
    assert FlowConfig(max_age=3).effective_lead == 3
    assert FlowConfig(max_age=3, lead=0).effective_lead == 0


def test_every_waiter_is_woken_and_only_by_a_ring_that_comes_after() -> None:
    async def main() -> list[str]:
        bell, log = Signal(), []

        async def waiter(name: str) -> None:
            await bell.wait()
            log.append(name)

        bell.ring()  # nobody waits yet: it is no promise for later
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(waiter(name))
            await asyncio.sleep(1)
            assert log == []
            bell.ring()
            bell.ring()
        return log

    assert run_virtual(main()) == ["a", "b"]


def test_ring_between_a_look_and_the_wait_cannot_be_lost() -> None:
    """The loops look at the state and wait without yielding in between: a ring wakes them or comes before the look."""

    async def main() -> int:
        bell, state, seen = Signal(), [0], 0

        async def writer() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
                state[0] += 1
                bell.ring()

        async with asyncio.TaskGroup() as group:
            group.create_task(writer())
            while seen < 100:
                while seen == state[0]:
                    await bell.wait()
                seen = state[0]
        return seen

    assert run_virtual(main()) == 100
