"""The worker process of the learner benchmark, which measures one implementation, called a *side*.

    python -m headrace.wings.bench.learner_worker '{"side": "learner", "model": DIR, "threads": 2}'

Requests and answers have the format of :mod:`headrace.wings.bench.engine_worker`. Each side imports its dependencies
when it is created, so that the process starts with little memory.

Shape legend: S samples and N tokens of the batch, B samples of a padded batch, L its length, P tokens that carry loss,
C of them at a time, V vocabulary, D hidden size.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from headrace.learner.products import product
from headrace.wings.bench.base import shortest_s
from headrace.wings.bench.engine_peers import Side, answer_requests
from headrace.wings.bench.learner_trees import Draw, Ids, TokenPaths, draw_paths

GROUP = 8
"""The number of samples per prompt, and of rows of a padded batch."""
LR = 1e-6
"""The learning rate, so low that the measurements do not depend on the number of earlier steps."""

Request = dict[str, Any]
Answer = dict[str, Any]


def make_batch(step: int, request: Mapping[str, Any]) -> Batch:
    """Return a batch for training step ``step``: random answers with the lengths ``request["lengths"]`` to prompts of
    ``request["prompt"]`` tokens, one prompt for each group of 8; or the samples that ``request["tree"]`` describes.
    Equal requests yield equal samples at any step."""
    rng = np.random.default_rng(request["seed"])

    def draw(count: int) -> Ids:
        """Return ``count`` random token ids."""
        return rng.integers(3, request["vocab"], count)

    paths = draw_paths(request["tree"], draw) if request.get("tree") else _answers(request, draw)
    lengths_S = np.array([len(ids) for ids in paths.ids_S], np.int32)
    mask_N = np.concatenate(
        [np.arange(length) >= prompt for length, prompt in zip(lengths_S, paths.prompts_S, strict=True)]
    )
    return Batch(
        step=step,
        lengths_S=lengths_S,
        groups_S=np.array(paths.groups_S, np.int32),
        episodes_S=np.arange(len(lengths_S), dtype=np.int32),
        ids_N=np.concatenate(paths.ids_S).astype(np.int32),
        mask_N=mask_N,
        logprobs_N=np.where(mask_N, -np.log(request["vocab"]), 0).astype(np.float32),
        versions_N=np.where(mask_N, step, -1).astype(np.int32),
        advantages_N=np.repeat(rng.normal(size=len(lengths_S)), lengths_S).astype(np.float32),
    )


def _answers(request: Mapping[str, Any], draw: Draw) -> TokenPaths:
    """Return the samples of a request without ``tree``: answers to random prompts, one prompt for each group of 8."""
    groups_S = [place // GROUP for place in range(len(request["lengths"]))]
    prompts = [draw(request["prompt"]) for _ in range(groups_S[-1] + 1)]
    return TokenPaths(
        ids_S=[
            np.concatenate([prompts[group], draw(length)])
            for group, length in zip(groups_S, request["lengths"], strict=True)
        ],
        prompts_S=[request["prompt"]] * len(groups_S),
        groups_S=groups_S,
    )


def memory_bytes(field: str) -> int:
    """Return the memory of this process in bytes: its peak if ``field`` is ``VmHWM``, its current size for ``VmRSS``.

    If ``/proc`` is missing, the result is the peak of ``getrusage`` in both cases.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


