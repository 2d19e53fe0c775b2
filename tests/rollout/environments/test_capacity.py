"""How many episodes may be under way: that changes as machines join and leave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from headrace.launch.clients.pool import Capacity


def test_capacity_that_leaves_while_it_is_free_is_taken_by_no_call() -> None:
    async def main() -> None:
        capacity = Capacity()
        capacity.add(8)
        async with capacity.reserve():
            capacity.add(-5)
            async with capacity.reserve(), capacity.reserve():
                assert capacity.free == 0

    asyncio.run(main())


def test_capacity_that_leaves_while_it_is_taken_is_given_back_with_it() -> None:
    async def main() -> None:
        capacity = Capacity()
        capacity.add(2)
        async with AsyncExitStack() as second:
            async with capacity.reserve():
                await second.enter_async_context(capacity.reserve())
                capacity.add(-1)
                assert capacity.free == -1
            assert capacity.free == 0
        assert capacity.free == 1

    asyncio.run(main())


def test_a_call_that_is_made_again_gets_capacity_before_those_that_have_waited_longer() -> None:
    async def main() -> None:
        capacity, order = Capacity(), list[str]()

        async def call(name: str, *, first: bool = False) -> None:
            async with capacity.reserve(first=first):
                order.append(name)

        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(call(name))
            group.create_task(call("again", first=True))
            await asyncio.sleep(0)
            assert not order
            capacity.add(1)
        assert order == ["again", "a", "b"]
        assert capacity.free == 1

    asyncio.run(main())


def test_a_call_that_is_given_up_as_its_turn_comes_gives_the_capacity_back() -> None:
    async def main() -> None:
        capacity = Capacity()

        async def call() -> None:
            async with capacity.reserve():
                raise AssertionError("it was given up before")

        waiting = asyncio.create_task(call())
        await asyncio.sleep(0)
        capacity.add(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert capacity.free == 1

    asyncio.run(main())
