"""The worker process of the engine benchmark, which measures one engine, called a *side* of the comparison.

    python -m headrace.wings.bench.engine_worker '{"side": "native", "model": DIR, "threads": 2}'

Every request is a JSON object on one line of the standard input, and every answer a JSON object ``{"ok": ANSWER}`` on
one line of the standard output. Other lines of the output are log messages. The parent process measures the time of
whole requests; this process measures times that need more precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from headrace.base.clock import RealClock
from headrace.base.environ import shared_memory_root
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.versions import INITIAL
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine, WeightReceiver
from headrace.engine.native.swaps import LoadedWeights
from headrace.learner.products import product
from headrace.models import ModelConfig, load_model
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver
from headrace.wings.bench.base import shortest_s
from headrace.wings.bench.engine_peers import Side, answer_requests

MAX_CONTEXT = 1024
"""The largest number of tokens of a sequence."""
BATCH = 64
"""The largest number of running sequences on every side."""

Request = dict[str, Any]
Answer = dict[str, Any]


class NativeSide:
    """The embedded engine with fixed weights, which are loaded once, as in ``headrace serve``."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """The number format of the weights and of the cache."""

    def __init__(self, model_dir: str) -> None:
        """Load the model in ``model_dir``, open an engine for it, and commit the first weights. Hooks measure the time
        in forward passes."""
        self._clock = RealClock()
        self._model = load_model(ModelConfig(path=model_dir, dtype=self.dtype))
        config = EngineConfig(max_sequences=BATCH, max_new_tokens=MAX_CONTEXT)
        receiver = self._receiver()
        self._engine = NativeEngine(
            self._model, config, max_context=MAX_CONTEXT, receiver=receiver, clock=self._clock
        )  # fmt: skip
        self._next_id = 0
        """The id of the next request to the engine."""
        loaded = kernels(self._model.dtype)
        self._unit = loaded.unit if isinstance(loaded, Kernels) else ""
        """What multiplies in the kernels for this number format, whether the model runs on them or not; empty: there
        are no kernels."""
        self._first_commit()
        self._forward_s = self._entered_s = 0.0
        """The total time in forward passes of the model in the present request, in seconds."""
        self._model.register_forward_pre_hook(self._enter)
        self._model.register_forward_hook(self._leave)

    def handle(self, request: Request) -> Answer:
        """Handle one request of the benchmark and return the figures: measure the machine's rates (``matrix_size``),
        touch all memory of the cache (``fill_cache``), or sample answers to ``prompts``. Times are totals of this
        request, in seconds: ``busy_s`` in steps of the engine, ``forward_s`` within the model's forward passes."""
        if "matrix_size" in request:
            return self._machine_rates(request)
        if "fill_cache" in request:
            cache = self._engine._cache
            cache.clear(range(cache.num_blocks))
            return {}
        assert "commits" not in request, "these weights never change: send this to the side 'fed'"
        self._add(request)
        before, self._forward_s = self._engine.stats(), 0.0
        while self._engine.has_work():
            self._engine.step()
        stats = self._engine.stats()
        return {
            "tokens": stats.generated_tokens - before.generated_tokens,
            "steps": stats.steps - before.steps,
            "busy_s": stats.busy_s - before.busy_s,
            "forward_s": self._forward_s,
            "cache_bytes": stats.cache_bytes,
            "unit": self._unit,
        }

    def _receiver(self) -> WeightReceiver:
        """Return the receiver of the engine's weights; in this class, a receiver of the loaded weights, which never
        change."""
        return LoadedWeights()

    def _first_commit(self) -> None:
        """Commit the loaded weights as version 0, and discard the record of that commit."""
        self._engine.commit(INITIAL)
        self._engine.take_swaps()

    def _machine_rates(self, request: Request) -> Answer:
        """Measure the highest rates of this machine: of float32 products of square matrices with ``matrix_size`` rows,
        and of copies of ``copied_bytes`` from memory to memory. Return operations per second, and bytes per second;
        bytes that are read and bytes that are written are both counted."""
        size, num_bytes = request["matrix_size"], request["copied_bytes"]
        left, right = (torch.full((size, size), 0.5) for _ in range(2))
        source = torch.ones(num_bytes // 4)
        target = torch.empty_like(source)
        products_s = shortest_s(lambda: product(left, right), 10)
        copies_s = shortest_s(lambda: target.copy_(source), 10)
        return {"flop_per_s": 2 * size**3 / products_s, "bytes_per_s": 2 * num_bytes / copies_s}

    def _add(self, request: Request) -> None:
        """Queue the prompts of a request, each with the length of its answer in tokens."""
        for prompt, length in zip(request["prompts"], request["lengths"], strict=True):
            sampling = Sampling(max_new_tokens=length, seed=self._next_id, **request.get("sampling", {}))
            prompt_ids_T = np.array(prompt, np.int32)
            self._engine.add(
                GenerateRequest(request_id=self._next_id, prompt_ids_T=prompt_ids_T, sampling=sampling)
            )  # fmt: skip
            self._next_id += 1

    def _enter(self, *_: object) -> None:
        """Store the time at which a forward pass begins; a hook of the model."""
        self._entered_s = self._clock.now()
        """The time at which the present forward pass began."""

    def _leave(self, *_: object) -> None:
        """Add the time of the forward pass that ends to the total; a hook of the model."""
        self._forward_s += self._clock.now() - self._entered_s


class NativeSideInBfloat16(NativeSide):
    """The embedded engine with fixed weights in bfloat16."""

    dtype = "bfloat16"


class NativeSideWithSync(NativeSide):
    """The embedded engine as in a run: new weights arrive through shared memory, which this process also publishes."""

    def handle(self, request: Request) -> Answer:
        """Handle one request like the base class; with the key ``commits``, measure commits while sequences decode."""
        return self._commits(request) if "commits" in request else super().handle(request)

    def _receiver(self) -> WeightReceiver:
        """Return a receiver of weights through shared memory, after the model's weights were copied to both slots of
        its publisher."""
        tensors = weight_tensors(self._model)
        path = shared_memory_root() / f"headrace-bench-{os.getpid()}"
        self._publisher = make_publisher(Route(address=str(path)), tensors)
        for slot in (0, 1):
            self._publisher.copy(slot)
        return make_receiver(Route(), tensors)

    def _first_commit(self) -> None:
        """Commit versions 0 and 1, so that both slots of the shared memory are in use."""
        self._version = -1
        for _ in (0, 1):  # the second commit frees the memory into which the model was loaded, as in a run
            self._commit()

    def close(self) -> None:
        """Remove the shared memory."""
        self._publisher.close()

    def _commits(self, request: Request) -> Answer:
        """Make ``request["commits"]`` commits, one after each step of a full batch; the batch is added again when it
        has ended. Return the gap of each commit in seconds, and the mean number of running sequences."""
        gaps_s: list[float] = []
        running = 0
        for _ in range(request["commits"]):
            if not self._engine.has_work():
                self._add(request)
            self._engine.step()
            running += self._engine.stats().running
            gaps_s += self._commit()
        while self._engine.has_work():
            self._engine.step()
        return {"gaps_s": gaps_s, "mean_running": running / max(len(gaps_s), 1)}

    def _commit(self) -> list[float]:
        """Stage and commit the next version, whose weights are the same as before. Return a list of one element, the
        commit gap in seconds."""
        self._version += 1
        self._engine.stage(self._publisher.announce(self._version, self._version % 2))
        self._engine.commit(self._version)
        return [swap.gap_s for swap in self._engine.take_swaps()]


class GenerateSide:
    """The method ``generate`` of transformers, which runs a batch until its longest sequence ends."""

    def __init__(self, model_dir: str) -> None:
        """Load the model in ``model_dir`` with transformers."""
        self._model = _load_transformers(model_dir)

    @torch.no_grad()
    def handle(self, request: Request) -> Answer:
        """Sample the answers of a request in batches of :data:`BATCH`. Return the number of requested tokens: tokens
        beyond the length of a shorter answer do not count."""
        tokens = 0
        for start in range(0, len(request["lengths"]), BATCH):
            lengths = request["lengths"][start : start + BATCH]
            ids = torch.tensor(request["prompts"][start : start + BATCH])
            config = _settings(self._model, max(lengths), eos=None)
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert out.shape[1] == ids.shape[1] + max(lengths)
            tokens += sum(lengths)
        return {"tokens": tokens}


class ContinuousBatchingSide:
    """Continuous batching of transformers, with one manager for all requests; all answers of a request must have the
    same length."""

    def __init__(self, model_dir: str) -> None:
        """Load the model in ``model_dir`` with transformers."""
        self._model = _load_transformers(model_dir)
        # by default the cache takes nearly all free memory; a tenth is many times what a request needs
        self._cache = ContinuousBatchingConfig(max_memory_percent=0.1)
        """The settings of transformers' cache of keys and values."""

    @torch.no_grad()
    def handle(self, request: Request) -> Answer:
        """Sample the answers of a request, which all have the length of the first answer, with transformers' continuous
        batching. Return the number of tokens."""
        # no token has the id -1, so no sequence ends early
        config = _settings(self._model, request["lengths"][0], eos=-1)
        out = self._model.generate_batch(
            request["prompts"],
            generation_config=config,
            continuous_batching_config=self._cache,
            progress_bar=False,
            persistent_manager=True,
        )
        return {"tokens": sum(len(one.generated_tokens) for one in out.values())}


SIDES: dict[str, Callable[[str], Side]] = {
    "native": NativeSide, "bfloat16": NativeSideInBfloat16, "fed": NativeSideWithSync, "generate": GenerateSide,
    "continuous": ContinuousBatchingSide,
}  # fmt: skip
"""The class of each side, by its name. It is called with the directory of a model."""


def _load_transformers(model_dir: str) -> PreTrainedModel:
    """Load a model with transformers alone, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        Path(model_dir), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return model


def _settings(model: PreTrainedModel, max_new_tokens: int, *, eos: int | None) -> GenerationConfig:
    """Return the settings of transformers for plain sampling at temperature 1 of exactly ``max_new_tokens`` tokens.
    ``eos`` is the id of the end-of-sequence token; ``None``, or an id that no token has, so that no sequence ends
    early."""
    model.generation_config.eos_token_id = eos
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos,
        pad_token_id=model.config.pad_token_id,
    )  # fmt: skip


if __name__ == "__main__":
    answer_requests(lambda spec: SIDES[spec["side"]](spec["model"]))