class HeadraceSide:
    """Headrace's learner with DAPO's loss. A learner is kept for each combination of model, settings and adapter that
    requests have named."""

    def __init__(self, model_dir: str) -> None:
        """Create the side without a learner. ``model_dir`` is the model of all requests that name no model; the first
        of these requests loads it."""
        from headrace.learner.core import LearnerCore

        self._model_dir = model_dir
        self._clock = RealClock()
        self._cores: dict[str, LearnerCore] = {}
        """The learners, by the model, the settings and the adapter that a request names (JSON)."""
        self._loaded_bytes = 0
        """The memory of this process after the last model was loaded."""

    def handle(self, request: Request) -> Answer:
        """Train one step of Headrace's learner on a random batch, or for a request with ``products`` measure the
        machine's rate of matrix products; return the figures. ``loaded_bytes`` is the memory of the process after the
        model was loaded, ``peak_bytes`` its peak memory so far."""
        if "products" in request:
            return {"flop_per_s": max(self._flop_per_s(*shape) for shape in request["products"])}
        name = json.dumps([request.get(key) for key in ("model", "settings", "lora")])
        if name not in self._cores:
            self._cores[name] = self._create_learner(request)
        core = self._cores[name]
        batch = make_batch(core.version, request)
        if request.get("replay"):
            batch = self._record_routing(batch, request)
        report = core.train(batch)
        return {
            "seconds": report.seconds,
            "grad_norm": report.metrics["grad_norm"],
            "tokens": batch.num_tokens,
            "loaded_bytes": self._loaded_bytes,
            "peak_bytes": memory_bytes("VmHWM"),
        }

    def _create_learner(self, request: Request) -> Any:
        """Return a learner with the model, the settings and the adapter that the request names, and store the memory of
        the process after loading the model."""
        from headrace.algo.config import AlgoConfig
        from headrace.algo.objective import Objective
        from headrace.learner.base import LearnerContext
        from headrace.learner.config import LearnerConfig
        from headrace.learner.core import LearnerCore
        from headrace.models import LoraConfig, ModelConfig, load_model

        path = request.get("model", self._model_dir)
        lora = LoraConfig.model_validate(request["lora"]) if "lora" in request else None
        context = LearnerContext(temperature=1.0, total_steps=1, model_dir=Path(path), clock=self._clock)
        core = LearnerCore(
            load_model(ModelConfig(path=path, lora=lora)),
            LearnerConfig.model_validate({"lr": LR, "share_prefixes": False, **request.get("settings", {})}),
            Objective.build(AlgoConfig.model_validate({"loss": "dapo", "correction": "none"})),
            context,
        )
        self._loaded_bytes = memory_bytes("VmRSS")
        return core

    def _record_routing(self, batch: Batch, request: Request) -> Batch:
        """Return a copy of the batch with recorded routing: the experts that the model of the request, before any
        training, chooses for each token."""
        from headrace.models import ModelConfig, load_model
        from headrace.models.attention import PackedPlan, forward
        from headrace.models.routing import RoutingRecorder, find_routing

        model = load_model(ModelConfig(path=request["model"]))
        routed = find_routing(model)
        assert routed is not None
        recorder = RoutingRecorder(routed)
        recorder.on = True
        with torch.no_grad():
            forward(model, torch.from_numpy(batch.ids_N.astype(np.int64)), PackedPlan(batch.lengths_S.tolist()))
        routing = Routing(known_T=np.ones(batch.num_tokens, bool), experts_RLK=recorder.take())
        return msgspec.structs.replace(batch, routing=routing)

    def _flop_per_s(self, rows: int, inner: int, columns: int) -> float:
        """Return the best rate over 20 products, in operations per second, of the float32 product of a ``rows`` by
        ``inner`` matrix and an ``inner`` by ``columns`` matrix."""
        left, right = torch.full((rows, inner), 0.5), torch.full((inner, columns), 0.5)
        return 2 * rows * inner * columns / shortest_s(lambda: product(left, right), 20)


class PaddedSide:
    """A simple trainer for comparison: transformers on eight samples at a time, in the order of the request, padded on
    the right to the longest sample; log π from the logits of all positions; the same loss and the same AdamW."""

    def __init__(self, model_dir: str) -> None:
        """Load the model in ``model_dir`` with transformers, and create its optimizer."""
        from transformers import AutoModelForCausalLM

        from headrace.learner.config import LearnerConfig
        from headrace.learner.optim import build_optimizer

        self._clock = RealClock()
        self._step = 0
        """The number of training steps so far."""
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )  # fmt: skip
        self._optimizer = build_optimizer(self._model.parameters(), LearnerConfig(lr=LR))
        self._loaded_bytes = memory_bytes("VmRSS")
        """The memory of this process after the model was loaded."""

    def handle(self, request: Request) -> Answer:
        """Train one step of the padded loop over transformers on a random batch that ``request`` describes; return the
        same figures as :class:`HeadraceSide`."""
        batch = make_batch(self._step, request)
        start_s = self._clock.now()
        for ids_BL, mask_BL, advantages_B in padded_batches(batch):
            self._backward(ids_BL, mask_BL, advantages_B, batch.num_loss_tokens)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = self._clock.now() - start_s
        self._step += 1
        return {
            "seconds": seconds,
            "grad_norm": float(norm),
            "loaded_bytes": self._loaded_bytes,
            "peak_bytes": memory_bytes("VmHWM"),
        }

    def _backward(self, ids_BL: Tensor, mask_BL: Tensor, advantages_B: Tensor, loss_tokens: int) -> None:
        """Add the gradient of DAPO's loss over one padded batch of B samples. ``loss_tokens`` is the number of tokens
        with loss in the whole step, by which the loss is divided."""
        present_BL = (ids_BL > 0).long()  # the id 0 is padding
        logits_BLV = self._model(input_ids=ids_BL, attention_mask=present_BL, use_cache=False).logits[:, :-1]
        log_pi_BL = logits_BLV.log_softmax(-1).gather(2, ids_BL[:, 1:, None])[..., 0]
        ratio_BL = (log_pi_BL - log_pi_BL.detach()).exp()
        gain_BL = torch.minimum(ratio_BL, ratio_BL.clamp(0.8, 1.28)) * advantages_B[:, None]
        (-(gain_BL * mask_BL[:, 1:]).sum() / loss_tokens).backward()


