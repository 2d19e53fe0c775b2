"""The learner beside a padded loop over transformers: in one run, in turn, each in its own process.

A step is forward, backward, clipping and AdamW over one batch; its time is taken inside the process, without making the
batch. Tokens are those of the samples, prompts included and padding not. A ratio is the median over the rounds, each of
which measures both sides. Both do the same work: their gradient norms are compared every time.

Operations of a step, with N tokens of the samples, n of one sample, P of them with loss:

    6 · N · (parameters of the layers' matrices)        forward 2, backward 4: 2 for the input, 2 for the weights
    + 6 · P · hidden · vocabulary                       the head, for the tokens that carry loss alone
    + Σ over samples 6 · layers · hidden · n²           scores and values: 2 products of n² / 2 pairs, as above

What is computed again in the backward pass and what padding costs are not counted (Chowdhery et al. 2022, appendix B).
The machine's ceiling is the best rate of float32 matrix products on as many threads that any round saw, so that what
disturbs the machine lowers the share and never raises it.
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
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, report
from headrace.wings.bench.engine import EXPERTS, LARGE, SMALL, Found, lognormal
from headrace.wings.bench.engine_peers import PeerProcess, worker

WORKER = "headrace.wings.bench.learner_worker"
ROUNDS = 3
FIXED_MB = 32.0
"""What log π may take beside the gradient of the head, twice: tiles, and columns of the tokens."""

Order = dict[str, Any]
Rounds = list[tuple[dict[str, Any], dict[str, Any]]]
"""What the two sides of a comparison answered, round by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    spec: TinySpec
    """The model of all but the routing."""
    prompt: int
    """Tokens of the prompts."""
    answers: tuple[int, ...]
    """Tokens of the answers, eight to a prompt."""
    long_prompt: int
    """Tokens of the prompts that are shared."""
    short_answers: tuple[int, ...]
    """Tokens of the answers to those."""
    tokens: int
    """Tokens under a large head."""
    vocab: int
    """Entries of that head."""
    rounds: int = ROUNDS
    """How often each comparison is made."""


