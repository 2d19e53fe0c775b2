"""How tokens are to be sampled."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one generation request.

    >>> Sampling(max_new_tokens=8).temperature
    1.0
    """

    max_new_tokens: int
    """Stop after this many sampled tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (its recorded logprob is then 0: it was certain)."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence; the token is kept as its last."""
    seed: int = 0
    """With the position it fixes each draw, whatever else is in the batch."""
