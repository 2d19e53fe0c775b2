"""The weight sync: every transport with every codec between two processes, and the commit gap. A *transport* sends
weights from the learner to an engine; a *codec* defines what is sent of a version, such as all weights or only their
changes.

For each transport and codec, several versions are sent, in each of which one weight in thirty has changed. Four
durations are measured: the time for which the learner is blocked (compared with one copy of the same bytes in memory),
the time in which it then hashes, encodes and sends, the time in which the engine's side stages, and the commit. Commit
gaps are also measured in engines that decode 32 sequences. Broadcasts in buckets are compared with broadcasts of one
tensor after the other.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.base.clock import RealClock
from headrace.base.environ import shared_memory_root
from headrace.base.types.weights import WeightUpdate
from headrace.models.tiny import TinySpec, make_tiny
from headrace.sync.codecs import CODECS
from headrace.sync.config import TRANSPORTS, Route, RunPlaces, SyncConfig
from headrace.sync.groups import ProcessGroup, join_local_group
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_receiver
from headrace.wings.bench.base import Measurement, Report, Row, Target, at_least, at_most, join_report
from headrace.wings.bench.engine import LARGE, SMALL
from headrace.wings.bench.engine_peers import PeerProcess, open_worker
from headrace.wings.bench.sync_group import measure_group
from headrace.wings.bench.sync_worker import DEADLINE_S, TOKEN, SyncPlan, broadcast, make_tensors

HALF_BILLION = TinySpec(
    hidden_size=2048, num_layers=11, num_heads=16, num_kv_heads=8, intermediate_size=5632, vocab=LARGE.vocab,
    max_positions=2048, extra={"tie_word_embeddings": True},
)  # fmt: skip
WORKER = "headrace.wings.bench.sync_worker"
RANK = 8
"""The rank of the adapters."""
BATCH = 32
"""The number of sequences that an engine decodes while its commit gaps are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model size whose weights are sent, and the numbers of measurements."""

    name: str
    """The number of parameters, for the report."""
    spec: TinySpec
    """The shape of the model."""
    rounds: int
    """The number of versions per transport and codec."""
    commits: int
    """The number of commits in the engine that decodes."""
    is_crossed: bool
    """True if every transport is combined with every codec. Otherwise each transport is measured with the codec
    ``full`` and each codec with the transport ``shm``, since the cost of a codec does not depend on the transport."""

    def combinations(self, codecs: Iterable[str]) -> list[tuple[str, str]]:
        """Return the pairs (codec, transport) to measure for this size, from ``codecs`` and all transports."""
        every = itertools.product(codecs, TRANSPORTS.rows)
        return [
            combination
            for combination in every
            if self.is_crossed or combination[0] == "full" or combination[1] == "shm"
        ]


FULL = (
    Size(name="28M", spec=LARGE, rounds=8, commits=200, is_crossed=True),
    Size(name="519M", spec=HALF_BILLION, rounds=3, commits=20, is_crossed=False),
)
QUICK = (Size(name="1M", spec=SMALL, rounds=2, commits=5, is_crossed=True),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SyncBench:
    """The options of one run of this benchmark."""

    directory: Path
    """The temporary directory of models, plans and shared files."""
    on_progress: Callable[[str], None]
    """The callback for lines of progress."""
    clock: RealClock
    quick: bool
    """True for a trial in which everything is small, and whose figures mean nothing."""
    threads: int
    """The number of threads of each process."""

    @contextmanager
    def learner(self, plan: SyncPlan) -> Iterator[PeerProcess]:
        """Start a worker process in the role of the learner, which publishes the weights that ``plan`` describes, and
        yield its client; the process ends with the context."""
        path = self.directory / "plan.json"
        path.write_bytes(msgspec.json.encode(plan))
        with open_worker("learner", path, self.threads, module=WORKER) as opened:
            yield opened


def measure(on_progress: Callable[[str], None], *, threads: int | None = None, quick: bool = False) -> Report:
    """Run all measurements and return their report. ``threads`` is the number of threads of each process (``None``:
    one); with ``quick`` everything is small and the figures mean nothing. ``on_progress`` is called with lines of
    progress."""
    torch.set_num_threads(threads or 1)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        bench = _SyncBench(
            directory=Path(scratch), on_progress=on_progress, clock=RealClock(), quick=quick, threads=threads or 1
        )  # fmt: skip
        parts: list[Measurement] = []
        for size in QUICK if quick else FULL:
            parts += [
                _measure_combinations(bench, size),
                _measure_commit_gaps(bench, size),
                _measure_groups(bench, size),
            ]
        return join_report([*parts, _measure_broadcasts(bench)])


def full_plan(spec: TinySpec) -> SyncPlan:
    """Return the plan of the weights of a Qwen3 model of the size ``spec`` in bfloat16: the shape of each tensor by
    name."""
    kv = spec.hidden_size // spec.num_heads * spec.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embed": (len(spec.vocab) + 3, spec.hidden_size)}
    for layer in range(spec.num_layers):
        for name, rows in (("q", spec.hidden_size), ("k", kv), ("v", kv), ("o", spec.hidden_size)):
            shapes[f"{layer}.{name}"] = (rows, spec.hidden_size)
        shapes |= {f"{layer}.{name}": (spec.intermediate_size, spec.hidden_size) for name in ("gate", "up")}
        shapes[f"{layer}.down"] = (spec.hidden_size, spec.intermediate_size)
        shapes |= {f"{layer}.{name}": (spec.hidden_size,) for name in ("norm_1", "norm_2")}
    return SyncPlan(shapes=shapes, dtype="bfloat16")


def adapter_plan(plan: SyncPlan) -> SyncPlan:
    """Return the plan of the weights of LoRA adapters of rank :data:`RANK` for all matrices of ``plan``, except the
    embedding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in plan.shapes.items():
        if len(shape) == 2 and name != "embed":
            shapes |= {f"{name}.lora_A": (RANK, shape[1]), f"{name}.lora_B": (shape[0], RANK)}
    return SyncPlan(shapes=shapes, dtype=plan.dtype)


