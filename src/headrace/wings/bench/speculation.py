"""Speculation in the embedded engine, from history and from prediction heads: an engine with speculation compared with
an engine without it, on the same requests. Speculation computes *drafts*: tokens that are likely to be sampled next.

Both engines run in this process and alternate every tenth of a second, so that other load on the machine affects both.
Each samples answers to the same rows twice, with other seeds the second time: two *visits*. The answers of both engines
must be equal. With a third model, with random weights, no draft is ever accepted, which shows the cost of speculation.

Models with a prediction head are Qwen 2 with the head of MiMo. A head that is trained on their texts is compared with
history alone, on rows that are new to the engine; an untrained head, whose drafts are seldom accepted, on random
weights.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import INITIAL
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.swaps import LoadedWeights
from headrace.models import ModelConfig, load_model
from headrace.models.heads import wanted_head
from headrace.models.tiny import make_tiny
from headrace.wings.bench.base import Measurement, Report, Row, Target, at_least, at_most, join_report
from headrace.wings.bench.engine import LARGE, SMALL
from headrace.wings.bench.speculation_heads import add_head, train_head, widen_head
from headrace.wings.bench.speculation_rows import (
    ANSWER,
    BATCH,
    PROMPT,
    STEPS,
    PhraseBook,
    draw_demonstrations,
    train_model,
    widen_model,
)

Way = Literal["off", "history", "heads"]
"""The values of ``engine.speculation``."""
_TURN_S = 0.1
"""The time for which an engine works before the other engine works, in seconds."""
ROUNDS = 3
TEMPERATURE = 0.7
"""The sampling temperature of the trained model, at which −log μ of its tokens is 0.15 nats on average."""
BATCHES = {8: 1.3, 64: 1.15}
"""The measured numbers of running sequences, each with the target speed of a second visit, relative to the same engine
without speculation."""


HEADED, HEAD_STEPS = "qwen2", 150
"""The kind of the models with a prediction head, and the number of training steps of the head."""
HEAD_BATCHES = {8: 1.0, 64: 0.97}
"""The measured numbers of running sequences of models with a prediction head, each with the target speed of a first
visit, relative to the same engine without speculation."""


@dataclass(slots=True, kw_only=True)
class _Side:
    """One of the two engines that are compared, with its working time and its tokens in the present visit."""

    engine: NativeEngine
    seconds: float = 0.0
    """The working time of the engine in the present visit."""
    parts: dict[int, list[Tokens]] = field(default_factory=dict)
    """The chunks of tokens of each request, in order, by the id of the request."""

    def work(self, clock: RealClock) -> None:
        """Run steps of the engine for :data:`_TURN_S`, measured by ``clock``, or until it has no more work."""
        start_s = clock.now()
        while self.engine.has_work() and clock.now() - start_s < _TURN_S:
            for chunk in self.engine.step():
                self.parts.setdefault(chunk.request_id, []).append(chunk.tokens)
        self.seconds += clock.now() - start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The measurements of one visit by both engines."""

    speed: float
    """The tokens per second with speculation, divided by the tokens per second without it."""
    passes_by_token: float
    """The number of forward passes of a sequence with speculation, divided by its number of tokens."""
    accepted_frac: float
    """The fraction of the drafted tokens that were accepted; 0 without drafts."""
    tok_s: float
    """The tokens per second with speculation."""
    nats_by_token: float
    """The mean of −log μ over the tokens."""


def _engine(model_dir: Path, batch: int, speculation: Way) -> NativeEngine:
    """Return an engine that serves the model in ``model_dir`` to at most ``batch`` running sequences, with this kind of
    ``speculation``."""
    config, read = EngineConfig(max_sequences=batch, max_new_tokens=ANSWER, speculation=speculation), str(model_dir)
    model = load_model(ModelConfig(path=read))
    engine = NativeEngine(
        model,
        config,
        max_context=PROMPT + ANSWER,
        receiver=LoadedWeights(),
        clock=RealClock(),
        head=wanted_head(speculation, ModelConfig(path=read), model),
    )
    engine.commit(INITIAL)
    engine.take_swaps()
    return engine


def _run_visit(sides: tuple[_Side, _Side], number: int, num_rows: int, temperature: float) -> _Comparison:
    """Sample an answer to each of ``num_rows`` rows with both engines at this ``temperature``, alternately, with the
    seeds of visit ``number``, and return the measurements. The first of ``sides`` is the engine without speculation.
    Raises ``RuntimeError`` if their tokens or logprobs differ."""
    clock, rng, book = RealClock(), np.random.default_rng(0), PhraseBook()
    prompts = [book.text(rng, PROMPT) for _ in range(num_rows)]
    before = sides[1].engine.stats()
    for side in sides:
        side.seconds, side.parts = 0.0, {}
        for row, prompt_ids_T in enumerate(prompts):
            seed = number * num_rows + row
            sampling = Sampling(max_new_tokens=ANSWER, temperature=temperature, seed=seed)
            side.engine.add(GenerateRequest(request_id=row, prompt_ids_T=prompt_ids_T, sampling=sampling))
    while any(side.engine.has_work() for side in sides):
        for side in sides:
            side.work(clock)
    plain, drafted = ([Tokens.concat(side.parts[row]) for row in range(num_rows)] for side in sides)
    for expected, found in zip(plain, drafted, strict=True):
        if (expected.ids_T != found.ids_T).any() or (expected.logprobs_T != found.logprobs_T).any():
            raise RuntimeError("an answer with speculation differs from the one without")
    after = sides[1].engine.stats()
    tokens = after.generated_tokens - before.generated_tokens
    num_drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return _Comparison(
        speed=sides[0].seconds / sides[1].seconds,
        passes_by_token=1 - accepted / tokens,
        accepted_frac=accepted / num_drafted if num_drafted else 0.0,
        tok_s=tokens / sides[1].seconds,
        nats_by_token=-float(np.concatenate([each.logprobs_T for each in drafted]).mean()),
    )


