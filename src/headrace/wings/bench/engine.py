"""The embedded engine compared with transformers and, if the user names an interpreter with vLLM, with vLLM. The
engines run alternately, each in its own process, called a *side* of the comparison; the other engines are *peers*.

Tokens per second are measured over whole requests, outside the processes. A ratio is the embedded engine's rate divided
by the rate of a peer, as the median over the rounds.
"""

from __future__ import annotations

import statistics
import string
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.base import Measurement, Report, Row, at_least, at_most, join_report
from headrace.wings.bench.engine_peers import VLLM_CACHE_BYTES, PeerProcess, cold_first_token_s, open_worker

_VOCAB = (string.ascii_letters + string.digits)[:61]
_SHAPE: Mapping[str, Any] = {"vocab": _VOCAB, "max_positions": 2048, "extra": {"tie_word_embeddings": True}}
_LINEAR: Mapping[str, Any] = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
"""Settings of a hybrid model: three layers of linear attention before each layer of full attention, as in Qwen3.5."""
SMALL = TinySpec(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=384, **_SHAPE)
LARGE = TinySpec(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=1536, **_SHAPE)
EXPERTS = TinySpec(
    kind="qwen3_moe", hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, vocab=_VOCAB, max_positions=2048,
    extra={"tie_word_embeddings": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
)  # fmt: skip
SMALL_HYBRID = replace(
    SMALL, kind="qwen3_5_text", extra={"tie_word_embeddings": True, **_LINEAR, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
)  # fmt: skip
LARGE_HYBRID = replace(
    LARGE, kind="qwen3_5_text", extra={"tie_word_embeddings": True, **_LINEAR, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
)  # fmt: skip
MODELS = {
    "1M": SMALL, "28M": LARGE, "1M experts": EXPERTS, "1M hybrid": SMALL_HYBRID, "28M hybrid": LARGE_HYBRID,
}  # fmt: skip
PROMPT = 8
"""The number of tokens of every prompt."""
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComparison:
    """A comparison of the embedded engine with its peers: a request that is sent to each engine in turn, and the target
    ratios of speed."""

    name: str
    """The name of the comparison in the report."""
    model: str
    """The name of the model in ``MODELS``."""
    lengths: tuple[int, ...]
    """The number of new tokens of each sequence."""
    peers: tuple[str, ...]
    """The engines that are compared with the embedded engine."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """The smallest acceptable ratio of the embedded engine's tokens per second to each peer's, by peer."""
    side: str = "native"
    """The side that is compared with the peers: the embedded engine in float32, or ``bfloat16``."""
    unit: str = ""
    """The unit of the processor without which the ratios are no targets, as the engine names it; empty: none."""


def draw_lengths(count: int, mean: float, cap: int) -> tuple[int, ...]:
    """Return ``count`` sequence lengths in tokens, drawn from a lognormal distribution with this mean and a standard
    deviation as large as the mean, rounded and cut to the range 1 to ``cap``. Equal arguments give equal lengths."""
    sigma = float(np.sqrt(np.log(2.0)))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return tuple(np.clip(drawn.round(), 1, cap).astype(int).tolist())


MATCHES = (
    EngineComparison(name="28M, 64 x 512", model="28M", lengths=(512,) * 64, peers=("generate", "vllm"),
          ratios={"generate": 3.0, "vllm": 1.2}),
    EngineComparison(name="28M, 64 x 128", model="28M", lengths=(128,) * 64, peers=("generate", "continuous", "vllm"),
          ratios={"continuous": 8.0, "vllm": 1.2}),
    EngineComparison(name="28M, 256 of lognormal lengths", model="28M", lengths=draw_lengths(256, 128, 512),
          peers=("generate", "vllm"), ratios={"generate": 4.0}),
    EngineComparison(name="28M, 8 x 128", model="28M", lengths=(128,) * 8, peers=("generate", "vllm"),
          ratios={"vllm": 1.0}),
    EngineComparison(name="28M, 1 x 128", model="28M", lengths=(128,), peers=("generate", "vllm"),
          ratios={"vllm": 1.0}),
    EngineComparison(name="1M, 64 x 128", model="1M", lengths=(128,) * 64, peers=("generate", "vllm"),
          ratios={"generate": 2.0, "vllm": 1.0}),
    *(
        EngineComparison(name=f"{model} in bfloat16, {count} x {new}", model=model, lengths=(new,) * count,
              side="bfloat16", peers=("native",), unit="AMX", ratios=ratios)
        for model, count, new, ratios in (
            ("28M", 64, 512, {"native": 1.2}), ("28M", 64, 128, {"native": 1.2}), ("28M", 8, 128, {}),
            ("28M", 1, 128, {}), ("1M", 64, 128, {}),
        )
    ),
    EngineComparison(name="28M hybrid, 64 x 256", model="28M hybrid", lengths=(256,) * 64, peers=("generate",),
          ratios={"generate": 2.0}),
    EngineComparison(name="1M hybrid, 64 x 256", model="1M hybrid", lengths=(256,) * 64, peers=("generate",),
          ratios={"generate": 2.0}),
)  # fmt: skip
QUICK = (
    EngineComparison(name="1M, 4 x 8", model="1M", lengths=(8,) * 4, peers=("generate", "continuous", "vllm"),
          ratios={"generate": 2.0, "continuous": 8.0, "vllm": 1.0}),
    EngineComparison(name="1M in bfloat16, 4 x 8", model="1M", lengths=(8,) * 4, side="bfloat16", peers=("native",),
          unit="AMX", ratios={"native": 1.2}),
    EngineComparison(name="1M hybrid, 4 x 8", model="1M hybrid", lengths=(8,) * 4, peers=("generate",),
          ratios={"generate": 2.0}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineBench:
    """The options of one run of this benchmark, with methods that create models, start engines and time requests."""

    directory: Path
    """The temporary directory of the models and of the processes' logs."""
    threads: int
    """The number of threads of each process."""
    vllm: str
    """The path of an interpreter with vLLM; empty: vLLM is left out."""
    quick: bool
    """True for a trial in which everything is small, and whose figures mean nothing."""
    on_progress: Callable[[str], None]
    """The callback for lines of progress."""
    clock: RealClock = field(default_factory=RealClock)

    @property
    def main_model(self) -> Path:
        """Return the directory of the model of all measurements that do not compare engines."""
        return self.model("1M" if self.quick else "28M")

    @property
    def rounds(self) -> int:
        """Return the number of rounds of each comparison."""
        return 1 if self.quick else ROUNDS

    def model(self, name: str) -> Path:
        """Return the directory of the model with the key ``name`` in :data:`MODELS`. The first call creates the model,
        with random weights."""
        directory = self.directory / name.replace(" ", "-")
        return directory if directory.exists() else make_tiny(directory, MODELS[name])

    def open(self, side: str, model: Path, stack: ExitStack) -> PeerProcess:
        """Start the process of the engine ``side`` with the model in the directory ``model``, and return it; ``stack``
        ends the process."""
        return stack.enter_context(open_worker(side, model, self.threads, vllm=self.vllm))

    def timed(self, side: PeerProcess, request: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Send ``request`` to the process ``side`` of an engine; return the seconds until the answer arrives, and the
        answer."""
        start_s = self.clock.now()
        answer = side.call(request)
        return self.clock.now() - start_s, answer


def measure(
    on_progress: Callable[[str], None], *, threads: int | None = None, quick: bool = False, vllm: str = ""
) -> Report:
    """Run all measurements and return their report: the comparisons with other engines, the lower limit of a step's
    time, the time to the first token, the cost of recording, and the commit gaps. ``threads`` is the number of threads
    of each process (``None``: all cores); with ``quick`` everything is small and the figures mean nothing; ``vllm`` is
    the path of an interpreter with vLLM for CPUs (empty: vLLM is left out). ``on_progress`` is called with lines of
    progress."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        bench = _EngineBench(
            directory=Path(scratch), threads=threads or num_cores(), vllm=vllm, quick=quick, on_progress=on_progress
        )  # fmt: skip
        parts = [_compare(bench, match) for match in (QUICK if quick else MATCHES)]
        on_progress("floor, first token, recording, commits")
        with ExitStack() as stack:
            ours = bench.open("native", bench.main_model, stack)
            routed = bench.open("native", bench.model("1M experts"), stack)
            parts += [
                _measure_step_floor(bench, ours),
                _measure_latency(bench, ours),
                _measure_recording(bench, ours, "kept-sets", {"top_p": 0.95}, {"record_kept": True}),
                _measure_recording(bench, routed, "routing", {}, {"record_routing": True}),
                _measure_gaps(bench, bench.open("fed", bench.main_model, stack)),
            ]
        on_progress("fresh process")
        return join_report([*parts, _measure_cold_start(bench)])


def make_request(lengths: tuple[int, ...], **sampling: Any) -> dict[str, Any]:
    """Return a request, a JSON object for the engines' processes: random prompts of :data:`PROMPT` tokens, the number
    of new tokens for each (``lengths``), and the sampling options. Requests with equally many sequences have equal
    prompts."""
    rng = np.random.default_rng(len(lengths))
    prompts = rng.integers(3, len(_VOCAB), (len(lengths), PROMPT)).tolist()
    return {"prompts": prompts, "lengths": list(lengths), "sampling": sampling}


def _compare(bench: _EngineBench, match: EngineComparison) -> Measurement:
    """Send the request of ``match`` to each of its engines in turn, round after round, after a short warm-up request.
    Return a row for each engine with tokens per second and memory, a row for each ratio, and the targets. Every answer
    must have the requested number of tokens. ``bench`` has the options of the benchmark."""
    names = [match.side, *(peer for peer in match.peers if peer != "vllm" or bench.vllm)]
    rates: dict[str, list[float]] = {name: [] for name in names}
    resident: dict[str, int] = {}
    caches: dict[str, int] = {}
    unit = ""
    with ExitStack() as stack:
        sides = {name: bench.open(name, bench.model(match.model), stack) for name in names}
        # all pages of the cache are touched, so that its size can be subtracted from the resident memory
        sides[match.side].call({"fill_cache": True})
        for name, side in sides.items():
            bench.on_progress(f"{match.name}: {name} warms up")
            # continuous batching allocates its cache by the first request, so that this must have the full lengths
            side.call(make_request(match.lengths if name == "continuous" else (4,) * len(match.lengths)))
        for turn in range(bench.rounds):
            for name, side in sides.items():
                bench.on_progress(f"{match.name}: {name}, round {turn}")
                seconds, answer = bench.timed(side, make_request(match.lengths))
                assert answer["tokens"] == sum(match.lengths), (name, answer)
                rates[name].append(answer["tokens"] / seconds)
                caches[name] = answer.get("cache_bytes", VLLM_CACHE_BYTES if name == "vllm" else 0)
                resident[name] = side.resident_bytes()
                unit = answer.get("unit", unit) if name == match.side else unit
    rows: list[Row] = [
        {
            "what": match.name, "side": name, "tok_s": statistics.median(rates[name]), "lowest": min(rates[name]),
            "highest": max(rates[name]), "resident_mb": resident[name] / 2**20,
            "known_cache_mb": caches[name] / 2**20,
        }
        for name in names
    ]  # fmt: skip
    targets = []
    for peer in names[1:]:
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates[match.side], rates[peer], strict=True))
        rows.append({"what": match.name, "ours by": peer, "ratio": ratio})
        if peer in match.ratios and match.unit in (unit, ""):
            targets.append(at_least(f"{match.name}, tok/s by {peer}'s", ratio, match.ratios[peer], "ratio"))
    if "vllm" in names:
        share = (resident[match.side] - caches[match.side]) / (resident["vllm"] - caches["vllm"])
        targets.append(at_most(f"{match.name}, memory beyond the cache by vllm's", share, 1 / 3, "ratio"))
    return rows, targets


def _measure_step_floor(bench: _EngineBench, ours: PeerProcess) -> Measurement:
    """Compare the time of a decoding step of a full batch with the lower limit that the machine's matrix products and
    memory set, and measure the part of the step outside the model's forward pass. The time of the prompts is measured
    separately and subtracted. Return a row, and the target that the limit is at least 0.6 of the measured time.
    ``ours`` is the process of the embedded engine. ``bench`` has the options of the benchmark."""
    spec = SMALL if bench.quick else LARGE
    batch, new = (4, 8) if bench.quick else (64, 128)
    limits = {"matrix_size": 1024, "copied_bytes": 2**24 if bench.quick else 2**28}
    request, prompts = make_request((new,) * batch), make_request((1,) * batch)
    ours.call(request)
    fractions, outside_s, steps_s, gflops, gbytes = [], [], [], [], []
    for _ in range(bench.rounds):
        machine, prefill, answer = ours.call(limits), ours.call(prompts), ours.call(request)
        steps = answer["steps"] - prefill["steps"]
        busy_s, forward_s = (answer[key] - prefill[key] for key in ("busy_s", "forward_s"))
        steps_s.append(busy_s / steps)
        outside_s.append((busy_s - forward_s) / steps)
        fractions.append(step_floor_s(spec, batch, PROMPT + new / 2, machine) / steps_s[-1])
        gflops.append(machine["flop_per_s"] / 1e9)
        gbytes.append(machine["bytes_per_s"] / 1e9)
    fraction = statistics.median(fractions)
    row: Row = {
        "what": f"step of {batch} sequences", "gflop_per_s": statistics.median(gflops),
        "gb_per_s": statistics.median(gbytes), "step_ms": statistics.median(steps_s) * 1e3,
        "outside_forward_ms": statistics.median(outside_s) * 1e3, "floor_by_step": fraction,
    }  # fmt: skip
    return [row], [at_least("floor of a step by the step", fraction, 0.6, "fraction")]


def step_floor_s(spec: TinySpec, batch: int, context: float, machine: Mapping[str, float]) -> float:
    """Return the lower limit of the time, in seconds, of one decoding step of ``batch`` sequences with ``context``
    tokens each on average, for a model of the size ``spec``. This is the time of the products with the weights at the
    machine's matrix rate, or of reading the weights once if that takes longer, plus the time of reading the keys and
    values of the contexts once. All numbers are float32. ``machine`` has the measured rates ``flop_per_s`` and
    ``bytes_per_s``."""
    kv_size = spec.hidden_size // spec.num_heads * spec.num_kv_heads
    attention = spec.hidden_size * (2 * spec.hidden_size + 2 * kv_size)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    weights = spec.num_layers * layer + spec.hidden_size * (len(spec.vocab) + 3)
    products_s = max(2 * batch * weights / machine["flop_per_s"], 4 * weights / machine["bytes_per_s"])
    return products_s + 4 * 2 * spec.num_layers * kv_size * batch * context / machine["bytes_per_s"]


def _measure_latency(bench: _EngineBench, ours: PeerProcess) -> Measurement:
    """Measure the time from sending a short prompt to the answer of one token, in a process that has answered before.
    Return a row with the median, and no target."""
    request = make_request((1,))
    ours.call(request)
    times_s = [bench.timed(ours, request)[0] for _ in range(3 if bench.quick else 30)]
    return [{"what": "time to first token, warm", "median_ms": statistics.median(times_s) * 1e3}], []


def _measure_cold_start(bench: _EngineBench) -> Measurement:
    """Measure the time from the start of a new process to its first token, for the embedded engine and, unless
    ``quick``, for its peers. Return a row for each engine, and the target of the embedded engine, at most 5 s."""
    request = make_request((1,))
    names = ["native"] if bench.quick else ["native", "generate", *(["vllm"] if bench.vllm else [])]
    rows: list[Row] = []
    for name in names:
        times_s = [
            cold_first_token_s(name, bench.main_model, bench.threads, request=request, vllm=bench.vllm)
            for _ in range(bench.rounds if name != "vllm" else 1)
        ]
        rows.append({"what": "fresh process to first token", "side": name, "median_s": statistics.median(times_s)})
    return rows, [at_most("fresh process to first token", rows[0]["median_s"], 5.0, "s")]


def _measure_recording(
    bench: _EngineBench, ours: PeerProcess, recorded: str, base: Mapping[str, Any], more: Mapping[str, Any]
) -> Measurement:
    """Measure how much longer requests take when the embedded engine records ``recorded`` (kept-sets or routing).
    Requests with the sampling options ``base`` are sent alternately without and with the options ``more``, which switch
    the recording on. Return a row, and the target that recording takes at most a tenth more time."""
    lengths = (8,) * 4 if bench.quick else (128,) * 64
    off, on = make_request(lengths, **base), make_request(lengths, **base, **more)
    ours.call(on)
    times = [(bench.timed(ours, off)[0], bench.timed(ours, on)[0]) for _ in range(bench.rounds)]
    cost = statistics.median(on_s / off_s - 1 for off_s, on_s in times)
    off_s, on_s = (statistics.median(column) for column in zip(*times, strict=True))
    row: Row = {"what": f"recording {recorded}", "off_s": off_s, "on_s": on_s, "cost": cost}
    return [row], [at_most(f"recording {recorded}, more time", cost, 0.10, "fraction")]


def _measure_gaps(bench: _EngineBench, ours: PeerProcess) -> Measurement:
    """Measure the commit gap, the time for which the engine's step loop stands still to commit new weights, over many
    commits between the steps of a full batch. ``ours`` is the process of an engine that receives weights, the side
    ``fed``. Return a row in milliseconds, and the target of the 99th percentile."""
    commits, batch = (10, 4) if bench.quick else (1000, 64)
    answer = ours.call({**make_request((16 if bench.quick else 512,) * batch), "commits": commits})
    gaps_ms = np.array(answer["gaps_s"]) * 1e3
    p99_ms = float(np.percentile(gaps_ms, 99))
    row: Row = {
        "what": f"gap of {commits} commits", "median_ms": float(np.median(gaps_ms)), "p99_ms": p99_ms,
        "worst_ms": float(gaps_ms.max()), "mean_running": answer["mean_running"],
    }  # fmt: skip
    return [row], [at_most("commit gap p99", p99_ms, 1.0, "ms")]
