"""Attention of packed passes with gradients: implementations, and the choice among them before a run starts.

a short pass ──▶ kinds of attention of the layers (kinds.py) ──▶ known reasons against flex ──▶ a trial of each kind
                                                                          └────── padded ◀────── a reason or a failure
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace.base.errors import ConfigError
from headrace.models.attention import PackedPlan, Plan
from headrace.models.config import AttentionName
from headrace.models.packed.flex import Compute, FlexPlan, fused, written_out
from headrace.models.packed.kinds import AttentionKind
from headrace.models.packed.trial import find_failure

LEAST_HEAD = 16
"""The smallest head size that torch's matrix products for GPUs support."""

MakePlan = Callable[..., Plan]
"""A function that returns the plan of a pass, given the lengths of its sequences, the device, and the rows of shared
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """The implementation of attention that a learner uses."""

    name: str
    """``flex``, ``padded``, or ``deterministic``."""
    plan: MakePlan
    """The function that returns the plan of a pass."""
    why: str
    """The reason for the choice in words."""
    layers: tuple[AttentionKind, ...] = ()
    """The kind of attention of each layer with attention; empty if it was not requested."""
    compute: Compute | None = None
    """The function that computes flex attention, for plans of parts of a pass; ``None`` for other implementations."""


PADDED = ChosenAttention(name="padded", plan=PackedPlan, why="learner.attention = 'padded'")
"""Attention in padded rows, which supports every kind of attention on every device."""


def choose(
    prefer: AttentionName, layers: Sequence[AttentionKind], device: torch.device, compute: Compute | None = None
) -> ChosenAttention:
    """Return the implementation of attention that ``prefer`` names for a model whose ``layers`` compute these kinds on
    ``device``.

    ``auto`` is flex attention on a GPU, if it compiles and its results are right in a trial; otherwise padded rows. On
    a CPU, flex attention stores all scores in memory. ``compute`` replaces the function that computes flex attention.
    Raises :class:`~headrace.base.errors.ConfigError` if ``flex`` is requested and cannot be computed.
    """
    padded = replace(PADDED, layers=tuple(layers))
    if prefer == "padded":
        return padded
    on_host = device.type == "cpu"
    if prefer == "auto" and on_host:
        return replace(padded, why="torch trains no flex attention on a CPU")
    computed_by = compute or (written_out if on_host else fused)
    kinds = list(dict.fromkeys(layers))
    reason = _reason_against(kinds, device) or find_failure(kinds, device, computed_by)
    if reason is None:
        why = "the scores are written out, as on every CPU" if on_host else "it compiles here, and a trial was right"
        plan = partial(FlexPlan, compute=computed_by)
        return ChosenAttention(name="flex", plan=plan, why=why, layers=padded.layers, compute=computed_by)
    if prefer == "flex":
        raise ConfigError(
            f"learner.attention='flex' cannot be computed on {device}: {reason}",
            remedy="set learner.attention = 'auto' or 'padded'",
        )
    return replace(padded, why=f"flex attention cannot be computed: {reason}")


def _reason_against(kinds: Sequence[AttentionKind], device: torch.device) -> str | None:
    """Return the reason why flex attention cannot compute these kinds on ``device``, if one is known before a trial;
    ``None`` otherwise."""
    if any(kind.indexed for kind in kinds):
        return "an indexer chooses the tokens that are attended to, and padded rows compute it"
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "torch has kernels for CUDA only"
    if importlib.util.find_spec("triton") is None:
        return "Triton, with which torch compiles it, is not installed"
    for kind in kinds:
        if kind.dtype == torch.float64:
            return "torch's kernels have no float64"
        if min(kind.key_size, kind.value_size) < LEAST_HEAD:
            return f"heads of size {min(kind.key_size, kind.value_size)} are smaller than {LEAST_HEAD}"
    return None
