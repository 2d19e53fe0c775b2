"""The counters and commits of several engines as those of one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.weights import Interrupt, SwapReport

GAUGES = frozenset({
    *("running", "waiting", "cache_blocks", "cache_blocks_used"),
    *("cache_bytes", "routing_bytes", "pinned_bytes"),
})  # fmt: skip
"""What is so at this moment; the others are counters, which outlive the engine that counted."""


def total(present: Iterable[EngineStats], gone: EngineStats, *, version: int, size: int) -> EngineStats:
    """Sums over the engines that are there and, of the counters, what those that are ``gone`` had come to;
    ``busy_s`` and ``prefill_s`` are means over ``size`` engines.

    >>> now, gone = EngineStats(busy_s=2.0, running=3, steps=5), EngineStats(busy_s=1.0, running=9, steps=1)
    >>> sums = total([now], gone, version=4, size=2)
    >>> sums.version, sums.busy_s, sums.running, sums.steps
    (4, 1.5, 3, 6)
    """
    sums = {
        name: 0 if name in GAUGES else value
        for name, value in msgspec.structs.asdict(gone).items()
        if name != "version"
    }  # fmt: skip
    for each in present:
        for name, value in msgspec.structs.asdict(each).items():
            if name in sums:
                sums[name] += value
    sums["busy_s"] /= size
    sums["prefill_s"] /= size
    return EngineStats(version=version, **sums)


def combined(version: int, mode: Interrupt, reports: Iterable[SwapReport]) -> SwapReport:
    """What a commit of several engines cost: sums of what was lost, and the longest of what took time.

    >>> one = SwapReport(version=3, gap_s=0.1, carried_over=2, restarted=0)
    >>> combined(3, Interrupt.INFLIGHT, [one, one]).carried_over
    4
    """
    each = list(reports)
    return SwapReport(
        version=version,
        gap_s=max((report.gap_s for report in each), default=0.0),
        carried_over=sum(report.carried_over for report in each),
        restarted=sum(report.restarted for report in each),
        mode=mode,
        waited_s=max((report.waited_s for report in each), default=0.0),
        wasted_tokens=sum(report.wasted_tokens for report in each),
        recomputed_tokens=sum(report.recomputed_tokens for report in each),
    )
