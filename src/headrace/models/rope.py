"""The longest context in which a model's rotary position embeddings depend only on a token's position.

transformers scales some rotary embeddings by the length of a whole call: ``longrope`` uses other factors for all
positions of a longer sequence, ``dynamic`` another base. In one flattened call, the longest sequence would determine
the scaling of all sequences; and cached keys were rotated before their sequence grew. Up to the length at which such a
scaling begins, all embeddings are functions of the position alone, so that engine and learner compute the same as
transformers computes for each sequence separately. Longer sequences are refused. This module only reads a
configuration.
"""

# gate: getattr - the settings of a foreign config differ from model to model

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BY_POSITION = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""The types of rotary embeddings that are functions of the position alone."""
BY_LENGTH = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}
"""The types of rotary embeddings that depend on a sequence's length, and the setting of the largest length up to which
they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The length of the longest sequence that a model may compute, and the reason for the limit."""

    length: int
    """The length in tokens."""
    reason: str = ""
    """Why the limit is below ``max_position_embeddings``, or applies to every sample; empty if that setting is the only
    reason."""


def context_limit(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the longest context of a model; ``None`` if its config has no ``max_position_embeddings``."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    limit = ContextLimit(length=longest)
    for kind, parameters in rope_types(config):
        if kind not in BY_LENGTH:
            continue
        name = BY_LENGTH[kind]
        length = int(parameters.get(name) or getattr(config, name, None) or longest)
        if length <= limit.length:
            limit = ContextLimit(
                length=length,
                reason=f"rope_type={kind!r} turns all positions of a sequence otherwise once it is longer than "
                f"{name}={length}, those of its cached keys too",
            )
    return limit


def unknown_rope(config: PreTrainedConfig) -> str:
    """Return the first unknown type of rotary embedding in the configuration; empty if there is none."""
    return next((kind for kind, _ in rope_types(config) if kind not in BY_POSITION and kind not in BY_LENGTH), "")


def wrong_factors(config: PreTrainedConfig) -> str:
    """Return what is wrong with the factors of a ``longrope`` in ``config``, which needs one factor for each pair of
    dimensions; empty if they are right."""
    for kind, parameters in rope_types(config):
        if kind != "longrope":
            continue
        short, long = (parameters.get(name) for name in ("short_factor", "long_factor"))
        if not (_are_factors(short) and _are_factors(long)):
            return f"short_factor={str(short)[:80]} or long_factor={str(long)[:80]} is no list of positive numbers"
        if len(short) != len(long):
            return f"short_factor has {len(short)} numbers and long_factor {len(long)}"
    return ""


def _are_factors(value: Any) -> TypeGuard[list[float]]:
    """Return whether the value of a setting is a list of positive numbers."""
    return isinstance(value, list) and all(isinstance(one, (int, float)) and one > 0 for one in value)


def rope_types(config: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the type and the parameters of each rotary embedding of ``config``: a single one, or one for each type of
    layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    for each in nested or [parameters]:
        yield str(each.get("rope_type") or each.get("type") or "default"), each
