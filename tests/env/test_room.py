"""Room for episodes, which comes and goes with machines."""

from __future__ import annotations

import asyncio

from headrace.launch.clients.shift import ResizableSlots


def test_room_that_leaves_while_it_is_free_is_taken_by_nobody() -> None:
    async def main() -> None:
        room = ResizableSlots()
        room.grow(8)
        await room.acquire()
        room.shrink(5)
        await asyncio.gather(room.acquire(), room.acquire())
        assert room.locked()

    asyncio.run(main())


def test_room_that_leaves_while_it_is_taken_is_given_back_with_it() -> None:
    async def main() -> None:
        room = ResizableSlots()
        room.grow(2)
        await asyncio.gather(room.acquire(), room.acquire())
        room.shrink(1)
        room.release()
        assert room.locked()
        room.release()
        assert not room.locked()

    asyncio.run(main())
