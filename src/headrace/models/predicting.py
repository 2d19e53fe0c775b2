"""The computation of a prediction head, as a module beside the model to which the head belongs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.models.attention import PLAN, Plan


class PredictionHead(nn.Module):
    """A head that computes hidden states of later tokens (:mod:`headrace.models.heads`). ``layer`` is a model with one
    layer, whose last norm is the last norm of the head. ``own`` contains the weights of the norm of the embedding, of
    the norm of the hidden state, and of the projection. ``hidden_first`` says whether the projection takes the hidden
    state before the embedding.

    Shape legend: N tokens of a pass, H hidden size.
    """

    def __init__(self, layer: PreTrainedModel, own: Sequence[Tensor], *, hidden_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._hidden_first = hidden_first
        norm, (of_embedding, of_hidden, projection) = layer.get_decoder().norm, own
        self.embedding_norm = _with_weight(norm, of_embedding)
        self.hidden_norm = _with_weight(norm, of_hidden)
        size = projection.shape[0]
        self.projection = nn.Linear(2 * size, size, bias=False, device="meta")
        self.projection.weight = nn.Parameter(projection.to(layer.dtype), requires_grad=False)

    @property
    def num_weights(self) -> int:
        """The number of the head's weights."""
        return sum(each.numel() for each in self.parameters())

    def forward(self, embedding_NH: Tensor, hidden_NH: Tensor, plan: Plan) -> Tensor:
        """Return the head's hidden states ``[N, H]`` for the tokens of a pass. ``embedding_NH`` contains the embedding
        of each token's successor, and ``hidden_NH`` the hidden state of each token, which the model or this head has
        computed. ``plan`` decides which token attends to which; its only layer is the layer of the head."""
        inputs = self.embedding_norm(embedding_NH), self.hidden_norm(hidden_NH)
        joined_N = torch.cat(inputs[::-1] if self._hidden_first else inputs, dim=-1)
        output = self.layer.get_decoder()(
            inputs_embeds=self.projection(joined_N)[None], position_ids=plan.positions_N[None], use_cache=False,
            **{PLAN: plan},
        )  # fmt: skip
        states_NH: Tensor = output.last_hidden_state[0]
        return states_NH


def _with_weight(norm: nn.Module, weight: Tensor) -> nn.Module:
    """Return a copy of ``norm`` whose weight is ``weight``."""
    made = copy.deepcopy(norm)
    made.weight = nn.Parameter(weight.to(norm.weight.dtype), requires_grad=False)  # type: ignore[arg-type]
    return made
