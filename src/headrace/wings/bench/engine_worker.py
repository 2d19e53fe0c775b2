"""One side of the engine's benchmark, in a process of its own: it does what each line of its input says.

    python -m headrace.wings.bench.engine_worker '{"side": "native", "model": DIR, "threads": 2}'

Every order is a JSON object on one line, and so is every answer, under the key ``ok``. Other lines of the output are
somebody's log. The parent takes the time of whole orders; what needs a finer clock is timed here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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
from headrace.engine.native.fixed import LoadedWeights
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver

MAX_CONTEXT = 1024
BATCH = 64
"""Sequences at once, of every side."""

Order = dict[str, Any]
Answer = dict[str, Any]


class EngineSide(Protocol):
    """What can be measured."""

    def do(self, order: Order) -> Answer:
        """Carry out one order; the answer's ``tokens`` are those that were asked for."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Native:
    """The embedded engine with the weights of its directory, as ``headrace serve`` has it."""

    def __init__(self, model_dir: str) -> None:
        self._clock = RealClock()
        self._model = load_model(ModelConfig(path=model_dir))
        config = EngineConfig(max_sequences=BATCH, max_new_tokens=MAX_CONTEXT)
        receiver = self._receiver()
        self._engine = NativeEngine(
            self._model, config, max_context=MAX_CONTEXT, receiver=receiver, clock=self._clock
        )  # fmt: skip
        self._next_id = 0
        self._begin()
        self._forward_s = self._entered_s = 0.0
        self._model.register_forward_pre_hook(self._enter)
        self._model.register_forward_hook(self._leave)

    def do(self, order: Order) -> Answer:
        if "matrix_size" in order:
            return self._able(order)
        if "fill_cache" in order:
            cache = self._engine._cache
            cache.clear(range(cache.num_blocks))
            return {}
        assert "commits" not in order, "these weights never change: ask the side that is fed"
        self._add(order)
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
        }

    def close(self) -> None:
        """Nothing to do."""

    def _receiver(self) -> WeightReceiver:
        return LoadedWeights()

    def _begin(self) -> None:
        self._engine.commit(INITIAL)
        self._engine.take_swaps()

    def _able(self, order: Order) -> Answer:
        """What the processor can do with nothing in its way: matrix products, and copies from memory to memory."""
        size, num_bytes = order["matrix_size"], order["copied_bytes"]
        left, right, out = (torch.full((size, size), 0.5) for _ in range(3))
        source = torch.ones(num_bytes // 4)
        target = torch.empty_like(source)
        products_s = self._shortest_s(lambda: torch.mm(left, right, out=out))
        copies_s = self._shortest_s(lambda: target.copy_(source))
        return {"flop_per_s": 2 * size**3 / products_s, "bytes_per_s": 2 * num_bytes / copies_s}

    def _shortest_s(self, work: Callable[[], object]) -> float:
        times_s = []
        for _ in range(10):
            start_s = self._clock.now()
            work()
            times_s.append(self._clock.now() - start_s)
        return min(times_s)

    def _add(self, order: Order) -> None:
        for prompt, length in zip(order["prompts"], order["lengths"], strict=True):
            sampling = Sampling(max_new_tokens=length, seed=self._next_id, **order.get("sampling", {}))
            prompt_ids_T = np.array(prompt, np.int32)
            self._engine.add(
                GenerateRequest(request_id=self._next_id, prompt_ids_T=prompt_ids_T, sampling=sampling)
            )  # fmt: skip
            self._next_id += 1

    def _enter(self, *_: object) -> None:
        self._entered_s = self._clock.now()

    def _leave(self, *_: object) -> None:
        self._forward_s += self._clock.now() - self._entered_s


class Fed(Native):
    """The embedded engine as a run has it: new weights come through shared memory."""

    def do(self, order: Order) -> Answer:
        return self._commits(order) if "commits" in order else super().do(order)

    def _receiver(self) -> WeightReceiver:
        tensors = weight_tensors(self._model)
        path = shared_memory_root() / f"headrace-bench-{os.getpid()}"
        self._publisher = make_publisher(Route(address=str(path)), tensors)
        for slot in (0, 1):
            self._publisher.copy(slot)
        return make_receiver(Route(), tensors)

    def _begin(self) -> None:
        self._version = -1
        for _ in (0, 1):  # the second lets go of the memory that the model was loaded into, as in a run
            self._commit()

    def close(self) -> None:
        """Leave no shared memory behind."""
        self._publisher.close()

    def _commits(self, order: Order) -> Answer:
        """Commit again and again between the steps of a full batch; the gaps."""
        gaps_s: list[float] = []
        running = 0
        for _ in range(order["commits"]):
            if not self._engine.has_work():
                self._add(order)
            self._engine.step()
            running += self._engine.stats().running
            gaps_s += self._commit()
        while self._engine.has_work():
            self._engine.step()
        return {"gaps_s": gaps_s, "mean_running": running / max(len(gaps_s), 1)}

    def _commit(self) -> list[float]:
        self._version += 1
        self._engine.stage(self._publisher.announce(self._version, self._version % 2))
        self._engine.commit(self._version)
        return [swap.gap_s for swap in self._engine.take_swaps()]


class TransformersGenerate:
    """``generate`` of transformers; a batch lasts as long as its longest sequence."""

    def __init__(self, model_dir: str) -> None:
        self._model = _plain(model_dir)

    @torch.no_grad()
    def do(self, order: Order) -> Answer:
        tokens = 0
        for start in range(0, len(order["lengths"]), BATCH):
            lengths = order["lengths"][start : start + BATCH]
            ids = torch.tensor(order["prompts"][start : start + BATCH])
            config = _settings(self._model, max(lengths), eos=None)
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert out.shape[1] == ids.shape[1] + max(lengths)
            tokens += sum(lengths)
        return {"tokens": tokens}

    def close(self) -> None:
        """Nothing to do."""


class Continuous:
    """Continuous batching of transformers, its manager kept; the lengths of all orders are equal."""

    def __init__(self, model_dir: str) -> None:
        self._model = _plain(model_dir)
        # it would take nearly all memory that is free; this is many times what an order needs
        self._cache = ContinuousBatchingConfig(max_memory_percent=0.1)

    @torch.no_grad()
    def do(self, order: Order) -> Answer:
        # no token has the id -1, so no sequence ends early
        config = _settings(self._model, order["lengths"][0], eos=-1)
        out = self._model.generate_batch(
            order["prompts"],
            generation_config=config,
            continuous_batching_config=self._cache,
            progress_bar=False,
            persistent_manager=True,
        )
        return {"tokens": sum(len(one.generated_tokens) for one in out.values())}

    def close(self) -> None:
        """Nothing to do."""


SIDES: dict[str, Callable[[str], EngineSide]] = {
    "native": Native, "fed": Fed, "generate": TransformersGenerate, "continuous": Continuous,
}  # fmt: skip


def _plain(model_dir: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        Path(model_dir), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return model


def _settings(model: PreTrainedModel, max_new_tokens: int, *, eos: int | None) -> GenerationConfig:
    model.generation_config.eos_token_id = eos
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos,
        pad_token_id=model.config.pad_token_id,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Serve orders until the input ends."""
    spec = json.loads(arguments[0])
    torch.set_num_threads(spec["threads"])
    side = SIDES[spec["side"]](spec["model"])
    try:
        for line in sys.stdin:
            sys.stdout.write(json.dumps({"ok": side.do(json.loads(line))}) + "\n")
            sys.stdout.flush()
    finally:
        side.close()


if __name__ == "__main__":
    main(sys.argv[1:])
