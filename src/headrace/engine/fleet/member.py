"""The record of one engine of a fleet (a *member*), the record of which engine served which request, and the statistics
and commit reports of all engines together. A fleet is several engines behind the interface of one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import DeadlineError, RequestError
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.engine.base import Engine, SiblingSource

A = TypeVar("A")

TICK_S = 1.0
"""The interval at which the engines are checked for silence, in seconds."""
MAX_ROUTES = 65_536
"""The number of newest requests whose engine is recorded, so that they can be forked."""


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """The fleet's record of one engine: the client by which it is reached, its versions, and whether it is alive."""

    name: str
    engine: Engine
    address: str
    """The address to which its weights are sent; empty where the engine fetches them."""
    version: int = NOT_SAMPLED
    """The version in use."""
    staged_version: int = NOT_SAMPLED
    """The newest version that the engine has staged."""
    missed_reason: str = ""
    """The reason why the newest version cannot reach the engine; empty if the version has reached it or still may."""
    has_left: bool = False
    """Whether the engine has left the fleet."""
    leaving: bool = False
    """Whether the engine is being removed: it gets no new requests, and commits new weights as the others do."""
    last_stats: EngineStats = field(default_factory=EngineStats)
    """The statistics that the engine reported last."""
    silent_s: float = 0.0
    """The seconds since the last report, counted in ticks, while the engine had sequences."""
    siblings: SiblingSource | None = field(init=False)
    """The engine, if it samples several answers to one prompt in one call; ``None`` otherwise."""

    def __post_init__(self) -> None:
        """Find out once whether the engine is a :class:`SiblingSource`: Python takes long to check a contract."""
        self.siblings = self.engine if isinstance(self.engine, SiblingSource) else None

    def check_silence(self, load: int) -> None:
        """Update ``silent_s``: for how long the engine, while it has sequences, has reported no new statistics. Called
        once a tick; ``load`` is the number of its sequences."""
        latest = self.engine.stats()
        self.silent_s = self.silent_s + TICK_S if latest is self.last_stats and load else 0.0
        self.last_stats = latest

    def silence_error(self, load: int) -> DeadlineError:
        """Return the error for an engine that has been silent for too long; ``load`` is the number of its
        sequences."""
        return DeadlineError(
            f"{self.name} has said nothing for {self.silent_s:g} s and has {load} sequences",
            remedy="look at its log in the run directory; raise launch.engine_silence_s if its steps take long",
        )


class StickyRoutes:
    """A record of which engine served which request, and of the request's number on that engine. A fork, which
    continues an earlier request with its cache, must go to the same engine."""

    def __init__(self) -> None:
        """Create an empty record."""
        self._routes: OrderedDict[int, tuple[Member, int]] = OrderedDict()
        """The engine of each of the last requests, and the request's number there, by the fleet's number."""

    def record(self, request: int, member: Member, number: int) -> None:
        """Record that ``member`` serves the request with the fleet's number ``request`` under its own ``number``."""
        self._routes[request] = (member, number)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    def find_parent(self, fork: ForkRequest) -> tuple[Member, ForkRequest]:
        """Return the engine that served the parent of ``fork``, the only one that can serve the fork, and the fork with
        the parent's number on that engine. Raises :class:`~headrace.base.errors.RequestError` if the parent is not
        recorded any more, or its engine has left or lacks the newest weights."""
        member, parent = self._routes.get(fork.parent, (None, -1))
        if member is None:
            where = "is not among the last requests of this fleet"
        elif member.has_left:
            where = f"was with {member.name}, which is gone"
        elif member.leaving:
            where = f"was with {member.name}, which is being removed"
        elif member.missed_reason:
            where = f"was with {member.name}, which has not the newest weights"
        else:
            return member, msgspec.structs.replace(fork, parent=parent)
        problem = f"a fork of request {fork.parent}, which {where}"
        raise RequestError(problem, remedy="send its tokens as a prompt")


GAUGES = frozenset({
    *("running", "waiting", "cache_blocks", "cache_blocks_used"),
    *("cache_bytes", "routing_bytes", "pinned_bytes"),
})  # fmt: skip
"""The fields of the statistics that describe the present moment. All other fields are counters: the fleet keeps their
values when the engine leaves."""


def total_stats(present: Iterable[EngineStats], departed: EngineStats, *, version: int, size: int) -> EngineStats:
    """Return the statistics of a whole fleet whose version is ``version``: the sums over the ``present`` engines and,
    for counters, over ``departed``, the sums of the engines that have left. ``busy_s`` and ``prefill_s``, in seconds,
    are means over ``size`` engines.

    >>> now, departed = EngineStats(busy_s=2.0, running=3, steps=5), EngineStats(busy_s=1.0, running=9, steps=1)
    >>> sums = total_stats([now], departed, version=4, size=2)
    >>> sums.version, sums.busy_s, sums.running, sums.steps
    (4, 1.5, 3, 6)
    """
    kept = msgspec.structs.replace(departed, **dict.fromkeys(GAUGES, 0))
    columns = zip(*map(msgspec.structs.astuple, [kept, *present]), strict=True)
    sums: dict[str, Any] = dict(zip(EngineStats.__struct_fields__, map(sum, columns), strict=True))
    sums["busy_s"] /= size
    sums["prefill_s"] /= size
    return EngineStats(**{**sums, "version": version})


class FleetCounters:
    """The statistics of a fleet: those of its present engines, together with the counters of the engines that have
    left. ``size`` is the number of engines over which times are averaged."""

    def __init__(self, size: int) -> None:
        """Count for a fleet of ``size`` engines; none has left."""
        self.size = size
        self._departed = EngineStats()
        """The sums of the statistics of all engines that have left."""

    def record_departure(self, stats: EngineStats) -> None:
        """Keep the counters of an engine that leaves, whose last statistics are ``stats``."""
        self._departed = total_stats([stats], self._departed, version=NOT_SAMPLED, size=1)

    def resize(self, size: int, present: Iterable[EngineStats]) -> None:
        """Average over ``size`` engines from now on. The means that have been reported so far stay as they are, so
        that they never decrease. ``present`` has the statistics of the engines that are present."""
        engines = list(present)
        before = self.total(engines, NOT_SAMPLED)
        self.size = size
        after = self.total(engines, NOT_SAMPLED)
        self._departed = msgspec.structs.replace(
            self._departed,
            busy_s=self._departed.busy_s + size * (before.busy_s - after.busy_s),
            prefill_s=self._departed.prefill_s + size * (before.prefill_s - after.prefill_s),
        )

    def total(self, present: Iterable[EngineStats], version: int) -> EngineStats:
        """Return the statistics of the whole fleet, whose ``present`` engines have these; it is the fleet of
        ``version``."""
        return total_stats(present, self._departed, version=version, size=self.size)


async def gather_all(work: Iterable[Awaitable[A]]) -> list[A]:
    """Run all of ``work`` at the same time and wait until each has ended. Return the results in order, or raise the
    first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def combine_reports(version: int, mode: Interrupt, reports: Iterable[SwapReport]) -> SwapReport:
    """Return one report of the commit of ``version`` in the mode ``mode`` on several engines, from each engine's
    report: the sums of all counts of sequences and tokens, and the longest of the times.

    >>> one = SwapReport(version=3, gap_s=0.1, carried_over=2, restarted=0)
    >>> combine_reports(3, Interrupt.INFLIGHT, [one, one]).carried_over
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
