"""Sparse attention: for every token, an indexer scores all earlier tokens, and the layer attends to the best of them.

    hidden states ──▶ indexer: queries, weights, one key a token ──▶ scores within the sequence ──▶ the best k
    queries, keys, values ───────────────────────────────────────────────────────────────────▶ attention ◀──┘

This is the sparse attention of DeepSeek-V3.2 (2025, section 2.1), and of GLM-5, where layers share a choice. The
indexer of transformers computes whole sequences of one length under a mask. In a call with a plan, its own code is
executed on the rows of the plan with their masks; in an engine's pass, it also receives the keys of the cache. It has
no gradient, as in transformers.

The choice is determined by the sequence unless several scores are equal to the k-th. An indexer with few heads has many
scores of exactly 0; in that case, transformers itself chooses differently in a longer call.

Shape legend: B rows of a bucket, L padded length, C positions, N tokens of the pass, D size of an indexer's key.
"""

# gate: getattr - attention modules of transformers differ from family to family

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.attention import NO_MASK, PLAN, Choose, ChosenTokens

KINDS = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""The types of models whose indexers are supported."""
LEAST_HEADS = 8
"""The smallest supported number of heads of an indexer. A score is exactly 0 where all heads have a negative one."""


class KeyExchange:
    """A replacement for transformers' cache in an indexer, with only the method that an indexer calls: it passes the
    keys of the pass, and receives the keys to score."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        """Store ``exchange``, a function that returns the keys to score, given the keys of the pass."""
        self._exchange = exchange

    def update_indexer(self, key_BLD: Tensor, layer: int) -> Tensor:
        """Return the keys that the indexer of ``layer`` scores, given the keys of the pass. Transformers' indexer calls
        this method."""
        return self._exchange(key_BLD)


class _KeysComputed(Exception):
    """The exception with which :func:`compute_keys` ends an indexer's forward pass as soon as its keys are computed. It
    contains the keys."""

    def __init__(self, keys: Tensor) -> None:
        """Store ``keys``, ``[N, D]``."""
        self.keys = keys


def compute_keys(choose: Choose, inputs_N: tuple[Tensor, ...]) -> Tensor:
    """Return the indexer's keys ``[N, D]`` for the tokens of a pass, given its inputs, without scores. ``choose``
    executes the indexer."""

    def stop(key_BLD: Tensor) -> Tensor:
        """End the indexer's forward pass after its keys are computed."""
        raise _KeysComputed(key_BLD[0])

    nothing = torch.ones(1, 1, 1, dtype=torch.bool, device=inputs_N[0].device)
    try:
        choose(tuple(each[None] for each in inputs_N), nothing, KeyExchange(stop))
    except _KeysComputed as known:
        return known.keys
    raise AssertionError("an indexer that keeps no keys")


class IndexerForward:
    """A replacement for the forward method of an indexer. In a call with a plan, the plan makes the indexer choose
    tokens within each packed sequence; in other calls, the module's own forward method is called."""

    def __init__(self, module: nn.Module) -> None:
        """Replace the forward method of ``module``, an indexer. The caller assigns this object to it."""
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self.plan: Any = None
        """The plan of the present call of the model, which a hook of the attention module sets; ``None`` for a call
        without a plan."""
        self._own = module.forward
        """The module's own forward method."""

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *further: Any,
        **named: Any,
    ) -> Tensor | ChosenTokens:
        """Return the tokens that the indexer chooses under the plan; without a plan, return the result of the module's
        own forward method. The arguments are those of transformers."""
        if self.plan is None:
            return self._own(  # type: ignore[no-any-return]
                hidden_states, q_resid, position_embeddings, attention_mask, *further, **named
            )
        inputs_N = hidden_states[0], q_resid[0], *(each[0] for each in position_embeddings)
        found: ChosenTokens = self.plan.choose(self.layer, self.choose, inputs_N)
        return found

    @torch.no_grad()
    def choose(self, inputs_BL: tuple[Tensor, ...], seen_BLC: Tensor, cache: object) -> Tensor:
        """Return the mask ``[B, L, C]`` of the tokens that the module's own forward method chooses over padded rows,
        among those that ``seen_BLC`` allows (see :data:`headrace.models.attention.Choose`)."""
        hidden, resid, cos, sin = inputs_BL
        places_BLk = self._own(hidden, resid, (cos, sin), seen_BLC, None, cache).long()
        return torch.zeros_like(seen_BLC).scatter_(-1, places_BLk, True) & seen_BLC


def install(model: nn.Module) -> None:
    """Replace the forward methods of the indexers of a loaded model, so that they choose among the tokens that a plan
    allows."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            indexer.forward = IndexerForward(indexer)
            module.register_forward_pre_hook(_pass_plan, with_kwargs=True)


def is_indexed(model: nn.Module) -> bool:
    """Return whether a layer of the model has an indexer."""
    return any(map(is_indexer, model.modules()))


def is_indexer(module: nn.Module) -> bool:
    """Return whether ``module`` is an indexer whose forward method has been replaced by :func:`install`."""
    return isinstance(module.__dict__.get("forward"), IndexerForward)


def _pass_plan(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass the plan of the call to the indexer of an attention module before the module runs; a forward pre-hook.
    Return the changed arguments of the call, or ``None`` (no change) for a call without a plan."""
    plan = kwargs.get(PLAN)
    module.indexer.forward.plan = plan  # type: ignore[union-attr]
    return None if plan is None else (args, {**kwargs, "attention_mask": NO_MASK})
