"""The weight sync over process groups: two ranks of a learner, each with half of the weights, and two engines.

Each version is sent twice: over the transport ``group``, which copies, hashes, sends, stores and verifies; and as bare
bytes over process groups of the same processes. The ratio of the two times shows the cost of the transport. Before and
after each version of a large model, two rates of this machine are measured: of hashing in one thread, and of one
connection. From these rates the planner predicts the time of the version.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.sync.config import Route
from headrace.wings.bench.base import Row, Target, at_most, measure_s
from headrace.wings.bench.engine_peers import PeerProcess, open_worker
from headrace.wings.bench.sync_group_worker import NUM_RANKS
from headrace.wings.bench.sync_worker import DEADLINE_S, SyncPlan
from headrace.wings.plan.catalogue import HostFigures
from headrace.wings.plan.publication import (
    GB,
    EngineUptake,
    PublicationEstimate,
    PublicationRequest,
    estimate_publication,
)

WORKER = "headrace.wings.bench.sync_group_worker"
NUM_ENGINES = 2
PROBE_BYTES = 128 << 20
"""The number of bytes that are hashed to measure the hash rate of this machine."""
CARRIED_BYTES = 512 << 20
"""The number of bytes that all connections together transfer to measure their rate: half the size of a version of 519M
parameters, so that the start of threads and sockets hardly counts."""
PREDICTED_ROUNDS = 7
"""The smallest number of versions whose time is predicted, so that the median does not depend on a single version."""
NO_LIMIT = 1e6
"""A rate that limits nothing, in 10⁹ bytes per second."""


@dataclass(slots=True, kw_only=True)
class GroupMembers:
    """The processes of the benchmark. Each method sends a request to several processes at the same time, and returns
    their answers."""

    ranks: Sequence[PeerProcess]
    """The ranks of the learner."""
    engines: Sequence[PeerProcess]
    """The engines."""
    to: list[str] = field(default_factory=list)
    """The addresses of the engines."""

    def open(self, route: Route) -> None:
        """Open the transport that ``route`` describes in all processes, and store the addresses of the engines."""
        request = {"do": "open", "route": msgspec.to_builtins(route)}
        shared = self.ranks[0].call(request)["shared"]
        for rank in self.ranks[1:]:
            rank.call({**request, "shared": shared})
        self.to = [engine.call(request)["address"] for engine in self.engines]

    def copy_weights(self, version: int) -> list[float]:
        """Change the weights of the ranks, and copy them as ``version``; return the seconds of each rank's copy."""
        request = {"do": "take", "version": version, "slot": version % 2}
        return [answer["exposed_s"] for answer in call_all([(rank, request) for rank in self.ranks])]

    def send(self, version: int, *, again: bool = False) -> list[str]:
        """Announce ``version`` in the ranks, or with ``again`` send it again, and stage it in the engines. Return the
        error of each engine; empty if the version was staged."""
        request = {"do": "announce", "version": version, "slot": version % 2, "to": self.to, "again": again}
        update = call_all([(rank, request) for rank in self.ranks])[0]["update"]
        stage = {"do": "stage", "update": update}
        return [answer["error"] for answer in call_all([(engine, stage) for engine in self.engines])]

    def commit(self, version: int) -> None:
        """Commit ``version`` in the engines."""
        call_all([(engine, {"do": "commit", "version": version}) for engine in self.engines])


