"""The learner compared with a padded training loop over transformers, alternately, each in its own process.

A step is forward pass, backward pass, clipping and AdamW over one batch; its time is measured inside the process,
without the construction of the batch. The tokens of prompts count, and padding does not. A ratio is the median over the
rounds, each of which measures both sides. The gradient norms of both sides are compared in every round, which shows
that both do the same work.

Operations of a step, with N tokens of the samples, n of one sample, P of them with loss:

    6 · N · (parameters of the layers' matrices)        forward 2, backward 4: 2 for the input, 2 for the weights
    + 6 · P · hidden · vocabulary                       the head, for the tokens that carry loss alone
    + Σ over samples 6 · layers · hidden · n²           scores and values: 2 products of n² / 2 pairs, as above

Recomputation in the backward pass and the cost of padding are not counted (Chowdhery et al. 2022, appendix B). The
machine's *ceiling* is the best rate of float32 matrix products in any round, with the same number of threads, so that
other load on the machine can only lower the fraction of the ceiling.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.environ import num_cores
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.base import Measurement, Report, Row, Target, at_least, at_most, join_report
from headrace.wings.bench.engine import EXPERTS, LARGE, SMALL, draw_lengths
from headrace.wings.bench.engine_peers import PeerProcess, open_worker
from headrace.wings.bench.learner_trees import TreeCase, tree_cases

WORKER = "headrace.wings.bench.learner_worker"
ROUNDS = 3
FIXED_MB = 32.0
"""The memory for log π that is allowed beyond twice the gradient of the head, in MiB, for tiles and columns of
tokens."""

PASSES = {"tokens_per_microbatch": 1600}
"""Settings with which micro-batches of whole samples and of trees have about the same size."""
MORE_MEMORY = 1.01
"""The largest ratio of two peak memories that counts as equal, since the pages of freed memory differ by this much."""

Request = dict[str, Any]
Rounds = list[tuple[dict[str, Any], dict[str, Any]]]
"""The answers of the two sides of a comparison, one pair for each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of models and batches in the measurements: :data:`FULL` for the benchmark, :data:`QUICK` for a
    trial."""

    spec: TinySpec
    """The model of all measurements, except for routing replay."""
    prompt: int
    """The number of tokens of each prompt."""
    answers: tuple[int, ...]
    """The number of tokens of each answer; eight answers share a prompt."""
    long_prompt: int
    """The number of tokens of each prompt in the measurement of shared prefixes."""
    short_answers: tuple[int, ...]
    """The number of tokens of each answer in the measurements of shared prefixes, adapters and routing replay."""
    tokens: int
    """The number of tokens in the measurement of a large head."""
    vocab: int
    """The vocabulary size of the large head."""
    rounds: int = ROUNDS
    """The number of rounds of each comparison."""


FULL = Sizes(
    spec=LARGE, prompt=32, answers=draw_lengths(48, 256, 2000), long_prompt=256,
    short_answers=draw_lengths(32, 128, 512), tokens=4096, vocab=151_936,
)  # fmt: skip
QUICK = Sizes(
    spec=SMALL, prompt=4, answers=draw_lengths(16, 16, 64), long_prompt=32, short_answers=draw_lengths(16, 16, 64),
    tokens=256, vocab=4096, rounds=1,
)  # fmt: skip
HIDDEN = 64
"""The hidden size in the measurement of a large head."""
HEADS = ("dense", "chunked", "tiled")
"""The implementations of the head: all logits at once; 64 MiB of logits at a time, recomputed in the backward pass; and
the learner's own implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LearnerBench:
    """The options of one run of this benchmark, with methods that create models and start processes."""

    directory: Path
    """The temporary directory of the models and of the processes' logs."""
    threads: int
    """The number of threads of each process."""
    sizes: Sizes
    on_progress: Callable[[str], None]
    """The callback for lines of progress."""

    def model(self, name: str, spec: TinySpec) -> Path:
        """Create a model of the shape ``spec``, with random weights, in the directory ``name``, and return the path of
        this directory."""
        return make_tiny(self.directory / name, spec)

    def open(self, side: str, model: Path, stack: ExitStack) -> PeerProcess:
        """Start the process of the implementation ``side`` with the model in the directory ``model``, and return it;
        ``stack`` ends the process."""
        return stack.enter_context(open_worker(side, model, self.threads, module=WORKER))


