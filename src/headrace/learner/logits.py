"""Log-probabilities without the whole [tokens × vocabulary] matrix.

    ids ──▶ trunk, once ──▶ hidden_M ──▶ those before a loss token, hidden_P ──▶ head, chunk by chunk ──▶ log π_P

The head of a chunk is computed again in the backward pass, so that one chunk's logits exist at a time. What a head is,
only the model's own forward pass knows (soft caps, scales, biases): it runs unchanged, with the trunk replaced by one
that gives back the hidden states it is handed. A model that does not come apart in this way is run whole.

Shape legend: M tokens of a micro-batch, P positions before a loss token, C positions of one chunk, V vocabulary,
D hidden size (V for a model that is run whole).
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

LOGITS_PER_CHUNK = 2**24
"""Logits that exist at a time: 64 MiB in float32, and a few times that while their gradient is computed."""


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
        self._given = _Given()
        # The same modules and parameters, but for the trunk: this forward pass is the head alone.
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}

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


class WholeModel:
    """All logits at once, for a model whose head cannot be run alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        logits_MV: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits_MV

    def logits(self, hidden_CD: Tensor) -> Tensor:
        return hidden_CD


class _Given(nn.Module):
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

    def __init__(self, model: Halves, chunk: int, temperature: float, entropy_gradient: bool) -> None:
        self._model = model
        self._chunk = chunk
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient

    def __call__(self, inputs: dict[str, Any], before_P: Tensor, ids_P: Tensor) -> tuple[Tensor, Tensor]:
        """log π of ``ids_P``, sampled at the positions after ``before_P``, and entropies: (P,) each, float32, in nats.
        One forward pass of the trunk over ``inputs``."""
        hidden_PD = self._model.hidden(inputs)[before_P]
        if len(before_P) <= self._chunk:
            return self._of_chunk(hidden_PD, ids_P)
        chunks = zip(hidden_PD.split(self._chunk), ids_P.split(self._chunk), strict=True)
        parts = [
            checkpoint(self._of_chunk, hidden_CD, ids_C, use_reentrant=False, preserve_rng_state=False)
            for hidden_CD, ids_C in chunks
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _of_chunk(self, hidden_CD: Tensor, ids_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = self._model.logits(hidden_CD).float() / self._temperature
        all_CV = torch.log_softmax(logits_CV, dim=-1)
        logprobs_C = all_CV.gather(1, ids_C[:, None])[:, 0]
        if self._entropy_gradient:
            return logprobs_C, _entropy(all_CV)
        with torch.no_grad():  # last, so that the recomputation stops before it
            return logprobs_C, _entropy(all_CV)


def _entropy(all_CV: Tensor) -> Tensor:
    """−Σ p log p; entries of probability 0 count 0, whatever their log."""
    p_CV = all_CV.exp()
    return -(p_CV * all_CV.masked_fill(p_CV == 0, 0.0)).sum(-1)
