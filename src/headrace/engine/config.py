"""Settings of the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section


class EngineConfig(Section):
    """How sequences are sampled, and how many at once."""

    kind: Literal["native"] = "native"
    """The embedded engine."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature while training; the learner uses the same."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences in the batch at once: rows of the key-value cache."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens: columns of the key-value cache. Unset: the longest prompt of the data
    plus ``max_new_tokens``."""
    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens that may join the batch in one step."""
    flush_tokens: int = Field(default=64, ge=1)
    """A running sequence's tokens are reported each time there are this many of them, and when it ends."""
