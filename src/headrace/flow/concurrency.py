"""How many groups are generated at once, found from what the engine says of itself: ``flow.capacity = "auto"``.

Additive increase, multiplicative decrease (Chiu and Jain 1989), as with the window of a TCP connection: the engine's
cache is the pipe, and a sequence that had to leave it is the packet that was lost.

    sequences were preempted, or the cache is full        cut by a quarter, then wait until the cut has taken effect
    more than half of what runs waits to be admitted      a step down
    the cap is reached, nothing waits, the cache has room a step up; doubled until there was a first sign of pressure
    otherwise                                             stay

The cap never falls below one batch, so that a step can always be made, nor rises above what the lead allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.base.types.messages.controller import EngineStats

FULL = 0.95
"""A cache of which a larger fraction is held by running sequences is full."""
ROOM = 0.85
"""The cap rises only while less than this is held."""
CUT = 0.75
"""What is left of the cap after a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Where the cap stands: data, and one transition."""

    floor: int
    """Groups of one batch: the least."""
    capacity: int
    """Most groups being generated or scored at once, now."""
    seen: EngineStats
    """The engine's counters at the last look."""
    searching: bool = True
    """Whether there was no sign of pressure yet."""

    def observe(self, stats: EngineStats, *, num_running: int, limit: int) -> tuple[Concurrency, str]:
        """The cap after a look at the engine while ``num_running`` groups are generated or scored and the lead allows
        ``limit``; and what was done and why, in words that are empty where the cap stays.

        >>> cap = Concurrency(floor=4, capacity=16, seen=EngineStats())
        >>> cap, why = cap.observe(EngineStats(preempted=3), num_running=16, limit=32)
        >>> cap.capacity, why
        (12, 'capacity 16 → 12 groups: 3 sequences had to leave the cache')
        """
        limit = max(limit, self.floor)
        now = replace(self, seen=stats, capacity=min(self.capacity, limit))
        step = max(1, self.floor // 4)
        in_effect = num_running <= now.capacity
        preempted = stats.preempted - self.seen.preempted
        used = stats.cache_blocks_used / stats.cache_blocks if stats.cache_blocks else 0.0
        if preempted > 0 or used > FULL:
            why = f"{preempted} sequences had to leave the cache" if preempted > 0 else f"the cache is {used:.0%} full"
            cut = int(CUT * now.capacity) if in_effect else now.capacity
            return replace(now, searching=False)._to(cut, limit, why)
        if stats.waiting > stats.running // 2 and stats.running > 0:
            why = f"{stats.waiting} requests wait beside {stats.running} that run"
            return replace(now, searching=False)._to(now.capacity - step if in_effect else now.capacity, limit, why)
        if num_running < now.capacity or stats.waiting or used > ROOM:
            return now, ""
        why = "all of it is in use and nothing waits" + (f" (cache {used:.0%} used)" if stats.cache_blocks else "")
        return now._to(2 * now.capacity if self.searching else now.capacity + step, limit, why)

    def _to(self, capacity: int, limit: int, why: str) -> tuple[Concurrency, str]:
        new = min(limit, max(self.floor, capacity))
        if new == self.capacity:
            return self, ""
        return replace(self, capacity=new), f"capacity {self.capacity} → {new} groups: {why}"