def measure(on_progress: Callable[[str], None], *, threads: int | None = None, quick: bool = False) -> Report:
    """Run all measurements and return their report: the learner compared with a padded loop, shared prefixes, an
    adapter, routing replay, prefix trees, and the memory of log π. ``threads`` is the number of threads of each process
    (``None``: all cores); with ``quick`` everything is small and the figures mean nothing. ``on_progress`` is called
    with lines of progress."""
    threads = threads or num_cores()
    measurements: list[Measurement] = [([{"what": "threads of each side", "threads": threads}], [])]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        bench = _LearnerBench(
            directory=Path(scratch), threads=threads, sizes=QUICK if quick else FULL, on_progress=on_progress
        )  # fmt: skip
        model = bench.model("model", bench.sizes.spec)
        with ExitStack() as stack:
            ours = bench.open("learner", model, stack)
            with ExitStack() as peers:
                measurements.append(_compare_padded(bench, ours, bench.open("padded", model, peers)))
            measurements.append(_compare_shared_prefixes(bench, ours))
            measurements.append(_compare_lora(bench, ours))
            measurements.append(_compare_replay(bench, ours))
        measurements += [_compare_trees(bench, model, case) for case in tree_cases(quick=quick)]
        measurements.append(_measure_heads(bench, model))
    return join_report(measurements)


def make_request(spec: TinySpec, prompt: int, answers: Sequence[int], **more: Any) -> Request:
    """Return the request for one training step, a JSON object for the worker processes: a batch of answers with the
    lengths ``answers`` to prompts of ``prompt`` tokens, for the vocabulary of ``spec``, and the further fields
    ``more``."""
    return {"prompt": prompt, "lengths": list(answers), "vocab": len(spec.vocab) + 3, **more}


def step_flop(spec: TinySpec, prompt: int, answers: Sequence[int]) -> int:
    """Return the number of floating-point operations of a step, by the formula in the docstring of this module, for a
    model of the size ``spec`` and answers with the lengths ``answers`` to prompts of ``prompt`` tokens."""
    kv_size = spec.hidden_size // spec.num_heads * spec.num_kv_heads
    attention = spec.hidden_size * (2 * spec.hidden_size + 2 * kv_size)
    matrices = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    head = spec.hidden_size * (len(spec.vocab) + 3)
    lengths = [prompt + answer for answer in answers]
    pairs = sum(length**2 for length in lengths)
    return 6 * (sum(lengths) * matrices + sum(answers) * head + spec.num_layers * spec.hidden_size * pairs)


def _compare_padded(bench: _LearnerBench, ours: PeerProcess, theirs: PeerProcess) -> Measurement:
    """Compare training steps of the learner (the process ``ours``) with training steps of a loop that pads its batches
    (``theirs``). Return rows with speed, memory and the fraction of the machine's ceiling that the learner uses, and
    two targets. ``bench`` has the options of the benchmark."""
    sizes, spec = bench.sizes, bench.sizes.spec
    request = make_request(spec, sizes.prompt, sizes.answers)
    tokens = sum(sizes.answers) + len(sizes.answers) * sizes.prompt
    ceilings: list[float] = []

    def measure_ceiling() -> None:
        """Store the best rate of float32 matrix products that the learner's process measures now."""
        products = [[1024, 1024, 1024], [2048, spec.hidden_size, spec.intermediate_size]]
        ceilings.append(ours.call({"products": products})["flop_per_s"])

    rounds = _alternate(bench, "the learner and the padded loop", (ours, request), (theirs, request), measure_ceiling)
    _assert_same_work(rounds)
    flop = step_flop(spec, sizes.prompt, sizes.answers)
    used = flop / _median_s(rounds, 0) / max(ceilings)
    ratio = _speedup(rounds)
    padded = sum(
        8 * (max(sizes.answers[start : start + 8]) + sizes.prompt) for start in range(0, len(sizes.answers), 8)
    )
    rows: list[Row] = [
        {
            "what": "training step", "side": name, "tok_s": tokens / _median_s(rounds, index),
            "step_s": _median_s(rounds, index), "peak_mb": rounds[-1][index]["peak_bytes"] / 2**20,
            "loaded_mb": rounds[-1][index]["loaded_bytes"] / 2**20,
        }
        for index, name in enumerate(("learner", "padded"))
    ]  # fmt: skip
    rows.append(
        {
            "what": "training step", "tokens": tokens, "positions with padding": padded,
            "learner by padded, tok/s": ratio, "gflop": flop / 1e9,
            "ceiling_gflop_per_s": max(ceilings) / 1e9, "used": used,
        }
    )  # fmt: skip
    return rows, [
        at_least("training, tok/s by the padded loop's", ratio, 2.0, "ratio"),
        at_least("training, operations by the ceiling of matrix products", used, 0.55, "fraction"),
    ]


