"""The attention that a learner's models compute with, which is chosen when they are loaded."""

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
"""The attention of a deterministic model."""


def attention_for(
    model: PreTrainedModel, prefer: AttentionName, layers: Mapping[int, AttentionKind]
) -> ChosenAttention:
    """Return the attention of ``model``, whose ``layers`` compute these kinds, by the setting ``learner.attention``,
    and say in the log which it is.

    Raises :class:`~headrace.base.errors.ConfigError` for ``flex`` where it cannot be computed.
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
def attention_of(model: PreTrainedModel, prefer: AttentionName) -> ChosenAttention:
    """Return the attention of ``model`` as :func:`attention_for` does, after a pass over two tokens that shows the
    kinds of its layers."""
    recorder = KindRecorder(model.device)
    if not is_deterministic(model):
        model(**probe_of(recorder), use_cache=False)
    return attention_for(model, prefer, recorder.layers)


def probe_of(plan: PackedPlan) -> dict[str, Any]:
    """Return the keyword arguments of a forward pass over the tokens of ``plan``, all of id 0."""
    ids_N = torch.zeros_like(plan.positions_N)
    return {"input_ids": ids_N[None], "position_ids": plan.positions_N[None], PLAN: plan}
