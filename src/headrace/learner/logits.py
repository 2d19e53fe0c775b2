"""Log-probabilities without the whole [tokens × vocabulary] matrix.

    ids ──▶ trunk, once ──▶ hidden_M ──▶ those before a loss token, hidden_P ──▶ head, piece by piece ──▶ log π_P

A head that is one matrix is computed in tiles of tokens × vocabulary (head.py). What any other head is, only the
model's own forward pass knows (soft caps, scales): it runs unchanged, with the trunk replaced by one that gives back
the hidden states it is handed, over chunks of tokens that are computed again in the backward pass. A model that does
not come apart in this way is run whole.

Shape legend: M tokens of a micro-batch, P positions before a loss token, C positions of one chunk, V vocabulary,
D hidden size (V for a model that is run whole), K entries of each position that are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from headrace.base.types.recorded import KeptSets
from headrace.learner.head import HeadRequest, Kept, Likeliest, linear_logprobs, linear_top

LOGITS_PER_CHUNK = 2**24
"""Logits that exist at a time: 64 MiB in float32, and a few times that while their gradient is computed."""

PROBES = 4
"""Random hidden states on which a head shows that it is a matrix."""

LARGE_LOGIT = 1e4
"""The size of their logits: far above any soft cap."""


class Halves(Protocol):
    """A model in two halves."""

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """What the head needs of every token (M, D)."""
        ...

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Logits (C, V) of some of those rows."""
        ...


class SplitModel:
    """Trunk once, head where it is needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._trunk = getattr(model, model.base_model_prefix)
        self._given = _TrunkOutput()
        # The same modules and parameters, but for the trunk: this forward pass is the head alone.
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}
        self._linear = model.get_output_embeddings()
        self._is_matrix = self._acts_as_matrix()

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        hidden_MD: Tensor = self._trunk(**inputs, use_cache=False).last_hidden_state[0]
        return hidden_MD

    def logits(self, hidden_CD: Tensor) -> Tensor:
        self._given.hidden = hidden_CD[None]
        try:
            logits_CV: Tensor = self._head(input_ids=None, use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        return logits_CV

    def matrix(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (V, D) and bias (V,) if the head is nothing else; ``None`` if it is more."""
        return (self._linear.weight, self._linear.bias) if self._is_matrix else None

    @torch.no_grad()
    def _acts_as_matrix(self) -> bool:
        """Whether the logits are those of the output embedding and nothing else, even where they are so large that any
        soft cap would show. Weights that are spread over devices are left to the model's own forward pass."""
        linear = self._linear
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
            return False
        weight_VD = linear.weight
        rng = torch.Generator().manual_seed(0)
        probe_CD = torch.randn(PROBES, weight_VD.shape[1], generator=rng).to(weight_VD)
        largest = float(F.linear(probe_CD, weight_VD).abs().max())
        if not 0 < largest < torch.inf:
            return False
        probe_CD = probe_CD * (LARGE_LOGIT / largest)
        expected_CV = F.linear(probe_CD, weight_VD, linear.bias)
        return torch.allclose(self.logits(probe_CD), expected_CV, rtol=1e-4, atol=1e-4 * LARGE_LOGIT)


class WholeModel:
    """All logits at once, for a model whose head cannot be run alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        logits_MV: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits_MV

    def logits(self, hidden_CD: Tensor) -> Tensor:
        return hidden_CD


class _TrunkOutput(nn.Module):
    """Stands where the trunk stands and gives back what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def halves(model: PreTrainedModel, inputs: dict[str, Any]) -> Halves:
    """``model`` in two halves if they give the logits of the whole on ``inputs``; else the whole."""
    whole = WholeModel(model)
    if model.base_model_prefix not in model._modules:
        return whole
    with torch.no_grad():
        expected = whole.hidden(inputs)
        try:
            split = SplitModel(model)
            found = split.logits(split.hidden(inputs))
        except (AttributeError, TypeError, ValueError, IndexError):  # its forward asks more of the trunk's output
            return whole
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return split if same else whole


