"""The training computation of one base model: log π of target tokens under the frozen base with the trainable weights
of any client, one micro-batch at a time. A datum is a sequence of tokens with one target token, or K of them, at each
position.

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
from headrace.models.weights import count_vocabulary
from headrace.wings.tinker.data import TARGETS, Datum
from headrace.wings.tinker.losses import Options, TokenLossFn
from headrace.wings.tinker.weights import AdapterKind, WeightKind, Weights, WholeKind

Array = npt.NDArray[Any]
MOST_CELLS = 2**21
"""The largest number of targets in one pass: the number of positions times the largest number of targets at a position.
A single datum may have more."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainResult:
    """The accumulated results of one forward_backward request; each micro-batch adds to them."""

    logprobs: list[Array] = field(default_factory=list)
    """log π of the targets of each datum computed so far, each ``[N]`` or ``[N, K]``."""
    loss: float = 0.0
    """The sum of the losses of all targets computed so far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """The log-probabilities of a prompt's tokens and, at their positions, of the likeliest tokens and of given
    targets."""

    logprobs_N: Array
    """The log-probability of each token, conditioned on the tokens before it, in nats; NaN for the first token."""
    top_ids_NK: Array
    top_logprobs_NK: Array
    """The token ids with the highest probability at each token's position, and their log-probabilities; 0 and −99999,
    which the client reads as missing, at the first token."""
    targets_NK: Array | None
    """The log-probabilities of given other tokens, ``[N - 1, K]``, at the position of each token except the first; 0
    where no token was given. ``None`` if no targets were requested."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenBase:
    """A base model whose own weights never change, with the limits for the weights that clients train on it. All
    clients of the base share this object."""

    path: Path
    """The directory of the base model."""
    compute: BaseCompute
    """The forward and backward passes with the base."""
    max_rank: int
    """The largest rank of an adapter that a client may request."""
    max_context: int
    """The largest number of tokens of one datum."""


class _UntiledHead:
    """A split model whose head is available only as a module, not as a matrix. :class:`TokenLogprobs` then calls the
    module, so that the hooks of an adapter on the head run."""

    def __init__(self, parts: TrunkAndHead) -> None:
        """Wrap the split model ``parts``, whose trunk and head are used unchanged."""
        self.hidden, self.logits = parts.hidden, parts.logits

    def matrix(self) -> None:
        """Return ``None``, which means that the head must be called as a module."""
        return


