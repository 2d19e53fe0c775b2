"""The choice of the attention implementation of a learner's models, when they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.models.attention import PLAN, PackedPlan
from headrace.models.config import AttentionName
from headrace.models.kernels.deterministic import InvariantPlan, is_deterministic
from headrace.models.packed import PADDED, ChosenAttention, choose
from headrace.models.packed.kinds import AttentionKind, KindRecorder

log = logging.getLogger("headrace")

DETERMINISTIC = replace(
    PADDED, name="deterministic", plan=InvariantPlan, why="model.deterministic computes attention as the engine does"
)
"""The attention implementation for a deterministic model."""


def select_attention(
    model: PreTrainedModel, prefer: AttentionName, layers: Mapping[int, AttentionKind]
) -> ChosenAttention:
    """Return the attention implementation for ``model``, chosen by ``prefer``, the setting ``learner.attention``, and
    by ``layers``, the kind of attention of each layer. The choice is written to the log.

    Raises :class:`~headrace.base.errors.ConfigError` for ``flex`` if this model or machine cannot compute it.
    """
    if is_deterministic(model):
        if prefer == "flex":
            raise ConfigError(
                "learner.attention='flex' with model.deterministic: its sums are not those of the engine, bit for bit",
                remedy="leave learner.attention out, or model.deterministic",
            )
        return DETERMINISTIC
    chosen = choose(prefer, list(layers.values()), model.device)
    on_host = model.device.type == "cpu"
    writes_scores = prefer != "padded" and chosen.name == ("flex" if on_host else "padded")
    log.log(logging.WARNING if writes_scores else logging.INFO, "attention is %s: %s", chosen.name, chosen.why)
    return chosen


@torch.no_grad()
def choose_attention(model: PreTrainedModel, prefer: AttentionName) -> ChosenAttention:
    """Return the attention implementation for ``model`` as :func:`select_attention` does, which describes ``prefer``.
    The kinds of its layers are determined by a pass over two tokens."""
    recorder = KindRecorder(model.device)
    if not is_deterministic(model):
        model(**make_probe(recorder), use_cache=False)
    return select_attention(model, prefer, recorder.layers)


def make_probe(plan: PackedPlan) -> dict[str, Any]:
    """Return the keyword arguments of a forward pass with ``plan``, over tokens that all have the id 0."""
    ids_N = torch.zeros_like(plan.positions_N)
    return {"input_ids": ids_N[None], "position_ids": plan.positions_N[None], PLAN: plan}
