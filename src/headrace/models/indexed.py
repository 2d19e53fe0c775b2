"""Attention to chosen tokens: an indexer scores all earlier tokens for every token, and the layer attends to the best.

    hidden states ──▶ indexer: queries, weights, one key a token ──▶ scores within the sequence ──▶ the best k
    queries, keys, values ───────────────────────────────────────────────────────────────────▶ attention ◀──┘

This is the sparse attention of DeepSeek-V3.2 (2025, section 2.1), and of GLM-5, where layers share a choice. The
indexer of transformers computes whole sequences of one length under a mask. In a call with a plan its own code runs on
the rows of the plan, with their masks, and an engine's pass gives it the keys of the cache. It has no gradient, in
transformers too.

A choice is a function of the sequence as far as no two scores around the k-th are equal. An indexer with a few heads
has many scores of exactly 0; there transformers itself chooses otherwise in a longer call.

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
"""Smallest number of heads of an indexer that is supported. A score is exactly 0 where all heads see a negative one."""


class KeyExchange:
    """A stand-in for transformers' cache with only the part that an indexer uses: the indexer gives it its keys and
    gets those to score. ``exchange`` is the function between the two."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        """Make the stand-in; ``exchange`` returns the keys to score, given those of the pass."""
        self._exchange = exchange

    def update_indexer(self, key_BLD: Tensor, layer: int) -> Tensor:
        """Return the keys that the indexer of ``layer`` scores, given those of the pass. Transformers' indexer calls
        it."""
        return self._exchange(key_BLD)


class _KeysKnown(Exception):
    """The exception by which :func:`keys_of` ends an indexer's forward pass as soon as its keys are known. It carries
    them."""

    def __init__(self, keys: Tensor) -> None:
        """Carry ``keys``, ``[N, D]``."""
        self.keys = keys


def keys_of(choose: Choose, inputs_N: tuple[Tensor, ...]) -> Tensor:
    """Return the indexer's keys ``[N, D]`` of the tokens of a pass, given its inputs, and score nothing. ``choose``
    runs the indexer."""

    def stop(key_BLD: Tensor) -> Tensor:
        """End the indexer's forward pass, as soon as its keys are known."""
        raise _KeysKnown(key_BLD[0])

    nothing = torch.ones(1, 1, 1, dtype=torch.bool, device=inputs_N[0].device)
    try:
        choose(tuple(each[None] for each in inputs_N), nothing, KeyExchange(stop))
    except _KeysKnown as known:
        return known.keys
    raise AssertionError("an indexer that keeps no keys")


class IndexerForward:
    """A replacement for the forward of an indexer. In a call with a plan, it lets the plan choose tokens within each
    packed sequence; in other calls, it runs the module's own forward."""

    def __init__(self, module: nn.Module) -> None:
        """Take the place of the forward of ``module``, an indexer."""
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self.plan: Any = None
        """The plan of the present call of the model, which a hook of the attention module sets; ``None`` without."""
        self._own = module.forward

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *further: Any,
        **named: Any,
    ) -> Tensor | ChosenTokens:
        """Return the tokens that the plan lets the indexer choose; without a plan, return what the module's own forward
        pass returns. The arguments are those of transformers."""
        if self.plan is None:
            return self._own(  # type: ignore[no-any-return]
                hidden_states, q_resid, position_embeddings, attention_mask, *further, **named
            )
        inputs_N = hidden_states[0], q_resid[0], *(each[0] for each in position_embeddings)
        found: ChosenTokens = self.plan.choose(self.layer, self.choose, inputs_N)
        return found

    @torch.no_grad()
    def choose(self, inputs_BL: tuple[Tensor, ...], seen_BLC: Tensor, cache: object) -> Tensor:
        """Return the mask ``[B, L, C]`` of the chosen tokens among those that ``seen_BLC`` allows, by the module's own
        forward pass over padded rows (see :data:`headrace.models.attention.Choose`)."""
        hidden, resid, cos, sin = inputs_BL
        places_BLk = self._own(hidden, resid, (cos, sin), seen_BLC, None, cache).long()
        return torch.zeros_like(seen_BLC).scatter_(-1, places_BLk, True) & seen_BLC


def install(model: nn.Module) -> None:
    """Replace the forward passes of the indexers of a loaded model, so that they choose among the tokens that a plan
    shows them."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            indexer.forward = IndexerForward(indexer)
            module.register_forward_pre_hook(_hand_over, with_kwargs=True)


def is_indexed(model: nn.Module) -> bool:
    """Return whether a layer of the model has an indexer."""
    return any(map(is_indexer, model.modules()))


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module chooses the tokens that an attention module sees."""
    return isinstance(module.__dict__.get("forward"), IndexerForward)


def _hand_over(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give the plan of the call to the indexer of an attention module, before the module runs; a hook of that module.
    Return the changed arguments of the call; ``None``, for a call without a plan, leaves them as they are."""
    plan = kwargs.get(PLAN)
    module.indexer.forward.plan = plan  # type: ignore[union-attr]
    return None if plan is None else (args, {**kwargs, "attention_mask": NO_MASK})