def _measure_combinations(bench: _SyncBench, size: Size) -> Measurement:
    """Measure the combinations of transport and codec for a model of this size, with all weights, or for the codec
    ``adapter`` with the weights of adapters. Return a row for each combination, and the targets of this size. ``bench``
    has the options of the benchmark."""
    rows: list[Row] = []
    whole = full_plan(size.spec)
    for plan, codecs in ((whole, [c for c in CODECS if c != "adapter"]), (adapter_plan(whole), ["adapter"])):
        with bench.learner(plan) as learner:
            copied = learner.call({"do": "copy"})
            for codec, transport in size.combinations(codecs):
                bench.on_progress(f"{size.name}: {transport}, {codec}")
                row = _measure_combination(bench, learner, plan, (transport, codec, size.rounds))
                copy_share = row["bytes"] / row["stage_s"] / (copied["bytes"] / copied["copy_s"])
                row |= {"exposed by copy": row["exposed_s"] / copied["copy_s"], "stage by copy speed": copy_share}
                rows.append({"what": "way", "model": size.name, **row})
    found = {(row["transport"], row["codec"]): row for row in rows}
    exposed_by_copy, adapter = found["shm", "full"]["exposed by copy"], found["shm", "adapter"]
    adapter_ms = (adapter["stage_s"] + adapter["commit_p50_s"]) * 1e3
    return rows, [
        at_most(f"{size.name}, full: learner stands still, by one copy", exposed_by_copy, 1.3, "ratio"),
        at_most(f"{size.name}, adapter of rank {RANK}: staged and committed", adapter_ms, 1.0, "ms"),
    ]


def _measure_combination(
    bench: _SyncBench, learner: PeerProcess, plan: SyncPlan, combination: tuple[str, str, int]
) -> Row:
    """Send several versions from ``learner`` to a receiver in this process by one ``combination`` (transport, codec,
    number of versions). Return a row with the medians in seconds and bytes. Two versions before these, for which memory
    is allocated, are not counted. ``plan`` describes the weights, and ``bench`` has the options of the benchmark."""
    transport, codec, rounds = combination
    with ExitStack() as stack:
        places = RunPlaces(
            run_dir=bench.directory,
            memory=shared_memory_root() / bench.directory.name,
            private=bench.directory / "meet",
        )
        address = TRANSPORTS.load(transport).address(SyncConfig(transport=transport), places)
        route = Route(transport=transport, codec=codec, address=address, deadline_s=DEADLINE_S)
        receiver = make_receiver(route, make_tensors(plan), TOKEN)
        stack.callback(receiver.close)
        learner.call({"do": "open", "route": msgspec.to_builtins(route)})
        figures = [_send_version(bench, learner, receiver, version) for version in range(rounds + 2)][2:]
    row: Row = {"transport": transport, "codec": codec}
    for key in ("exposed_s", "announce_s", "stage_s", "bytes"):
        row[key] = statistics.median(figure[key] for figure in figures)
    commits_s = [figure["commit_s"] for figure in figures]
    return row | {"commit_p50_s": statistics.median(commits_s), "commit_p99_s": float(np.quantile(commits_s, 0.99))}


def _send_version(bench: _SyncBench, learner: PeerProcess, receiver: Receiver, version: int) -> dict[str, float]:
    """Publish ``version`` by the learner, and stage and commit it in the receiver. Return the seconds of each part and
    the number of sent bytes. ``exposed_s`` is the time for which the learner is blocked, and ``announce_s`` the time in
    which it then hashes, encodes and sends. ``bench`` has the clock."""
    to = [receiver.address] if receiver.address else []
    answer = learner.call({"do": "publish", "version": version, "slot": version % 2, "to": to})
    update = msgspec.convert(answer["update"], WeightUpdate)
    start_s = bench.clock.now()
    receiver.stage(update)
    staged_s = bench.clock.now()
    receiver.commit(version)
    return {
        "exposed_s": answer["exposed_s"],
        "announce_s": answer["announce_s"],
        "stage_s": staged_s - start_s,
        "commit_s": bench.clock.now() - staged_s,
        "bytes": update.num_bytes,
    }