def _compare_shared_prefixes(bench: _LearnerBench, ours: PeerProcess) -> Measurement:
    """Compare steps of the learner that compute the shared prompt of a group once with steps that compute the prompt
    for each answer. Return one row, and no target."""
    sizes = bench.sizes
    off = make_request(sizes.spec, sizes.long_prompt, sizes.short_answers)
    on = {**off, "settings": {"share_prefixes": True}}
    what = f"shared prefixes, groups of 8 with prompts of {sizes.long_prompt}"
    rounds = _alternate(bench, what, (ours, on), (ours, off))
    _assert_same_work(rounds)
    return [_comparison_row(what, rounds)], []


def _compare_trees(bench: _LearnerBench, model: Path, case: TreeCase) -> Measurement:
    """Compare steps on the samples of ``case`` that compute shared prefixes once, as by default, with steps that
    compute every sample completely, in micro-batches of the same size. Each side has a process of its own, so that its
    peak memory can be measured. Return one row and two targets. ``bench`` has the options of the benchmark, and
    ``model`` is the directory of the model."""
    request = make_request(bench.sizes.spec, bench.sizes.prompt, (), tree=case.shape)
    what = f"prefix trees, {case.description}"
    with ExitStack() as stack:
        on, off = (bench.open("learner", model, stack) for _ in range(2))
        rounds = _alternate(
            bench,
            what,
            (on, {**request, "settings": {**PASSES, "share_prefixes": "auto"}}),
            (off, {**request, "settings": PASSES}),
        )
    _assert_same_work(rounds)
    peak_mb, whole_mb = (rounds[-1][at]["peak_bytes"] / 2**20 for at in (0, 1))
    memory: Row = {"tokens": rounds[-1][0]["tokens"], "peak_mb": peak_mb, "peak_mb of whole samples": whole_mb}
    return [{**_comparison_row(what, rounds), **memory}], [
        at_least(f"{what}: times faster", _speedup(rounds), case.min_speedup, "ratio"),
        at_most(f"{what}: peak memory by that of whole samples", peak_mb / whole_mb, MORE_MEMORY, "ratio"),
    ]


def _compare_lora(bench: _LearnerBench, ours: PeerProcess) -> Measurement:
    """Compare steps that train a LoRA adapter of rank 16 with steps that train all weights. Return one row, and no
    target."""
    sizes = bench.sizes
    full = make_request(sizes.spec, sizes.prompt, sizes.short_answers)
    rounds = _alternate(bench, "LoRA of rank 16", (ours, {**full, "lora": {"rank": 16}}), (ours, full))
    return [_comparison_row("LoRA of rank 16 instead of all weights", rounds)], []


