"""Settings of the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section

LEAST_TEMPERATURE = 0.01
"""Of what is sampled: below, 32 bits do not hold what becomes of the logits. 0 takes the most likely token."""


class EngineConfig(Section):
    """How sequences are sampled, and how many at once."""

    kind: Literal["native"] = "native"
    """The embedded engine."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Sampling temperature while training; the learner uses the same."""
    top_k: int = Field(default=0, ge=0)
    """Only this many of the most likely tokens can be drawn; 0 for all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the most likely tokens whose probabilities together reach this can be drawn; 1 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this fraction as likely as the most likely one can be drawn; 0 for all."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences in the batch at once."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens. Unset: the longest prompt of the data plus ``max_new_tokens``."""
    max_step_tokens: int = Field(default=2048, ge=1)
    """Tokens of one step: those of decoding sequences come first, pieces of prompts get the rest."""
    max_waiting: int = Field(default=65_536, ge=1)
    """Requests that may wait to join the batch; one more is refused."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values fit the cache. Unset: all that ``max_sequences`` of ``max_context`` could need, but
    at most three tenths of the free memory."""
    fork_memory: int = Field(default=256, ge=0)
    """How many ended sequences can still be forked: the tokens of that many are kept."""
    max_pinned_versions: int = Field(default=2, ge=1)
    """Older versions that sequences may stay under at once: each is a copy of the model. Those that would need one
    more wait until one is free."""
    stream_steps: int = Field(default=8, ge=1)
    """Steps over which the commit mode ``stream`` spreads the exchange of the parameters."""
    kernels: Literal["auto", "off"] = "auto"
    """Whether parts of the model run as fused kernels where there are any for this machine."""
    flush_tokens: int = Field(default=64, ge=1)
    """A running sequence's tokens are reported each time there are this many of them, and when it ends."""
