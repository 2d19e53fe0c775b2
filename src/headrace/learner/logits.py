"""The computation of log-probabilities without the whole [tokens × vocabulary] matrix of logits in memory.

    ids ──▶ trunk, once ──▶ hidden_M ──▶ only before loss tokens: hidden_P ──▶ head, chunk by chunk ──▶ log π_P

The *trunk* of a model computes hidden states; its *head* computes logits from them. A head that is a single matrix is
computed in tiles of tokens × vocabulary (head.py). Any other head (with soft caps or scales) is defined only by the
model's own forward pass. This forward pass is run over chunks of tokens, with the trunk replaced by a module that
returns given hidden states; the backward pass computes each chunk again. A model that cannot be split in this way is
run as a whole.

Shape legend: M tokens of a micro-batch, P positions before a loss token, C positions of one chunk, V vocabulary, D
hidden size (V for a model that is run as a whole), K requested entries of each position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from headrace.base.types.recorded import KeptSets
from headrace.learner.head import HeadMatrix, HeadRequest, KeptEntries, TopRequest, linear_logprobs, linear_top
from headrace.models.text_part import trunk_name

LOGITS_PER_CHUNK = 2**24
"""The most logits in memory at a time: 64 MiB in float32, and a few times as much while their gradient is computed."""

PROBES = 4
"""The number of random hidden states in the test whether a head is a single matrix."""

LARGE_LOGIT = 1e4
"""The largest logit in that test, which is far above any soft cap."""


class TrunkAndHead(Protocol):
    """The contract of a model that is split into a trunk and a head."""

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Run the trunk over ``inputs``, the keyword arguments of a forward pass, and return the input of the head for
        every token, ``[M, D]``."""
        ...

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the logits ``[C, V]`` of some rows of the result of :meth:`hidden`."""
        ...

    def matrix(self) -> HeadMatrix | None:
        """Return the head if it is a single matrix; otherwise ``None``."""
        ...


class SplitModel:
    """The :class:`TrunkAndHead` of most architectures: the trunk and the head of a model run separately."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Split ``model`` at its trunk, without copying weights."""
        name = trunk_name(model)
        self._trunk: Any = model.get_submodule(name)
        self._given_hidden = GivenHidden(self._trunk)
        """The module that replaces the trunk in the head's forward pass and returns given hidden states."""
        # the same modules and parameters except the trunk, so that its forward pass computes only the head
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, name: self._given_hidden}
        self._linear = model.get_output_embeddings()
        """The output layer."""
        self._is_matrix = type(self._linear) is nn.Linear and acts_as_matrix(
            HeadMatrix(self._linear.weight, self._linear.bias), self.logits
        )
        """Whether the head is a single matrix product."""

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Run the trunk over ``inputs``, the keyword arguments of its forward pass, and return its hidden states ``[M,
        D]``."""
        hidden_MD: Tensor = self._trunk(**inputs, use_cache=False).last_hidden_state[0]
        return hidden_MD

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the logits [C, V] that the model's own head computes from hidden states."""
        return self._given_hidden.compute_logits(self._head, hidden_CD)

    def matrix(self) -> HeadMatrix | None:
        """Return the head if it is a single matrix; otherwise ``None``."""
        return HeadMatrix(self._linear.weight, self._linear.bias) if self._is_matrix else None


