"""How long a sequence may be before its rotary position embedding depends on more than a token's position.

transformers scales some rotary embeddings by the length of a whole call: ``longrope`` turns every position of a longer
sequence by other factors, ``dynamic`` by another base. In one flattened call the longest sequence would decide for all,
and keys that are in a cache were turned before the sequence grew. Up to the length where such a scaling begins all of
them are functions of the position alone, so that engine and learner compute what transformers computes for each
sequence by itself. No longer sequence is taken. Reads only a config.
"""

# gate: getattr - the settings of a foreign config differ from model to model

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BY_POSITION = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Types of rotary embeddings that are functions of the position."""
BY_LENGTH = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}
"""Types that depend on a sequence's length, and the setting that names the longest sequence that they leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The longest sequence that a model is computed on, and what limits it."""

    length: int
    """Tokens."""
    reason: str = ""
    """Why it is shorter than ``max_position_embeddings``, or may not be passed by any sample; empty for no reason but
    that setting."""


def context_limit(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the longest context of a model; ``None`` where its config does not say ``max_position_embeddings``."""
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
    """Return the first type of rotary embedding of which it is not known what it depends on; empty if there is none."""
    return next((kind for kind, _ in rope_types(config) if kind not in BY_POSITION and kind not in BY_LENGTH), "")


def rope_types(config: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the type and the parameters of each rotary embedding: one, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    for each in nested or [parameters]:
        yield str(each.get("rope_type") or each.get("type") or "default"), each