class TokenLogprobs:
    """log π of given tokens, and the entropy of the distribution they were taken from, both under a temperature."""

    def __init__(
        self,
        model: Halves,
        chunk: int,
        temperature: float,
        entropy_gradient: bool,
        log_softmax: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``log_softmax`` of the last dimension: all logits of a chunk exist, so that it can be given; ``None`` for
        torch's or, where the head is a matrix, none at all."""
        self._model = model
        self._tiled = log_softmax is None
        self._log_softmax = log_softmax or partial(torch.log_softmax, dim=-1)
        self._chunk = chunk
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient

    def __call__(
        self,
        inputs: dict[str, Any],
        before_P: Tensor,
        ids_P: Tensor,
        kept: KeptSets | None = None,
        top_PK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log π of ``ids_P``, sampled at the positions after ``before_P``, and entropies: (P,) each; and log π of the
        entries ``top_PK`` there (P, K), K = 0 if none are asked for; at least float32, in nats. One forward pass of the
        trunk over ``inputs``.

        ``kept``: what each of the P tokens was sampled from; its log π is renormalised over it. Entropy and ``top_PK``
        are of the whole distribution.
        """
        hidden_PD = self._model.hidden(inputs).index_select(0, before_P)
        top_PK = ids_P.new_empty(len(ids_P), 0) if top_PK is None else top_PK
        matrix = self._model.matrix() if self._tiled and isinstance(self._model, SplitModel) else None
        if matrix is not None:
            asked = HeadRequest(
                ids_P=ids_P,
                top_PK=top_PK,
                temperature=self._temperature,
                kept=None if kept is None else Kept(kept, hidden_PD.device),
                entropy_gradient=self._entropy_gradient,
                keep_logits=len(ids_P) <= self._chunk,
            )
            return linear_logprobs(hidden_PD, *matrix, asked)
        if len(ids_P) <= self._chunk:
            return self._of_chunk(hidden_PD, ids_P, top_PK, kept)
        parts = []
        for start in range(0, len(ids_P), self._chunk):
            part = slice(start, min(start + self._chunk, len(ids_P)))
            args = hidden_PD[part], ids_P[part], top_PK[part], None if kept is None else kept[part]
            parts.append(checkpoint(self._of_chunk, *args, use_reentrant=False, preserve_rng_state=False))
        logprobs, entropies, tops = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies), torch.cat(tops)

    def _of_chunk(
        self, hidden_CD: Tensor, ids_C: Tensor, top_CK: Tensor, kept: KeptSets | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_CV = _tempered(self._model.logits(hidden_CD), self._temperature)
        all_CV = self._log_softmax(logits_CV)
        drawn_CV = all_CV
        if kept is not None:
            allowed_CV = Kept(kept, logits_CV.device).allowed(*logits_CV.shape)
            drawn_CV = self._log_softmax(logits_CV.masked_fill(~allowed_CV, -torch.inf))
        logprobs_C = drawn_CV.gather(1, ids_C[:, None])[:, 0]
        of_top_CK = all_CV.gather(1, top_CK)
        if self._entropy_gradient:
            return logprobs_C, _entropy(all_CV), of_top_CK
        with torch.no_grad():  # last, so that the recomputation stops before it
            return logprobs_C, _entropy(all_CV), of_top_CK


class TopEntries:
    """The likeliest entries of each distribution, under a temperature; no gradient."""

    def __init__(self, model: Halves, chunk: int, temperature: float) -> None:
        self._model = model
        self._chunk = chunk
        self._temperature = temperature

    def __call__(self, inputs: dict[str, Any], before_P: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities (P, K) after the positions ``before_P``, the likeliest first."""
        hidden_PD = self._model.hidden(inputs).index_select(0, before_P)
        matrix = self._model.matrix() if isinstance(self._model, SplitModel) else None
        if matrix is not None:
            return linear_top(hidden_PD, *matrix, self._temperature, wanted)
        parts = [self._of_chunk(hidden_CD, wanted) for hidden_CD in hidden_PD.split(self._chunk)]
        ids, logs = zip(*parts, strict=True)
        return torch.cat(ids), torch.cat(logs)

    def _of_chunk(self, hidden_CD: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
        all_CV = _tempered(self._model.logits(hidden_CD), self._temperature).log_softmax(-1)
        logs_CK, ids_CK = all_CV[:, : wanted.below].topk(wanted.num)
        return ids_CK, logs_CK


def _tempered(logits_CV: Tensor, temperature: float) -> Tensor:
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature


def _entropy(all_CV: Tensor) -> Tensor:
    """−Σ p log p; entries of probability 0 count 0, whatever their log."""
    p_CV = all_CV.exp()
    return -(p_CV * all_CV.masked_fill(p_CV == 0, 0.0)).sum(-1)
