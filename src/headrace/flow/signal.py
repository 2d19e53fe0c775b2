"""A bell: those who wait are woken when something has changed, and look for themselves."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes every waiter at each :meth:`ring`. Check the state, then wait; never the other way round."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Something has changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Until the next ring."""
        await self._event.wait()
