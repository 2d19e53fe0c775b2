"""The computation of training: log π of any targets under a frozen base model with the trainable weights of any client,
micro-batch by micro-batch. A datum is a sequence of tokens with a target (or K of them) at each position.

Shape legend: D data of a request, N positions of a datum, M positions of a micro-batch, K targets of a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.learner.head import TopRequest
from headrace.learner.logits import LOGITS_PER_CHUNK, TokenLogprobs, TopEntries, TrunkAndHead, split_model
from headrace.models.attention import PLAN, PackedPlan
from headrace.models.weights import vocabulary_of
from headrace.wings.tinker.data import TARGETS, Datum
from headrace.wings.tinker.losses import Options, TokenLossFn
from headrace.wings.tinker.weights import AdapterKind, WeightKind, Weights, WholeKind

Array = npt.NDArray[Any]
MOST_CELLS = 2**21
"""The largest number of targets in one pass, counted as all its positions times the most targets of one position; a
single datum may have more."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainResult:
    """The results of one forward_backward request, which each micro-batch adds to."""

    logprobs: list[Array] = field(default_factory=list)
    """log π of the targets of each datum computed so far, each ``[N]`` or ``[N, K]``."""
    loss: float = 0.0
    """The sum of the losses of all targets computed so far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """The log-probabilities of a prompt's tokens, of the likeliest tokens in their places, and of given targets
    there."""

    logprobs_N: Array
    """The log-probability of each token given those before it, in nats; NaN for the first."""
    top_ids_NK: Array
    top_logprobs_NK: Array
    """The token ids with the highest probability at each token's position, and their log-probabilities; 0 and −99999,
    which the client reads as missing, at the first token."""
    targets_NK: Array | None
    """The log-probabilities of other given tokens, ``[N - 1, K]``, in the place of each token but the first; 0 where no
    token was given. ``None`` if no such tokens were given at all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenBase:
    """A base model that is never changed itself, with the limits for the weights that clients train on it. All clients
    of one base share it."""

    path: Path
    """The directory of the base model."""
    compute: BaseCompute
    """The forward and backward passes with the base."""
    max_rank: int
    """The largest rank of an adapter that a client may ask for."""
    max_context: int
    """The largest number of tokens of one datum."""


class _UntiledHead:
    """A split model that offers its head only as a module, not as a matrix, so that :class:`TokenLogprobs` calls the
    module and the hooks of an adapter on the head run."""

    def __init__(self, parts: TrunkAndHead) -> None:
        """Offer the trunk and the head of the split model ``parts``."""
        self.hidden, self.logits = parts.hidden, parts.logits

    def matrix(self) -> None:
        """Return ``None``: the head is to be called."""
        return