def _measure(
    model_dir: Path,
    batch: int,
    *,
    num_rows: int,
    rounds: int,
    num_visits: int,
    temperature: float,
    way: Way = "history",
) -> list[list[_Comparison]]:
    """Return for each of ``num_visits`` visits the measurements of all rounds, with drafts found in this ``way``. Every
    round begins with new engines, which have no history."""
    visits: list[list[_Comparison]] = [[] for _ in range(num_visits)]
    for turn in range(rounds):
        sides = _Side(engine=_engine(model_dir, batch, "off")), _Side(engine=_engine(model_dir, batch, way))
        for number, found in enumerate(visits):
            found.append(_run_visit(sides, num_visits * turn + number, num_rows, temperature))
    return visits


def _row(label: str, batch: int, visits: list[_Comparison]) -> Row:
    """Return the row of the report for ``visits``, the measurements of the same visit in all rounds: their medians, and
    the lowest speed."""
    middle = {name: statistics.median(getattr(each, name) for each in visits) for name in _Comparison.__slots__}
    return {"what": label, "batch": batch, **middle, "lowest_speed": min(each.speed for each in visits)}


def measure(on_progress: Callable[[str], None], *, threads: int | None = None, quick: bool = False) -> Report:
    """Measure the speed-up by speculation in a second visit to the same rows, and its cost in a first visit, for 8 and
    64 running sequences, and return the report. ``threads`` is the number of threads (``None``: all cores); with
    ``quick`` everything is small and the figures mean nothing. ``on_progress`` is called with lines of progress."""
    torch.set_num_threads(threads or num_cores())
    rows: list[Row] = []
    targets: list[Target] = []
    size: dict[str, Any] = {"num_rows": 8, "rounds": 1} if quick else {"num_rows": 200, "rounds": ROUNDS}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        small = train_model(directory / "1M", on_progress, steps=20 if quick else STEPS)
        models = {"1M": small} if quick else {"1M": small, "28M": widen_model(small, directory / "28M")}
        for name, model_dir in models.items():
            spec = SMALL if name == "1M" else LARGE
            blank = make_tiny(directory / f"{name}-random", replace(spec, seed=1))
            for batch, least in BATCHES.items():
                on_progress(f"{name}, batch {batch}")
                first, second = _measure(model_dir, batch, num_visits=2, temperature=TEMPERATURE, **size)
                (nothing,) = _measure(blank, batch, num_visits=1, temperature=1.0, **size)
                what = f"{name}, batch {batch}"
                rows += [
                    _row(f"{name}, first visit", batch, first),
                    _row(f"{name}, second visit", batch, second),
                    _row(f"{name}, random weights", batch, nothing),
                ]
                targets += [
                    at_most(f"{what}, second visit, passes by token", rows[-2]["passes_by_token"], 0.6, "ratio"),
                    at_least(f"{what}, second visit, tok/s by without", rows[-2]["speed"], least, "ratio"),
                    at_least(f"{what}, first visit, tok/s by without", rows[-3]["speed"], 0.97, "ratio"),
                    at_least(f"{what}, nothing to draft, tok/s by without", rows[-1]["speed"], 0.97, "ratio"),
                ]
        return join_report([(rows, targets), _measure_heads(directory, on_progress, size=size, quick=quick)])


def _measure_heads(
    directory: Path, on_progress: Callable[[str], None], *, size: dict[str, Any], quick: bool
) -> Measurement:
    """Measure drafts from prediction heads, on rows that are seen first, and return the rows and targets. Models are
    written into ``directory``; ``size`` are the numbers of rows and rounds, and with ``quick`` training is
    short. ``on_progress`` is called with lines of progress."""
    rows: list[Row] = []
    targets: list[Target] = []
    steps, head_steps = (20, 2) if quick else (STEPS, HEAD_STEPS)
    rng = np.random.default_rng(2)
    small = train_model(directory / "1M-heads", on_progress, kind=HEADED, steps=steps)
    train_head(add_head(small), (draw_demonstrations(rng, BATCH) for _ in range(head_steps)), on_progress)
    models = {"1M": (small, SMALL)}
    if not quick:
        models["28M"] = widen_head(small, widen_model(small, directory / "28M-heads")), LARGE
    for name, (model_dir, spec) in models.items():
        blank = add_head(make_tiny(directory / f"{name}-heads-random", replace(spec, kind=HEADED, seed=1)), noise=0.2)
        for batch, least in HEAD_BATCHES.items():
            what = f"{name} with a head, batch {batch}"
            on_progress(what)
            ways: tuple[Way, Way] = ("history", "heads")
            (alone,), (drafted,) = (
                _measure(model_dir, batch, num_visits=1, temperature=TEMPERATURE, way=way, **size) for way in ways
            )
            (nothing,) = _measure(blank, batch, num_visits=1, temperature=1.0, way="heads", **size)
            rows += [
                _row(f"{name} with a head, history alone, first visit", batch, alone),
                _row(f"{name} with a head, first visit", batch, drafted),
                _row(f"{name} with an untrained head, random weights", batch, nothing),
            ]
            targets += [
                at_least(f"{what}, first visit, tok/s by without", rows[-2]["speed"], least, "ratio"),
                at_least(f"{what}, untrained, tok/s by without", rows[-1]["speed"], 0.97, "ratio"),
            ]
    return rows, targets
