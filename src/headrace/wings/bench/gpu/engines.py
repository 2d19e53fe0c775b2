"""Functions of the stages that measure engines: open a native engine on the device, in this process, measure its
decoding, and compute the lower limit of a step."""

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
from headrace.models.devices import use_device
from headrace.models.shape import ModelShape
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.plan.costs import Roofline

STEP_TOKENS = 8192
"""The largest number of tokens in one step of the engine."""
WARM_STEPS = 4
"""The number of decoding steps before the measurement, in which kernels are compiled and memory is allocated."""
PROFILED_STEPS = 4
"""The number of steps in which the work of the device is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A batch of requests of equal size."""

    sequences: int
    """The number of requests, which all run at once."""
    prompt: int
    """The number of tokens of each prompt."""
    new: int
    """The largest number of tokens of a sequence that are decoded in measured steps."""

    @property
    def more(self) -> int:
        """The largest number of sampled tokens of a sequence: in steps that still read other prompts, and in the warm,
        the measured and the counted steps."""
        reading = -(-self.sequences * self.prompt // (STEP_TOKENS - self.sequences))
        return reading + WARM_STEPS + self.new + PROFILED_STEPS + 4

    @property
    def context(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.prompt + self.more


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures:
    """The measured figures of a batch."""

    prefill_tok_s: float
    """The prompt tokens per second, until every sequence has its first token."""
    step_s: float
    """The median duration of a step in which every sequence decodes one token, in seconds."""
    context: float
    """The mean number of cached tokens of a sequence in these steps."""
    work: dict[str, float]
    """The numbers of launches, waits and copies of one step, by name."""


def open_engine(
    stage: StageContext, model_dir: Path, dtype: str, load: Load, *, receiver: WeightReceiver | None = None, **more: Any
) -> NativeEngine:
    """Load the model in ``model_dir`` onto the device of ``stage`` in the number format ``dtype``, and return an engine
    with room for ``load``. Its loaded weights are committed as the first version, unless there is a ``receiver``, from
    which the engine then receives its weights. ``more`` are further settings of the engine."""
    device = use_device("engine.device", stage.request.device)
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
    """Run ``load`` on the engine until every sequence decodes, measure the steps after that, and return the figures;
    the requests are aborted at the end. ``vocab`` is the vocabulary size of the model, and ``sampling`` has fields of
    the sampling parameters. ``stage`` measures the time."""
    rng, before = np.random.default_rng(load.sequences), engine.stats().generated_tokens
    ids = list(range(load.sequences))
    start_s = stage.clock.now()
    for number in ids:
        prompt_ids_T = rng.integers(3, vocab, load.prompt).astype(np.int32)
        parameters = Sampling(max_new_tokens=load.more, seed=number, stop_ids=(), **sampling)
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=prompt_ids_T, sampling=parameters))
    while _tokens_of_step(engine) < load.sequences:
        assert engine.has_work(), "the sequences have ended before all of them decoded"
    stage.wait()
    prefill_s = stage.clock.now() - start_s
    for _ in range(WARM_STEPS):
        engine.step()
    first = (engine.stats().generated_tokens - before) / load.sequences
    times_s = [stage.measure_s(engine.step) for _ in range(load.new)]
    counted = stage.work.count(lambda: [engine.step() for _ in range(PROFILED_STEPS)])
    engine.abort(ids)
    return DecodeFigures(
        prefill_tok_s=load.sequences * load.prompt / prefill_s,
        step_s=float(np.median(times_s)),
        context=load.prompt + first + load.new / 2,
        work={kind: number / PROFILED_STEPS for kind, number in counted.items()},
    )


def _tokens_of_step(engine: NativeEngine) -> int:
    """Run a step of the engine, and return the number of tokens that it sampled: one for each sequence whose prompt has
    been read."""
    before = engine.stats().generated_tokens
    engine.step()
    return engine.stats().generated_tokens - before


def floor_s(sizes: ModelShape, figures: DecodeFigures, load: Load, ceilings: dict[str, float], itemsize: int) -> float:
    """Return the lower limit of the duration of a step of ``load``, in seconds, for a model with ``sizes`` whose
    numbers have ``itemsize`` bytes: the time to read all weights and the cache at the rate of copies within the device,
    or the time to compute at the rate of products, whichever is longer. ``ceilings`` are the measured rates, and
    ``figures`` the figures of the measured step. Return 0 if these rates were not measured."""
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