def _measure_commit_gaps(bench: _SyncBench, size: Size) -> Measurement:
    """Measure the commit gaps of an engine that decodes :data:`BATCH` sequences while new weights arrive through shared
    memory. Return a row and a target. The engine has a model of the given ``size``;
    ``bench`` has the options of the benchmark."""
    bench.on_progress(f"{size.name}: commits while {BATCH} sequences decode")
    model = make_tiny(bench.directory / size.name, size.spec)
    with open_worker("fed", model, bench.threads) as engine:
        request: dict[str, Any] = {"prompts": [[3, 4, 5, 6]] * BATCH, "lengths": [size.commits] * BATCH}
        answer = engine.call({**request, "commits": size.commits})
    gaps_ms = np.array(answer["gaps_s"]) * 1e3
    p50, p99 = (float(value) for value in np.quantile(gaps_ms, [0.5, 0.99]))
    row: Row = {"what": "commit gap", "model": size.name, "commits": len(gaps_ms), "running": answer["mean_running"]}
    target = at_most(f"{size.name}: commit gap p99 while decoding", p99, 1.0, "ms")
    return [row | {"p50_ms": p50, "p99_ms": p99}], [target]


def _measure_groups(bench: _SyncBench, size: Size) -> Measurement:
    """Measure the transport ``group`` between two ranks and two engines, with a model of the given ``size``."""
    directory = bench.directory / f"group-{size.name}"
    directory.mkdir()
    return measure_group(
        directory, full_plan(size.spec), name=size.name, rounds=size.rounds, on_progress=bench.on_progress
    )


def _measure_broadcasts(bench: _SyncBench) -> Measurement:
    """Measure broadcasts by torch's Gloo backend between two processes: tensor by tensor, in buckets, and as one tensor
    that was packed beforehand. Return a row and a target for each set of weights. ``bench`` has the options of the
    benchmark."""
    rows: list[Row] = []
    targets: list[Target] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for at in range(600):
        shapes |= {f"{at}.A": (RANK, 512), f"{at}.B": (512, RANK)}
    for name, plan in (("adapters", SyncPlan(shapes=shapes, dtype="bfloat16")), ("28M", full_plan(LARGE))):
        bench.on_progress(f"gloo: {name}")
        with bench.learner(plan) as learner:
            peer = _Peer(bench, learner, plan, bench.directory / f"gloo-{name}")
            each, buckets, one = (peer.shortest_s(manner) for manner in ("each", "buckets", "one"))
        row: Row = {"what": "gloo", "model": name, "tensors": len(plan.shapes)}
        row |= {"each_s": each, "buckets_s": buckets, "one_s": one}
        rows.append(row | {"each by buckets": each / buckets, "one by buckets": one / buckets})
        if name == "adapters":
            targets.append(at_least("gloo, 1,200 tensors: one by one, by buckets", each / buckets, 5.0, "ratio"))
        else:
            targets.append(at_least("gloo, 28M: speed of buckets, by one tensor's", one / buckets, 0.6, "fraction"))
    return rows, targets


class _Peer:
    """The receiving side of the broadcasts, in this process; the worker ``learner`` is the sending side. The two
    processes exchange their addresses by files in ``directory``."""

    def __init__(self, bench: _SyncBench, learner: PeerProcess, plan: SyncPlan, directory: Path) -> None:
        """Create the receiving side, with the tensors that ``plan`` describes. ``bench`` has the options of the
        benchmark."""
        self._bench, self._learner, self._directory = bench, learner, directory
        self._tensors = list(make_tensors(plan).values())
        """The tensors into which broadcasts are received."""
        self._group: ProcessGroup | None = None
        """The process group of both processes; None before the first broadcast joins it."""

    def shortest_s(self, manner: str) -> float:
        """Return the shortest time, in seconds, of several broadcasts in this ``manner`` (``each``, ``buckets`` or
        ``one``), from the start of the receiving side until all tensors have arrived."""
        return min(self._broadcast(manner) for _ in range(2 if self._bench.quick else 7))

    def _broadcast(self, manner: str) -> float:
        """Receive one broadcast in this ``manner``, which the worker sends at the same time; return its duration in
        seconds."""
        request = {"do": "broadcast", "how": manner, "directory": str(self._directory)}
        sending = threading.Thread(target=self._learner.call, args=(request,))
        sending.start()
        if self._group is None:
            self._group = join_local_group(self._directory, "bench", (1, 2), DEADLINE_S)
        start_s = self._bench.clock.now()
        broadcast(self._group, self._tensors, manner, packs=False)
        seconds = self._bench.clock.now() - start_s
        sending.join()
        return seconds
