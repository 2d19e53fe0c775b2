"""The base models of a server, each with its training computation, its engine and its limits. A base is a model on the
disk. Clients train adapters on it, or one client at a time trains all its weights.

names of the clients ──▶ ServedBase ─┬─▶ training: FrozenBase ──▶ compute ◀── memory shared ─┐
                                     └─▶ sampling: engine, sampler weights ──▶ its twin ◀────┘

The twin is a second module that shares the tensors of the first, so that the engine and the training can add different
hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.base.clock import Clock
from headrace.base.types.versions import INITIAL
from headrace.engine.native import NativeEngine
from headrace.engine.native.swaps import LoadedWeights
from headrace.launch.inprocess import LocalEngine, LocalEngineConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import use_device
from headrace.models.endings import stop_ids
from headrace.models.heads import wanted_head
from headrace.models.load import load_model, load_tokenizer
from headrace.models.multilora import MultiLora
from headrace.models.paged.base import BLOCK
from headrace.models.settings import context_length
from headrace.wings.tinker.compute import BaseCompute, FrozenBase
from headrace.wings.tinker.config import BaseConfig, TinkerConfig
from headrace.wings.tinker.files import WeightState, read_state
from headrace.wings.tinker.samplers import AdapterPasses, SamplerWeights, WholePasses
from headrace.wings.tinker.sampling import SampleLimits
from headrace.wings.tinker.weights import WholeKind

TAIL_BYTES = 2**16
"""The number of bytes at the end of each weights file that :func:`fingerprint` hashes, to distinguish checkpoints of
the same shape."""

MOST_WHOLE_SAMPLERS = 2
"""The largest number of samplers with whole weights of one base that sample at once or stay in memory; each needs the
memory of a whole model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedBase:
    """One base model of a server, ready to train and to sample. :meth:`LoadedBase.start_engine` creates it, and the
    service looks it up by the name in a client's request."""

    names: tuple[str, ...]
    """The names under which clients request this base."""
    training: FrozenBase
    """The frozen model, and the training computation with the weights of any client."""
    engine: LocalEngine
    """The engine that samples from the base and from the weights of its sampling sessions."""
    weights: SamplerWeights
    """The weights of all sampling sessions of this base, which the engine reads as its adapters."""
    limits: SampleLimits
    """The limits for sampling requests: vocabulary size, context length and stop tokens."""

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers, such as ``Qwen3ForCausalLM``."""
        return type(self.training.compute.model).__name__

    def read_weights(self, directory: Path) -> WeightState:
        """Read the trained weights in ``directory`` for a sampling session, onto the device of this base, without
        gradients and without the optimizer's state. Raises the same errors as
        :func:`~headrace.wings.tinker.files.read_state`."""
        compute = self.training.compute
        return read_state(directory, compute.kind, compute.model.device, trained=False, moments=False)


class LoadedBase:
    """The loaded model and the engine of one base. The constructor takes long, so it runs in a thread while the server
    already listens; :meth:`start_engine` then starts it in the event loop."""

    def __init__(self, base: BaseConfig, config: TinkerConfig, clock: Clock) -> None:
        """Load the model that ``base`` names, and create its training computation and its engine, which is not started
        yet. ``config`` has the settings of the server; the limits of the cache and of resident samplers are divided
        equally among its bases. ``clock`` gives the time to the engine."""
        self._base, self._clock = base, clock
        path, device = str(base.path), str(use_device("--device", config.device))
        tokenizer, model = load_tokenizer(path), load_model(ModelConfig(path=path), device)
        model.requires_grad_(requires_grad=False)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, memo=shared)
        compute = BaseCompute(model, tokens_per_microbatch=config.tokens_per_microbatch, whole=base.whole)
        self.training = FrozenBase(
            path=base.path, compute=compute, max_rank=config.max_rank, max_context=context_length(path)
        )
        passes = WholePasses(WholeKind(twin)) if base.whole else AdapterPasses(MultiLora(twin))
        resident = MOST_WHOLE_SAMPLERS if base.whole else max(1, config.max_resident // len(config.bases))
        self._weights = SamplerWeights(passes, resident)
        """The weights of all sampling sessions, which the engine uses as adapters."""
        max_context = config.engine.max_context or self.training.max_context
        engine = config.engine.on(device, shared=True)
        if base.whole:  # the weights change between passes, and the kernels would use packed copies of old weights
            engine = engine.model_copy(update={"kernels": "off"})
        self._core = NativeEngine(
            twin,
            engine.model_copy(update={"cache_share": (engine.cache_share or 1.0) / len(config.bases)}),
            max_context=max_context,
            receiver=LoadedWeights(),
            clock=clock,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            adapters=self._weights,
            head=wanted_head(engine.speculation, ModelConfig(path=path), model),
        )
        """The engine, which is not started yet."""
        self._core.commit(INITIAL)
        context = min(max_context, self._core.stats().cache_blocks * BLOCK)
        ends = stop_ids(path, tokenizer.eos_token_id)
        self._limits = SampleLimits(vocab_size=compute.vocab_size, max_context=context, stop_ids=ends)
        """The limits of sampling requests to this base."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients request this base."""
        return self._base.names

    async def start_engine(self, stack: AsyncExitStack, max_samples: int) -> ServedBase:
        """Start the engine, and return the base, ready for requests. The engine is stopped when ``stack`` is closed.
        ``max_samples`` is the largest number of samples that the engine runs or queues at once."""
        limits = LocalEngineConfig(max_requests=max_samples)
        return ServedBase(
            names=self.names,
            training=self.training,
            engine=await stack.enter_async_context(LocalEngine(self._core, clock=self._clock, config=limits)),
            weights=self._weights,
            limits=self._limits,
        )


def fingerprint(path: Path) -> str:
    """Return a hash that identifies the model in the directory ``path``. It covers the name, the size and the last
    :data:`TAIL_BYTES` of ``config.json`` and of each weights file. The server compares the hash at every start, so that
    adapters are never trained further on another model."""
    hashed = xxhash.xxh3_128()
    for file in sorted([*path.glob("config.json"), *path.glob("*.safetensors")]):
        size = file.stat().st_size
        hashed.update(f"{file.name} {size} ".encode())
        with file.open("rb") as reading:
            reading.seek(max(0, size - TAIL_BYTES))
            hashed.update(reading.read())
    return hashed.hexdigest()


def by_name(bases: Iterable[ServedBase]) -> dict[str, ServedBase]:
    """Return the bases by name; a base has one entry for each of its names."""
    return {name: base for base in bases for name in base.names}