class BaseCompute:
    """The forward and backward passes of one base model, for training and for scoring with the weights of any client.
    Only one thread at a time may use it. ``tokens_per_microbatch`` bounds the positions of one pass, unless a single
    datum has more. With ``whole``, clients train all weights instead of adapters."""

    def __init__(self, model: PreTrainedModel, *, tokens_per_microbatch: int, whole: bool = False) -> None:
        """Prepare the passes over ``model``, whose head and trunk are split so that logits are computed in chunks."""
        self.model = model
        self._budget = tokens_per_microbatch
        """Largest number of positions of one pass."""
        self._device = model.device
        self.vocab_size = count_vocabulary(model)
        parts = split_model(model, self._inputs([np.zeros(2, np.int32)]))
        self.kind: WeightKind = WholeKind(model) if whole else AdapterKind(model)
        chunk = max(1, LOGITS_PER_CHUNK // self.vocab_size)
        untiled = _UntiledHead(parts)
        self._logprobs = {
            # the key is whether the head must be called as a module (WeightKind.runs_head)
            False: TokenLogprobs(parts, chunk, 1.0, entropy_gradient=False),
            True: TokenLogprobs(untiled, chunk, 1.0, entropy_gradient=False),
        }
        """The computation of log π of targets, by whether the head must be called as a module."""
        self._top = {False: TopEntries(parts, chunk, 1.0), True: TopEntries(untiled, chunk, 1.0)}
        """The computation of the likeliest tokens, by whether the head must be called as a module."""

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
        loss to ``result``. The iterator yields between micro-batches, so that requests of other clients can be computed
        in between. ``loss`` is the loss function with its options. With ``backward``, gradients are added to the
        gradients of ``weights``."""
        for place, part in enumerate(self._cut(data)):
            if place:
                yield None
            with self.kind.on(weights):  # the backward pass computes chunks of the head again
                with torch.set_grad_enabled(backward):
                    total = self._compute_microbatch(weights, part, loss, result)
                if backward and total.requires_grad:
                    total.backward()
            result.loss += float(total.detach())

    def _compute_microbatch(
        self, weights: Weights, part: Sequence[Datum], loss: tuple[TokenLossFn, Options], result: TrainResult
    ) -> Tensor:
        """Compute the micro-batch ``part``: append the log-probabilities of its targets to ``result``, and return the
        sum of its losses as a differentiable scalar."""
        fn, options = loss
        found = self._target_logprobs(weights, [datum.ids_N for datum in part], [datum.targets for datum in part])
        total = torch.zeros((), device=self._device)
        for datum, log_pi in zip(part, found, strict=True):
            inputs = {name: self._tensor(values) for name, values in datum.inputs.items() if name != TARGETS}
            total = total + fn.compute(log_pi, inputs, options).sum()
            result.logprobs.append(log_pi.detach().cpu().numpy())
        return total

    def _target_logprobs(self, weights: Weights | None, ids: Sequence[Array], targets: Sequence[Array]) -> list[Tensor]:
        """Return log π of the targets at each position of each sequence, in the shape of its targets, ``[N]`` or ``[N,
        K]``. The sequences ``ids`` are packed into one forward pass with ``weights`` (``None``: the base's own
        weights)."""
        inputs = self._inputs(ids)
        count = sum(map(len, ids))
        width = max(each.shape[1] if each.ndim == 2 else 1 for each in targets)
        # pad the targets of every position to the same width, so that one pass serves all sequences
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
        """Return the log-probabilities of the sequence ``ids_N`` at temperature 1, with ``weights`` (``None``: the
        base's own weights). ``top`` is the number of most probable entries to return at each token. ``targets_NK`` ``[N
        - 1, K]`` are other tokens to score at the position of each token except the first, with −1 for no token."""
        count = len(ids_N)
        logprobs_N = np.full(count, np.nan, np.float32)
        top_ids, top_logs = np.zeros((count, top), np.int32), np.full((count, top), -99999.0, np.float32)
        found_targets = None if targets_NK is None else np.zeros(targets_NK.shape, np.float32)
        if count > 1:
            (log_pi_N,) = self._target_logprobs(weights, [ids_N[:-1]], [ids_N[1:]])
            logprobs_N[1:] = log_pi_N.cpu().numpy()
        if count > 1 and top:
            rows = torch.arange(count - 1, device=self._device)
            with self.kind.on(weights):
                ids_NK, logs_NK = self._top[self.kind.runs_head(weights)](
                    self._inputs([ids_N[:-1]]), rows, TopRequest(num=top, below=self.vocab_size)
                )
            top_ids[1:], top_logs[1:] = ids_NK.cpu().numpy(), logs_NK.cpu().numpy()
        if count > 1 and targets_NK is not None and found_targets is not None:
            (log_pi_NK,) = self._target_logprobs(weights, [ids_N[:-1]], [np.maximum(targets_NK, 0)])
            found_targets[:] = np.where(targets_NK < 0, 0.0, log_pi_NK.cpu().numpy())
        return PromptScores(
            logprobs_N=logprobs_N, top_ids_NK=top_ids, top_logprobs_NK=top_logs, targets_NK=found_targets
        )

    def _cut(self, data: Sequence[Datum]) -> Iterator[list[Datum]]:
        """Split the data of a request into micro-batches of consecutive data. The split depends only on the request, so
        that a repeated request results in the same bits."""
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
        """Return the inputs of one forward pass over the sequences ``ids``, packed into one row, with the plan that
        restricts attention to each sequence."""
        plan = PackedPlan([len(each) for each in ids], self._device)
        joined = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(self._device)
        return {"input_ids": joined[None], "position_ids": plan.positions_N[None], PLAN: plan}

    def _tensor(self, values: Array) -> Tensor:
        """Return an array of a request as a float32 tensor on the device of the model."""
        return torch.tensor(values, dtype=torch.float32, device=self._device)  # a copy: the bytes are the request's