class BaseCompute:
    """The passes of one base model: training and scoring with the weights of any client. It is used by one thread at a
    time. ``tokens_per_microbatch`` bounds the positions of one pass, unless a single datum has more. ``whole`` says
    that clients train all weights instead of adapters."""

    def __init__(self, model: PreTrainedModel, *, tokens_per_microbatch: int, whole: bool = False) -> None:
        """Prepare the passes over ``model``, whose head and trunk are split so that logits are computed in chunks."""
        self.model = model
        self._budget = tokens_per_microbatch
        self._device = model.device
        self.vocab_size = vocabulary_of(model)
        parts = split_model(model, self._inputs([np.zeros(2, np.int32)]))
        self.kind: WeightKind = WholeKind(model) if whole else AdapterKind(model)
        chunk = max(1, LOGITS_PER_CHUNK // self.vocab_size)
        untiled = _UntiledHead(parts)
        self._logprobs = {
            False: TokenLogprobs(parts, chunk, 1.0, entropy_gradient=False),
            True: TokenLogprobs(untiled, chunk, 1.0, entropy_gradient=False),
        }
        self._top = {False: TopEntries(parts, chunk, 1.0), True: TopEntries(untiled, chunk, 1.0)}

    def train(
        self,
        weights: Weights,
        data: Sequence[Datum],
        loss: tuple[TokenLossFn, Options],
        result: TrainResult,
        *,
        backward: bool,
    ) -> Iterator[None]:
        """Compute the loss of ``data`` with a client's ``weights``, and add each micro-batch's log-probabilities and
        loss to ``result``. The iterator yields between micro-batches, so that other clients get their turns. ``loss``
        is the loss function with its options. With ``backward``, gradients are added to those of ``weights``."""
        for place, part in enumerate(self._cut(data)):
            if place:
                yield None
            with self.kind.on(weights):  # also while pieces of the head are computed again in the backward pass
                with torch.set_grad_enabled(backward):
                    total = self._micro(weights, part, loss, result)
                if backward and total.requires_grad:
                    total.backward()
            result.loss += float(total.detach())

    def _micro(
        self, weights: Weights, part: Sequence[Datum], loss: tuple[TokenLossFn, Options], result: TrainResult
    ) -> Tensor:
        """Compute one micro-batch, ``part``: append the log-probabilities of its targets to ``result``, and return the
        sum of its loss as a scalar to differentiate."""
        fn, options = loss
        found = self._of_targets(weights, [datum.ids_N for datum in part], [datum.targets for datum in part])
        total = torch.zeros((), device=self._device)
        for datum, log_pi in zip(part, found, strict=True):
            inputs = {name: self._tensor(values) for name, values in datum.inputs.items() if name != TARGETS}
            total = total + fn.compute(log_pi, inputs, options).sum()
            result.logprobs.append(log_pi.detach().cpu().numpy())
        return total

    def _of_targets(self, weights: Weights | None, ids: Sequence[Array], targets: Sequence[Array]) -> list[Tensor]:
        """Return log π of the targets at each position of each sequence, in the shape of its targets, ``[N]`` or ``[N,
        K]``. The sequences ``ids`` are packed into one forward pass with ``weights``; ``None`` stands for the base's
        own."""
        inputs = self._inputs(ids)
        count = sum(map(len, ids))
        width = max(each.shape[1] if each.ndim == 2 else 1 for each in targets)
        padded_MK = np.zeros((count, width), np.int64)
        ends = np.cumsum([len(each) for each in ids]).tolist()
        for end, each in zip(ends, targets, strict=True):
            wide = each if each.ndim == 2 else each[:, None]
            padded_MK[end - len(each) : end, : wide.shape[1]] = wide
        targets_MK = torch.from_numpy(padded_MK).to(self._device)
        rows_M = torch.arange(count, device=self._device)
        with self.kind.on(weights):
            first_M, _, top_MK = self._logprobs[self.kind.runs_head(weights)](
                inputs, rows_M, targets_MK[:, 0], None, targets_MK if width > 1 else None
            )
        found = list[Tensor]()
        all_MK = top_MK if width > 1 else first_M[:, None]
        for end, each in zip(ends, targets, strict=True):
            span = slice(end - len(each), end)
            found.append(first_M[span] if each.ndim == 1 else all_MK[span, : each.shape[1]])
        return found

    @torch.no_grad()
    def score(self, weights: Weights | None, ids_N: Array, *, top: int, targets_NK: Array | None) -> PromptScores:
        """Return the log-probabilities of a sequence ``ids_N`` at temperature 1, with ``weights`` (``None``: the base's
        own), for a client that asks for those of its prompt. ``top`` is the number of most probable entries to return
        at each token. ``targets_NK`` ``[N - 1, K]`` are other tokens to score in the place of each token but the first,
        with −1 where there is none."""
        count = len(ids_N)
        logprobs_N = np.full(count, np.nan, np.float32)
        top_ids, top_logs = np.zeros((count, top), np.int32), np.full((count, top), -99999.0, np.float32)
        found_targets = None if targets_NK is None else np.zeros(targets_NK.shape, np.float32)
        if count > 1:
            (log_pi_N,) = self._of_targets(weights, [ids_N[:-1]], [ids_N[1:]])
            logprobs_N[1:] = log_pi_N.cpu().numpy()
        if count > 1 and top:
            rows = torch.arange(count - 1, device=self._device)
            with self.kind.on(weights):
                ids_NK, logs_NK = self._top[self.kind.runs_head(weights)](
                    self._inputs([ids_N[:-1]]), rows, TopRequest(num=top, below=self.vocab_size)
                )
            top_ids[1:], top_logs[1:] = ids_NK.cpu().numpy(), logs_NK.cpu().numpy()
        if count > 1 and targets_NK is not None and found_targets is not None:
            (log_pi_NK,) = self._of_targets(weights, [ids_N[:-1]], [np.maximum(targets_NK, 0)])
            found_targets[:] = np.where(targets_NK < 0, 0.0, log_pi_NK.cpu().numpy())
        return PromptScores(
            logprobs_N=logprobs_N, top_ids_NK=top_ids, top_logprobs_NK=top_logs, targets_NK=found_targets
        )

    def _cut(self, data: Sequence[Datum]) -> Iterator[list[Datum]]:
        """Yield the micro-batches of a request: consecutive data, cut in the same places whenever the same request is
        computed again, so that it gives the same bits."""
        part, held, widest = list[Datum](), 0, 1
        for datum in data:
            tokens, width = len(datum.ids_N), datum.targets.shape[1] if datum.targets.ndim == 2 else 1
            if part and (held + tokens > self._budget or (held + tokens) * max(widest, width) > MOST_CELLS):
                yield part
                part, held, widest = [], 0, 1
            part.append(datum)
            held, widest = held + tokens, max(widest, width)
        yield part

    def _inputs(self, ids: Sequence[Array]) -> dict[str, Any]:
        """Return the inputs of one forward pass over the sequences ``ids``, packed into one row, with the plan by which
        attention stays within each sequence."""
        plan = PackedPlan([len(each) for each in ids], self._device)
        joined = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(self._device)
        return {"input_ids": joined[None], "position_ids": plan.positions_N[None], PLAN: plan}

    def _tensor(self, values: Array) -> Tensor:
        """Return an array of a request as a float32 tensor on the device of the model."""
        return torch.tensor(values, dtype=torch.float32, device=self._device)  # a copy: the bytes are the request's
