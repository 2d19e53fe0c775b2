"""The stage ``engine``: the decoding speed of the native engine compared with the limits of memory and matrix products
(the *roofline*), the work of the device in a step, and the memory compared with the planner's estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.engine.native import NativeEngine
from headrace.wings.bench.base import at_least
from headrace.wings.bench.gpu.base import GIB, StageContext
from headrace.wings.bench.gpu.engines import Load, decode, floor_s, open_engine
from headrace.wings.bench.gpu.shapes import LARGE, MEASURED, SMALL, find_model, write_model

ROOFLINE = 0.6
"""The target fraction of the roofline, for the models of :data:`~.shapes.MEASURED`."""
DTYPE = "bfloat16"
BATCH = 256
"""The number of sequences of a full batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """One measurement of the engine: a model and a batch of requests."""

    model: str
    load: Load
    needs_s: float
    """The duration of the measurement on a fast GPU, with the creation of the model, in seconds."""
    has_target: bool = False
    """True if the fraction of the roofline has a target."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the sampling parameters that differ from their defaults."""


CASES = (
    EngineCase(model=MEASURED[0], load=Load(sequences=1, prompt=960, new=64), needs_s=10),
    *(
        EngineCase(model=name, load=Load(sequences=BATCH, prompt=960, new=64), needs_s=15, has_target=True)
        for name in MEASURED
    ),
    *(EngineCase(model=SMALL, load=Load(sequences=n, prompt=960, new=64), needs_s=6) for n in (1, 16, 64, BATCH)),
    EngineCase(model=SMALL, load=Load(sequences=64, prompt=960, new=64), needs_s=6, sampling={"top_p": 0.95}),
    *(EngineCase(model=LARGE, load=Load(sequences=n, prompt=960, new=32), needs_s=25) for n in (64, BATCH)),
    EngineCase(model=SMALL, load=Load(sequences=16, prompt=8_000, new=32), needs_s=10),
    EngineCase(model=SMALL, load=Load(sequences=4, prompt=32_000, new=32), needs_s=15),
)
"""The measurements, the most important first."""
TINY = (
    EngineCase(model=MEASURED[0], load=Load(sequences=1, prompt=20, new=3), needs_s=0),
    EngineCase(model=MEASURED[0], load=Load(sequences=4, prompt=20, new=3), needs_s=0, has_target=True),
    EngineCase(model=SMALL, load=Load(sequences=2, prompt=40, new=3), needs_s=0, sampling={"top_p": 0.95}),
)
"""The measurements with ``--pretend``."""


def run(stage: StageContext) -> None:
    """Measure all cases for which there is time. The first case, a step of one sequence, also yields the overhead of a
    step, its time beyond the lower limit, which is a figure of its own for the planner. ``stage`` records the
    results."""
    overhead: dict[str, float] = {}
    for case in TINY if stage.pretend else CASES:
        name = _name(case)
        stage.attempt(name, partial(_measure, stage, case, name, overhead), needs_s=case.needs_s)


def _name(case: EngineCase) -> str:
    """Return the name of a measurement: model, batch, and sampling options."""
    options = "".join(f", {key} {value}" for key, value in case.sampling.items())
    return f"{case.model}, {case.load.sequences} x {case.load.prompt}{options}"


def _measure(stage: StageContext, case: EngineCase, name: str, overhead: dict[str, float]) -> None:
    """Open an engine, decode, and record the figures of one case. The first case stores the overhead of a step in
    ``overhead``, and later cases read it there. ``stage`` records the figures under ``name``."""
    sizes = find_model(case.model, pretend=stage.pretend).sizes
    folder = write_model(stage, case.model, DTYPE)
    torch.cuda.reset_peak_memory_stats()
    engine = open_engine(stage, folder, DTYPE, case.load)
    vocab = find_model(case.model, pretend=stage.pretend).settings["vocab_size"]
    figures = decode(stage, engine, case.load, vocab, **case.sampling)
    floor_step_s = floor_s(sizes, figures, case.load, stage.request.ceilings, 2)
    share = floor_step_s / figures.step_s
    tok_s = case.load.sequences / figures.step_s
    stage.add_row(
        what=name, tok_s=tok_s, step_ms=figures.step_s * 1e3, floor_ms=floor_step_s * 1e3, floor_by_step=share,
        prefill_tok_s=figures.prefill_tok_s, context=figures.context, **figures.work, **_memory(engine, sizes.params),
    )  # fmt: skip
    if case.has_target and floor_step_s:
        target = at_least(f"engine, {name}: floor of a step by the step", share, ROOFLINE, "fraction")
        stage.add_target(target, measured=True)
        share_without_overhead = floor_step_s / max(floor_step_s, figures.step_s - overhead.get("overhead_s", 0.0))
        stage.add_figures(**{f"engine {case.model}": tok_s, "decode_share": share_without_overhead})
    if not overhead and floor_step_s:
        overhead["overhead_s"] = max(0.0, figures.step_s - floor_step_s)
        stage.add_figures(**overhead)


def _memory(engine: NativeEngine, params: int) -> dict[str, float]:
    """Return columns with the peak of the device's memory, also divided by the planned memory: one copy of the weights,
    and the cache."""
    peak, cache = torch.cuda.max_memory_allocated(), engine.stats().cache_bytes
    planned = 2 * params + cache
    return {"peak_gib": peak / GIB, "cache_gib": cache / GIB, "peak_by_plan": peak / planned}