def _compare_replay(bench: _LearnerBench, ours: PeerProcess) -> Measurement:
    """Compare steps of a mixture of experts that replay recorded experts with steps that route tokens themselves.
    Return one row, and no target."""
    experts = bench.model("experts", EXPERTS)
    off = make_request(EXPERTS, bench.sizes.prompt, bench.sizes.short_answers, model=str(experts))
    rounds = _alternate(bench, "routing replay", (ours, {**off, "replay": True}), (ours, off))
    return [_comparison_row("routing replay, mixture of experts", rounds)], []


def _measure_heads(bench: _LearnerBench, model: Path) -> Measurement:
    """Measure the peak memory that each implementation of the head needs to compute log π and its gradient, without the
    hidden states and the weights of the head; each implementation runs in a new process. Return a row for each, and
    targets for the learner's own implementation: at most twice the gradient of the head plus :data:`FIXED_MB`.
    ``bench`` has the options of the benchmark, and ``model`` is the directory of a model."""
    sizes = bench.sizes
    gradient_mb = sizes.vocab * HIDDEN * 4 / 2**20
    limit_mb = 2 * gradient_mb + FIXED_MB
    cases = [(side, sizes.tokens) for side in HEADS] + [(HEADS[-1], 4 * sizes.tokens)]
    rows: list[Row] = []
    targets: list[Target] = []
    for side, tokens in cases:
        what = f"log π of {tokens} tokens, vocabulary {sizes.vocab}"
        bench.on_progress(f"{what}: {side}")
        with ExitStack() as stack:
            request = {"tokens": tokens, "vocab": sizes.vocab, "hidden": HIDDEN}
            answer = bench.open(side, model, stack).call(request)
        extra_mb = answer["extra_bytes"] / 2**20
        rows.append(
            {
                "what": what, "side": side, "extra_mb": extra_mb, "seconds": answer["seconds"],
                "all_logits_mb": tokens * sizes.vocab * 4 / 2**20, "head_gradient_mb": gradient_mb,
            }
        )  # fmt: skip
        if side == HEADS[-1]:
            targets.append(at_most(f"{what}, memory", extra_mb, limit_mb, "MiB"))
    return rows, targets


def _alternate(
    bench: _LearnerBench,
    what: str,
    one: tuple[PeerProcess, Request],
    other: tuple[PeerProcess, Request],
    before: Callable[[], None] = lambda: None,
) -> Rounds:
    """Measure a training step of both sides in every round, after a short warm-up step, and return the answers of both.
    A side is a process with the request for its step; in a round both sides receive the same seed. ``before`` is called
    at the beginning of every round."""
    bench.on_progress(f"{what}: warming up")
    for side, request in (one, other):
        side.call({**request, "tree": None, "lengths": [16] * 8, "seed": 0})
    rounds: Rounds = []
    for turn in range(bench.sizes.rounds):
        bench.on_progress(f"{what}: round {turn}")
        before()
        first, second = (side.call({**request, "seed": 1 + turn}) for side, request in (one, other))
        rounds.append((first, second))
    return rounds


def _assert_same_work(rounds: Rounds) -> None:
    """Assert that both sides did the same work in every round: their gradient norms must agree within 1%, which allows
    for rounding and for small differences of the weights after earlier steps."""
    for one, other in rounds:
        assert abs(one["grad_norm"] / other["grad_norm"] - 1) < 1e-2, (one, other)


def _median_s(rounds: Rounds, side: int) -> float:
    """Return the median time, in seconds, of a step of the first (``side`` is 0) or second (1) side."""
    return statistics.median(float(answers[side]["seconds"]) for answers in rounds)


def _speedup(rounds: Rounds) -> float:
    """Return how many times faster the first side is than the second: the time of the second side divided by the time
    of the first, as the median over the rounds."""
    return statistics.median(float(second["seconds"] / first["seconds"]) for first, second in rounds)


def _comparison_row(label: str, rounds: Rounds) -> Row:
    """Return a row that compares steps with a feature (the first side) with steps without it (the second side): the
    median time of each in seconds, and how many times faster the first side is. ``label`` names the comparison."""
    return {
        "what": label,
        "on_s": _median_s(rounds, 0),
        "off_s": _median_s(rounds, 1),
        "times faster": _speedup(rounds),
    }
