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
    top_k: int = 0
    """Only this many of the most likely tokens, and those exactly as likely as the last of them, can be drawn; 0 for
    all."""
    top_p: float = 1.0
    """Only the most likely tokens whose probabilities together reach this can be drawn; 1 for all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one can be drawn; 0 for all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it if positive, multiplied if negative; 1 for none."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time it is in the answer."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these ids."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence; the token is kept as its last."""
    stop: tuple[str, ...] = ()
    """The answer ends with the token that completes one of these strings; its tokens are kept. They are looked for in
    the text with special tokens spelled out, so that one may name a special token."""
    seed: int = 0
    """With the position it fixes each draw, whatever else is in the batch."""
    record_kept: bool = False
    """Whether each token comes with what it was drawn from."""
    record_entropy: bool = False
    """Whether each token comes with the entropy of the distribution it was drawn from."""
    record_routing: bool = False
    """Whether each token of prompt and answer comes with its experts."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
