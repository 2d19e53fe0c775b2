"""Counters and commit reports of several engines, combined into those of one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.weights import Interrupt, SwapReport

GAUGES = frozenset({
    *("running", "waiting", "cache_blocks", "cache_blocks_used"),
    *("cache_bytes", "routing_bytes", "pinned_bytes"),
})  # fmt: skip
"""The fields that describe the present moment. The others are counters, which are kept when their engine leaves."""


def total(present: Iterable[EngineStats], gone: EngineStats, *, version: int, size: int) -> EngineStats:
    """Return the sums over the ``present`` engines and, for counters, the last values of those that are ``gone``.
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
    """Return one report of a commit on several engines: sums of the lost tokens and sequences, and the longest of the
    times.

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