def padded_batches(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield micro-batches of eight samples at a time, padded on the right: token ids (B, L) with 0 for padding, loss
    mask (B, L) and advantages (B,)."""
    starts_S = np.cumsum(batch.lengths_S) - batch.lengths_S
    for first in range(0, len(starts_S), GROUP):
        starts_B, lengths_B = starts_S[first : first + GROUP], batch.lengths_S[first : first + GROUP]
        ids_BL = torch.zeros(len(starts_B), int(lengths_B.max()), dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
        for row, (start, length) in enumerate(zip(starts_B, lengths_B, strict=True)):
            ids_BL[row, :length] = torch.from_numpy(batch.ids_N[start : start + length].astype(np.int64))
            mask_BL[row, :length] = torch.from_numpy(batch.mask_N[start : start + length])
        yield ids_BL, mask_BL, torch.from_numpy(batch.advantages_N[starts_B])


Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function from hidden states (P, D), head (V, D) and ids (P,) to log π (P,)."""


def _dense(hidden_PD: Tensor, weight_VD: Tensor, ids_P: Tensor) -> Tensor:
    """Return log π of each token (P,) from all logits at once."""
    return (hidden_PD @ weight_VD.t()).log_softmax(-1).gather(1, ids_P[:, None])[:, 0]


def _chunked(hidden_PD: Tensor, weight_VD: Tensor, ids_P: Tensor) -> Tensor:
    """Return log π of each token (P,) from 64 MiB of logits at a time, which are recomputed in the backward pass."""
    size = max(1, 2**24 // len(weight_VD))
    parts: list[Tensor] = [
        checkpoint(_dense, hidden_CD, weight_VD, ids_C, use_reentrant=False)
        for hidden_CD, ids_C in zip(hidden_PD.split(size), ids_P.split(size), strict=True)
    ]
    return torch.cat(parts)


def _tiled(hidden_PD: Tensor, weight_VD: Tensor, ids_P: Tensor) -> Tensor:
    """Return log π of each token (P,), computed by the learner's own head in tiles, so that never all logits are in
    memory."""
    from headrace.learner.head import HeadMatrix, HeadRequest, linear_logprobs

    head_request = HeadRequest(ids_P=ids_P, temperature=1.0, kept=None, entropy_gradient=False, keep_logits=False)
    return linear_logprobs(hidden_PD, HeadMatrix(weight_VD), head_request)[0]


class HeadSide:
    """The measurement of one implementation of the head, without a model: log π from hidden states, and its gradients.
    Each request needs a new process, because the peak memory of a process never falls."""

    def __init__(self, logprobs: Logprobs) -> None:
        """Create the side that measures the implementation ``logprobs``."""
        self._logprobs = logprobs
        self._clock = RealClock()

    def handle(self, request: Request) -> Answer:
        """Compute log π and its gradients for random inputs of the request's sizes; return the time in seconds, and the
        memory beyond the inputs in bytes."""
        self._run(GROUP, GROUP, GROUP)  # a first call, in which libraries allocate memory once
        seconds, extra_bytes = self._run(request["tokens"], request["vocab"], request["hidden"])
        return {"seconds": seconds, "extra_bytes": extra_bytes}

    def _run(self, tokens: int, vocab: int, hidden: int) -> tuple[float, int]:
        """Compute log π of ``tokens`` tokens and its gradients for a ``vocab`` by ``hidden`` head. Return the seconds,
        and the difference in bytes between the peak memory of the process and its memory before."""
        draws = torch.Generator().manual_seed(0)
        hidden_PD = torch.randn(tokens, hidden, generator=draws).requires_grad_()
        weight_VD = torch.randn(vocab, hidden, generator=draws).requires_grad_()
        ids_P = torch.randint(vocab, (tokens,), generator=draws)
        before_bytes, start_s = memory_bytes("VmRSS"), self._clock.now()
        self._logprobs(hidden_PD, weight_VD, ids_P).sum().backward()
        return self._clock.now() - start_s, memory_bytes("VmHWM") - before_bytes


SIDES: dict[str, Callable[[str], Side]] = {
    "learner": HeadraceSide,
    "padded": PaddedSide,
    "dense": lambda model_dir: HeadSide(_dense),
    "chunked": lambda model_dir: HeadSide(_chunked),
    "tiled": lambda model_dir: HeadSide(_tiled),
}


if __name__ == "__main__":
    answer_requests(lambda spec: SIDES[spec["side"]](spec["model"]))