@torch.no_grad()
def acts_as_matrix(matrix: HeadMatrix, logits: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the function ``logits`` of a model is the product with ``matrix``, its output embedding, and
    nothing else. The test uses logits so large that any soft cap changes them. Ranks that have parts of the matrix call
    this together, and get the same result."""
    weight_VD, bias_V, part = matrix
    rng = torch.Generator().manual_seed(0)
    probe_CD = torch.randn(PROBES, weight_VD.shape[1], generator=rng).to(weight_VD)
    largest = F.pad(F.linear(probe_CD, weight_VD).abs(), (0, 1)).max()  # padded, since a rank may have no entry
    largest = largest if part is None else part.largest(largest)
    if not 0 < float(largest) < torch.inf:
        return False
    probe_CD = probe_CD * (LARGE_LOGIT / float(largest))
    expected_CV = F.linear(probe_CD, weight_VD, bias_V)
    found_CV = logits(probe_CD)  # a bfloat16 model may return float32
    if part is not None:
        found_CV = found_CV[:, part.first : part.first + len(weight_VD)]
    differs = torch.tensor(not torch.allclose(found_CV, expected_CV.to(found_CV), rtol=1e-4, atol=1e-4 * LARGE_LOGIT))
    return not bool(differs if part is None else part.largest(differs.int().to(weight_VD.device)))


class WholeModel:
    """The :class:`TrunkAndHead` of a model whose head cannot run separately. The logits take the place of the hidden
    states, so D = V, and all logits are in memory at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap ``model``, which is called as a whole."""
        self._model = model

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Run the whole model over ``inputs``, the keyword arguments of its forward pass, and return its logits ``[M,
        V]``."""
        logits_MV: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits_MV

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return ``hidden_CD`` itself, which contains logits already."""
        return hidden_CD

    def matrix(self) -> None:
        """Return ``None``: the logits are computed already."""
        return


@dataclass
class HiddenOutput(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """The output of a trunk that contains only hidden states. Every other field that a model reads is ``None``."""

    def __getattr__(self, name: str) -> None:
        """Return ``None`` for every field that was not set."""
        if name.startswith("__"):  # copy and pickle check for methods
            raise AttributeError(name)


class GivenHidden(nn.Module):
    """A module that replaces the trunk and returns given hidden states, so that the model's forward pass computes only
    its head."""

    def __init__(self, trunk: nn.Module) -> None:
        """Replace ``trunk``. All other attributes of ``trunk`` can be read from this module."""
        super().__init__()
        self.hidden: Tensor | None = None
        """The hidden states to return, ``[1, C, D]``: the input of the head for one chunk. ``None`` except during a
        call of the head."""
        self.__dict__["trunk"] = trunk  # not as a submodule, since the head does not contain the trunk

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of the trunk, such as a multiplier of the logits that the model's forward pass
        reads."""
        return getattr(self.__dict__["trunk"], name)

    def compute_logits(self, model: Any, hidden_CD: Tensor) -> Tensor:
        """Return the logits ``[C, V]`` that ``model``, of which this module is the trunk, computes from
        ``hidden_CD``."""
        self.hidden = hidden_CD[None]
        try:
            logits_CV: Tensor = model(input_ids=None, use_cache=False).logits[0]
        finally:
            self.hidden = None
        return logits_CV

    def forward(self, *args: Any, **kwargs: Any) -> HiddenOutput:
        """Return the hidden states ``self.hidden`` as the output of a trunk. The arguments are ignored."""
        return HiddenOutput(last_hidden_state=self.hidden)


def split_model(model: PreTrainedModel, inputs: dict[str, Any]) -> TrunkAndHead:
    """Return ``model`` split into trunk and head, if the split model computes the same logits on ``inputs``, the
    keyword arguments of a short forward pass; otherwise as a :class:`WholeModel`."""
    whole = WholeModel(model)
    if trunk_name(model) not in model._modules:
        return whole
    with torch.no_grad():
        expected = whole.hidden(inputs)
        try:
            split = SplitModel(model)
            found = split.logits(split.hidden(inputs))
        except (AttributeError, TypeError, ValueError, IndexError):  # the head needs more of the trunk's output
            return whole
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return split if same else whole


class TokenLogprobs:
    """The computation of log π of given tokens and of the entropy of their distributions, at a temperature.
    :class:`~headrace.learner.forward.Forward` calls it for every micro-batch."""

    def __init__(
        self,
        model: TrunkAndHead,
        chunk: int,
        temperature: float,
        entropy_gradient: bool,
        log_softmax: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare the computation for ``model``. ``chunk`` is the largest number of positions whose logits are in
        memory at a time. Logits are divided by the sampling ``temperature``, and entropies have a gradient if
        ``entropy_gradient``. ``log_softmax`` is a function over the last dimension, applied to all logits of a chunk;
        ``None``: torch's function, or tiles if the head is a single matrix."""
        self._model = model
        self._tiled = log_softmax is None
        """Whether log-probabilities may be computed in tiles, without all logits of a chunk."""
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
        """Run one forward pass of the trunk over ``inputs`` and return log π of ``ids_P``, sampled at the positions
        after ``before_P``, and the entropies, ``[P]`` each; and log π of the entries ``top_PK`` there, ``[P, K]`` with
        K = 0 for ``None``. All are in float32 or wider, in nats.

        ``kept`` are the kept-sets of the P tokens, over which their log π is renormalised. Entropies and log π of
        ``top_PK`` are computed from the whole distribution.
        """
        hidden_PD = self._model.hidden(inputs).index_select(0, before_P)
        top_PK = ids_P.new_empty(len(ids_P), 0) if top_PK is None else top_PK
        matrix = self._model.matrix() if self._tiled else None
        if matrix is not None:
            request = HeadRequest(
                ids_P=ids_P,
                top_PK=top_PK,
                temperature=self._temperature,
                kept=None if kept is None else KeptEntries(kept, hidden_PD.device),
                entropy_gradient=self._entropy_gradient,
                keep_logits=len(ids_P) <= self._chunk,
            )
            return linear_logprobs(hidden_PD, matrix, request)
        if len(ids_P) <= self._chunk:
            return self._compute_chunk(hidden_PD, ids_P, top_PK, kept)
        parts = []
        for start in range(0, len(ids_P), self._chunk):
            part = slice(start, min(start + self._chunk, len(ids_P)))
            args = hidden_PD[part], ids_P[part], top_PK[part], None if kept is None else kept[part]
            parts.append(checkpoint(self._compute_chunk, *args, use_reentrant=False, preserve_rng_state=False))
        logprobs, entropies, tops = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies), torch.cat(tops)

    def _compute_chunk(
        self, hidden_CD: Tensor, ids_C: Tensor, top_CK: Tensor, kept: KeptSets | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π of ``ids_C`` over the kept-sets ``kept``, the entropy, and log π of the entries ``top_CK``, for
        one chunk of positions with the hidden states ``hidden_CD``."""
        logits_CV = _divide_by_temperature(self._model.logits(hidden_CD), self._temperature)
        all_CV = self._log_softmax(logits_CV)
        renormalised_CV = all_CV
        if kept is not None:
            allowed_CV = KeptEntries(kept, logits_CV.device).allowed(*logits_CV.shape)
            renormalised_CV = self._log_softmax(logits_CV.masked_fill(~allowed_CV, -torch.inf))
        logprobs_C = renormalised_CV.gather(1, ids_C[:, None])[:, 0]
        of_top_CK = all_CV.gather(1, top_CK)
        if self._entropy_gradient:
            return logprobs_C, _entropy(all_CV), of_top_CK
        with torch.no_grad():  # last, so that the recomputation in the backward pass stops before the entropy
            return logprobs_C, _entropy(all_CV), of_top_CK


class TopEntries:
    """The computation of the likeliest entries of each distribution at a temperature, without gradient."""

    def __init__(self, model: TrunkAndHead, chunk: int, temperature: float) -> None:
        """Prepare the computation for ``model``. ``chunk`` is the most positions whose logits are in memory at a time.
        Logits are divided by ``temperature``."""
        self._model = model
        self._chunk = chunk
        self._temperature = temperature

    def __call__(self, inputs: dict[str, Any], before_P: Tensor, request: TopRequest) -> tuple[Tensor, Tensor]:
        """Run one forward pass over ``inputs``, the keyword arguments of the trunk, and return ids and
        log-probabilities ``[P, K]`` of the likeliest entries after the positions ``before_P``; the likeliest entry is
        first."""
        hidden_PD = self._model.hidden(inputs).index_select(0, before_P)
        matrix = self._model.matrix()
        if matrix is not None:
            return linear_top(hidden_PD, matrix, self._temperature, request)
        parts = [self._compute_chunk(hidden_CD, request) for hidden_CD in hidden_PD.split(self._chunk)]
        ids, logs = zip(*parts, strict=True)
        return torch.cat(ids), torch.cat(logs)

    def _compute_chunk(self, hidden_CD: Tensor, request: TopRequest) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities ``[C, K]`` of the likeliest entries for one chunk of hidden states."""
        all_CV = _divide_by_temperature(self._model.logits(hidden_CD), self._temperature).log_softmax(-1)
        logs_CK, ids_CK = all_CV[:, : request.below].topk(request.num)
        return ids_CK, logs_CK


def _divide_by_temperature(logits_CV: Tensor, temperature: float) -> Tensor:
    """Return the logits divided by the temperature, in float32 or wider."""
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature


def _entropy(log_p_CV: Tensor) -> Tensor:
    """Return the entropy −Σ p log p of each position from its log-probabilities. An entry of probability 0, whose log
    is −∞, adds 0."""
    p_CV = log_p_CV.exp()
    return -(p_CV * log_p_CV.masked_fill(p_CV == 0, 0.0)).sum(-1)
