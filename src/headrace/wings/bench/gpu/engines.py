"""An engine on the device, opened as a run opens it but in this process, and the measurement of its decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.versions import INITIAL
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine, WeightReceiver
from headrace.engine.native.swaps import LoadedWeights
from headrace.models import ModelConfig, load_model
from headrace.models.devices import use
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.plan.catalogue.shape import ModelShape
from headrace.wings.plan.costs import Roofline

STEP_TOKENS = 8192
"""Most tokens of one step of the engine."""
WARM_STEPS = 4
"""Steps of decoding that are not measured, since kernels are compiled and memory is allocated in them."""
PROFILED_STEPS = 4
"""Steps of which the work of the device is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A batch of equal requests."""

    sequences: int
    """Number of requests, which all run at once."""
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens that are decoded in measured steps, at most."""

    @property
    def more(self) -> int:
        """Tokens of a sequence beside its prompt, at most: those of steps in which other prompts are still read, of the
        warm, the measured and the counted steps."""
        reading = -(-self.sequences * self.prompt // (STEP_TOKENS - self.sequences))
        return reading + WARM_STEPS + self.new + PROFILED_STEPS + 4

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.prompt + self.more


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures:
    """What was measured of a batch."""

    prefill_tok_s: float
    """Prompt tokens per second, until every sequence has its first token."""
    step_s: float
    """Median seconds of a step in which every sequence decodes one token."""
    context: float
    """Mean number of cached tokens of a sequence in these steps."""
    work: dict[str, float]
    """Launches, waits and copies of one step."""


def open_engine(
    stage: StageContext, model_dir: Path, dtype: str, load: Load, *, receiver: WeightReceiver | None = None, **more: Any
) -> NativeEngine:
    """Load the model in ``model_dir`` onto the device, and return an engine with room for ``load``, whose first weights
    are committed unless a ``receiver`` is to bring them. ``more`` are further settings of the engine."""
    device = use("engine.device", stage.request.device)
    model = load_model(ModelConfig.model_validate({"path": str(model_dir), "dtype": dtype}), str(device))
    settings = {"max_sequences": load.sequences, "max_step_tokens": STEP_TOKENS, "cache_share": 0.6, **more}
    engine = NativeEngine(
        model, EngineConfig.model_validate(settings), max_context=load.context, receiver=receiver or LoadedWeights(),
        clock=stage.clock,
    )  # fmt: skip
    if receiver is None:
        engine.commit(INITIAL)
        engine.take_swaps()
    return engine


def decode(stage: StageContext, engine: NativeEngine, load: Load, vocab: int, **sampling: Any) -> DecodeFigures:
    """Run ``load`` on the engine, whose vocabulary is ``vocab``, until every sequence decodes, and measure steps from
    then on; the requests are withdrawn at the end. ``sampling`` has fields of the sampling parameters."""
    rng, before = np.random.default_rng(load.sequences), engine.stats().generated_tokens
    ids = list(range(load.sequences))
    start_s = stage.clock.now()
    for number in ids:
        prompt_ids_T = rng.integers(3, vocab, load.prompt).astype(np.int32)
        wanted = Sampling(max_new_tokens=load.more, seed=number, stop_ids=(), **sampling)
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=prompt_ids_T, sampling=wanted))
    while _tokens_of_step(engine) < load.sequences:
        assert engine.has_work(), "the sequences have ended before all of them decoded"
    stage.wait()
    prefill_s = stage.clock.now() - start_s
    for _ in range(WARM_STEPS):
        engine.step()
    first = (engine.stats().generated_tokens - before) / load.sequences
    times_s = [stage.timed(engine.step) for _ in range(load.new)]
    counted = stage.work.count(lambda: [engine.step() for _ in range(PROFILED_STEPS)])
    engine.abort(ids)
    return DecodeFigures(
        prefill_tok_s=load.sequences * load.prompt / prefill_s,
        step_s=float(np.median(times_s)),
        context=load.prompt + first + load.new / 2,
        work={kind: number / PROFILED_STEPS for kind, number in counted.items()},
    )


def _tokens_of_step(engine: NativeEngine) -> int:
    """Make a step of the engine, and return how many tokens it has sampled: one for each sequence whose prompt has been
    read."""
    before = engine.stats().generated_tokens
    engine.step()
    return engine.stats().generated_tokens - before


def floor_s(sizes: ModelShape, figures: DecodeFigures, load: Load, ceilings: dict[str, float], itemsize: int) -> float:
    """Return the least seconds of a step: the longer of the times to read all weights and the cache at the measured
    rate of copies within the device, and to compute at the measured rate of products. 0 where these were not
    measured."""
    bandwidth, flops = ceilings.get("copy_device_gb_s", 0.0) * 1e9, ceilings.get("product_bfloat16_tflops", 0.0) * 1e12
    if not bandwidth or not flops:
        return 0.0
    chosen = sizes.expert_params * sizes.expert_share
    model = Roofline(
        weight_bytes=(sizes.active - chosen) * itemsize,
        expert_bytes=float(sizes.expert_params * itemsize),
        expert_share=sizes.expert_share,
        kv_bytes=float(sizes.kv_numbers * itemsize),
        flop_per_token=2.0 * sizes.active,
        bandwidth=bandwidth,
        flops=flops,
    )
    return model.step_s(load.sequences, load.sequences * figures.context)