FULL = Sizes(
    spec=LARGE, prompt=32, answers=lognormal(48, 256, 2000), long_prompt=256, short_answers=lognormal(32, 128, 512),
    tokens=4096, vocab=151_936,
)  # fmt: skip
QUICK = Sizes(
    spec=SMALL, prompt=4, answers=lognormal(16, 16, 64), long_prompt=32, short_answers=lognormal(16, 16, 64),
    tokens=256, vocab=4096, rounds=1,
)  # fmt: skip
HIDDEN = 64
"""Hidden size under the large head."""
HEADS = ("dense", "chunked", "tiled")
"""All logits at once; 64 MiB of them at a time, computed again in the backward pass; and the learner's own way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LearnerBench:
    directory: Path
    threads: int
    sizes: Sizes
    tell: Callable[[str], None]

    def model(self, name: str, spec: TinySpec) -> Path:
        return make_tiny(self.directory / name, spec)

    def open(self, side: str, model: Path, stack: ExitStack) -> PeerProcess:
        return stack.enter_context(worker(side, model, self.threads, module=WORKER))


def measure(tell: Callable[[str], None], *, threads: int | None = None, quick: bool = False) -> Report:
    """Everything. ``threads`` of each side (unset: all cores); ``quick`` shows that it runs, its figures say
    nothing."""
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        bench = _LearnerBench(
            directory=Path(scratch), threads=threads or num_cores(), sizes=QUICK if quick else FULL, tell=tell
        )  # fmt: skip
        model = bench.model("model", bench.sizes.spec)
        with ExitStack() as stack:
            ours = bench.open("learner", model, stack)
            with ExitStack() as peers:
                found.append(_against_padded(bench, ours, bench.open("padded", model, peers)))
            found.append(_shared_prefixes(bench, ours))
            found.append(_lora(bench, ours))
            found.append(_replay(bench, ours))
        found.append(_head(bench, model))
    rows: list[Row] = [{"what": "threads of each side", "threads": threads or num_cores()}]
    targets: list[Target] = []
    for more_rows, more_targets in found:
        rows += more_rows
        targets += more_targets
    return report(rows, targets)


def order_of(spec: TinySpec, prompt: int, answers: Sequence[int], **more: Any) -> Order:
    """What the workers are told."""
    return {"prompt": prompt, "lengths": list(answers), "vocab": len(spec.vocab) + 3, **more}


def step_flop(spec: TinySpec, prompt: int, answers: Sequence[int]) -> int:
    """Operations that a step needs, by the formula above."""
    kv_size = spec.hidden_size // spec.num_heads * spec.num_kv_heads
    attention = spec.hidden_size * (2 * spec.hidden_size + 2 * kv_size)
    matrices = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    head = spec.hidden_size * (len(spec.vocab) + 3)
    lengths = [prompt + answer for answer in answers]
    pairs = sum(length**2 for length in lengths)
    return 6 * (sum(lengths) * matrices + sum(answers) * head + spec.num_layers * spec.hidden_size * pairs)


def _against_padded(bench: _LearnerBench, ours: PeerProcess, theirs: PeerProcess) -> Found:
    sizes, spec = bench.sizes, bench.sizes.spec
    order = order_of(spec, sizes.prompt, sizes.answers)
    tokens = sum(sizes.answers) + len(sizes.answers) * sizes.prompt
    able: list[float] = []

    def measure_ceiling() -> None:
        products = [[1024, 1024, 1024], [2048, spec.hidden_size, spec.intermediate_size]]
        able.append(ours.ask({"products": products})["flop_per_s"])

    rounds = _in_turn(bench, "the learner and the padded loop", (ours, order), (theirs, order), measure_ceiling)
    _refuse_other_work(rounds)
    flop = step_flop(spec, sizes.prompt, sizes.answers)
    used = flop / _median_s(rounds, 0) / max(able)
    ratio = _ratio(rounds)
    padded = sum(8 * (max(sizes.answers[at : at + 8]) + sizes.prompt) for at in range(0, len(sizes.answers), 8))
    rows: list[Row] = [
        {
            "what": "training step", "side": name, "tok_s": tokens / _median_s(rounds, at),
            "step_s": _median_s(rounds, at), "peak_mb": rounds[-1][at]["peak_bytes"] / 2**20,
            "loaded_mb": rounds[-1][at]["loaded_bytes"] / 2**20,
        }
        for at, name in enumerate(("learner", "padded"))
    ]  # fmt: skip
    rows.append(
        {
            "what": "training step", "tokens": tokens, "positions with padding": padded,
            "learner by padded, tok/s": ratio, "gflop": flop / 1e9,
            "ceiling_gflop_per_s": max(able) / 1e9, "used": used,
        }
    )  # fmt: skip
    return rows, [
        at_least("training, tok/s by the padded loop's", ratio, 2.0, "ratio"),
        at_least("training, operations by the ceiling of matrix products", used, 0.55, "fraction"),
    ]


def _shared_prefixes(bench: _LearnerBench, ours: PeerProcess) -> Found:
    sizes = bench.sizes
    off = order_of(sizes.spec, sizes.long_prompt, sizes.short_answers)
    on = {**off, "settings": {"share_prefixes": True}}
    what = f"shared prefixes, groups of 8 with prompts of {sizes.long_prompt}"
    rounds = _in_turn(bench, what, (ours, on), (ours, off))
    _refuse_other_work(rounds)
    return [_on_off(what, rounds)], []


def _lora(bench: _LearnerBench, ours: PeerProcess) -> Found:
    sizes = bench.sizes
    full = order_of(sizes.spec, sizes.prompt, sizes.short_answers)
    rounds = _in_turn(bench, "LoRA of rank 16", (ours, {**full, "lora": {"rank": 16}}), (ours, full))
    return [_on_off("LoRA of rank 16 instead of all weights", rounds)], []


def _replay(bench: _LearnerBench, ours: PeerProcess) -> Found:
    experts = bench.model("experts", EXPERTS)
    off = order_of(EXPERTS, bench.sizes.prompt, bench.sizes.short_answers, model=str(experts))
    rounds = _in_turn(bench, "routing replay", (ours, {**off, "replay": True}), (ours, off))
    return [_on_off("routing replay, mixture of experts", rounds)], []


def _head(bench: _LearnerBench, model: Path) -> Found:
    """Peak memory of log π and its gradient, beyond hidden states and head: each in a fresh process."""
    sizes = bench.sizes
    gradient_mb = sizes.vocab * HIDDEN * 4 / 2**20
    limit_mb = 2 * gradient_mb + FIXED_MB
    cases = [(side, sizes.tokens) for side in HEADS] + [(HEADS[-1], 4 * sizes.tokens)]
    rows: list[Row] = []
    targets: list[Target] = []
    for side, tokens in cases:
        what = f"log π of {tokens} tokens, vocabulary {sizes.vocab}"
        bench.tell(f"{what}: {side}")
        with ExitStack() as stack:
            order = {"tokens": tokens, "vocab": sizes.vocab, "hidden": HIDDEN}
            answer = bench.open(side, model, stack).ask(order)
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


def _in_turn(
    bench: _LearnerBench,
    what: str,
    one: tuple[PeerProcess, Order],
    other: tuple[PeerProcess, Order],
    before: Callable[[], None] = lambda: None,
) -> Rounds:
    """Both sides in every round, after a short step that warms them up."""
    bench.tell(f"{what}: warming up")
    for side, order in (one, other):
        side.ask({**order, "lengths": [16] * 8, "seed": 0})
    rounds: Rounds = []
    for turn in range(bench.sizes.rounds):
        bench.tell(f"{what}: round {turn}")
        before()
        first, second = (side.ask({**order, "seed": 1 + turn}) for side, order in (one, other))
        rounds.append((first, second))
    return rounds


def _refuse_other_work(rounds: Rounds) -> None:
    """Two sides that did the same have the same gradient norms, but for rounding and learning rates."""
    for one, other in rounds:
        assert abs(one["grad_norm"] / other["grad_norm"] - 1) < 1e-2, (one, other)


def _median_s(rounds: Rounds, at: int) -> float:
    """Of one step of the first (0) or second (1) side."""
    return statistics.median(float(answers[at]["seconds"]) for answers in rounds)


def _ratio(rounds: Rounds) -> float:
    """How many times faster the first side is."""
    return statistics.median(float(other["seconds"] / one["seconds"]) for one, other in rounds)


def _on_off(what: str, rounds: Rounds) -> Row:
    return {"what": what, "on_s": _median_s(rounds, 0), "off_s": _median_s(rounds, 1), "times faster": _ratio(rounds)}
