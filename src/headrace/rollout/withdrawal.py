"""How an episode that runs is told that nobody needs it any more."""

from __future__ import annotations

import asyncio


class Withdrawal:
    """Ends one episode from outside: its request leaves the engine at once, and what was sampled stays with it."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it was withdrawn; empty while it is not."""
        self._scope: asyncio.Timeout | None = None

    def attach(self, scope: asyncio.Timeout) -> None:
        """The episode runs within ``scope``."""
        self._scope = scope

    def withdraw(self, reason: str) -> None:
        """End it; nothing more happens to one whose time is up."""
        self.reason = reason
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