def call_all(calls: Sequence[tuple[PeerProcess, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make all ``calls`` (a process, and the request to it) at the same time, and return the answers in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(process.call, request) for process, request in calls]
        return [future.result() for future in futures]


def measure_group(
    directory: Path, plan: SyncPlan, *, name: str, rounds: int, on_progress: Callable[[str], None]
) -> tuple[list[Row], list[Target]]:
    """Send ``rounds`` versions of the weights of ``plan``, called ``name`` in the report, after two versions for which
    memory is allocated, and return the rows and the targets. ``directory`` is an empty directory for files of the
    processes. ``on_progress`` is called with lines of progress."""
    path = directory / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    rows: list[Row] = []
    with ExitStack() as stack:
        ranks = [stack.enter_context(open_worker(f"rank-{n}", path, 1, module=WORKER)) for n in range(NUM_RANKS)]
        engines = [stack.enter_context(open_worker(f"engine-{n}", path, 1, module=WORKER)) for n in range(NUM_ENGINES)]
        members = GroupMembers(ranks=ranks, engines=engines)
        copies = [rank.call({"do": "copy"}) for rank in ranks]
        raw: dict[str, Any] = {"do": "raw", "directory": str(directory / "raw"), "engines": NUM_ENGINES}
        sizes = [int(copied["bytes"]) for copied in copies]
        raw["bytes"] = sizes
        for codec in ("full", "delta"):
            on_progress(f"{name}: group, {codec}, {NUM_RANKS} ranks and {NUM_ENGINES} engines")
            members.open(Route(transport="group", codec=codec, deadline_s=DEADLINE_S))
            # the time of smaller versions depends on the latency of messages, which the planner does not predict
            predicts = codec == "full" and sum(sizes) >= CARRIED_BYTES
            count = max(rounds, PREDICTED_ROUNDS) if predicts else rounds
            found = [_measure_round(members, raw, version, predicts=predicts) for version in range(count + 2)][2:]
            row = {key: statistics.median(one[key] for one in found) for key in found[0]}
            copy_s = statistics.median(copied["copy_s"] for copied in copies)
            row |= {"group by gloo": statistics.median(one["group_s"] / one["gloo_s"] for one in found)}
            row |= {"exposed by copy": row["exposed_s"] / copy_s}
            if predicts:
                ratios = [one["predicted_s"] / one["group_s"] for one in found]
                row |= {"predicted by group": statistics.median(ratios)}
            rows.append({"what": "group", "model": name, "codec": codec, "bytes": sum(sizes), **row})
    full = rows[0]
    missed = f"group {name}: the planner's prediction is off by"
    predicted = full.get("predicted by group")
    return rows, [
        *([] if predicted is None else [at_most(missed, abs(predicted - 1.0), 0.15, "fraction")]),
        at_most(f"group {name}: moved, by gloo's bare bytes", full["group by gloo"], 1.5, "ratio"),
        at_most(f"group {name}: a rank stands still, by a copy of its part", full["exposed by copy"], 1.3, "ratio"),
    ]


def _measure_round(members: GroupMembers, raw: dict[str, Any], version: int, *, predicts: bool) -> dict[str, float]:
    """Send one version over the transport, from its announcement until both engines have staged it, and then the same
    number of bare bytes. Return the seconds of both, and the seconds for which a rank is blocked by its copy. With
    ``predicts``, add the seconds that the planner predicts from rates of this machine, measured directly before and
    after the version. ``members`` are the processes, and ``raw`` is the request to send bare bytes."""
    clock, processes = RealClock(), (*members.ranks, *members.engines)
    exposed_s = max(members.copy_weights(version))
    hosts = [_measure_host(members, raw)] if predicts else []
    start_s = clock.now()
    errors = members.send(version)
    group_s = clock.now() - start_s
    if any(errors):
        raise RuntimeError(f"version {version} was not staged: {errors}")
    hosts += [_measure_host(members, raw)] if predicts else []
    members.commit(version)
    gloo_s = measure_s(lambda: call_all([(process, raw) for process in processes]))
    found = {"group_s": group_s, "gloo_s": gloo_s, "exposed_s": exposed_s}
    if predicts:
        found["predicted_s"] = statistics.mean(_predict(host, sum(raw["bytes"])).travel_s for host in hosts)
        found["hash_gb_s"] = statistics.mean(host.hash_gb_s for host in hosts)
        found["stream_gb_s"] = statistics.mean(host.stream_gb_s for host in hosts)
    return found


def _measure_host(members: GroupMembers, raw: dict[str, Any]) -> HostFigures:
    """Return the rates of this machine on which the time of a version between its processes depends: of hashing, while
    both engines hash at once, and of one connection, while all connections are busy. ``members`` are the processes, and
    ``raw`` is the request to send bare bytes."""
    hashed = call_all([(engine, {"do": "hash", "bytes": PROBE_BYTES}) for engine in members.engines])
    host = HostFigures(
        cores=num_cores(),
        memory_gb_s=NO_LIMIT, link_gb_s=NO_LIMIT, links=1,  # within one machine, the rates of its threads are the limit
        stream_gb_s=1.0,
        hash_gb_s=PROBE_BYTES / statistics.median(each["hash_s"] for each in hashed) / GB,
        copy_gb_s=NO_LIMIT, down_gb_s=NO_LIMIT, up_gb_s=NO_LIMIT, load_gb_s=NO_LIMIT, load_most_gb_s=NO_LIMIT,
    )  # fmt: skip
    probe = {**raw, "bytes": [CARRIED_BYTES // NUM_RANKS] * NUM_RANKS}
    moved_s = measure_s(lambda: call_all([(process, probe) for process in (*members.ranks, *members.engines)]))
    # the prediction assumes 1 GB/s for a connection, so that the ratio of the times is the rate in GB/s
    (broadcast,) = (phase for phase in _predict(host, CARRIED_BYTES).travel if phase.name == "broadcast")
    return msgspec.structs.replace(host, stream_gb_s=broadcast.seconds / moved_s)


def _predict(host: HostFigures, num_bytes: int) -> PublicationEstimate:
    """Return the planner's prediction for a version of ``num_bytes`` bytes on a machine with the figures of
    ``host``."""
    request = PublicationRequest(
        image_bytes=num_bytes,
        sent_bytes=num_bytes,
        ranks=[0] * NUM_RANKS,
        engines=[0] * NUM_ENGINES,
        uptake=EngineUptake.POINTERS,
        on_accelerator=False,
    )
    return estimate_publication(request, host)
