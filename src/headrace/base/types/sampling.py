"""The sampling parameters of a request."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one generation request.

    >>> Sampling(max_new_tokens=8).temperature
    1.0
    """

    max_new_tokens: int
    """The largest number of sampled tokens."""
    temperature: float = 1.0
    """The temperature: logits are divided by it. At 0 the likeliest token is taken, with a recorded logprob of 0,
    since it was certain."""
    top_k: int = 0
    """Only this many of the likeliest tokens, and those exactly as likely as the last of them, can be drawn; 0 for
    all."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities together reach this can be drawn; 1 for all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest one can be drawn; 0 for all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that are in the prompt or the answer are divided by it if positive, multiplied if negative; 1
    for none."""
    presence_penalty: float = 0.0
    """The amount subtracted from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """The amount subtracted from the logit of a token for each time it is in the answer."""
    logit_bias: dict[int, float] = {}
    """The amounts added to the logits of these ids."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence; the token is kept as its last."""
    stop: tuple[str, ...] = ()
    """The answer ends with the token that completes one of these strings; its tokens are kept. The text is searched
    with special tokens spelled out, so that a string may name a special token."""
    structure: str = ""
    """The form that the answer must have, such as a JSON schema, in the language of the engine's mask maker; empty for
    any form. Tokens that do not fit cannot be drawn, and kept-sets are recorded without them."""
    seed: int = 0
    """The seed. Together with a token's position it determines the draw of that token, whatever other sequences are in
    the batch."""
    record_kept: bool = False
    """Whether to record each token's kept-set: the vocabulary entries that could be drawn."""
    record_entropy: bool = False
    """Whether to record the entropy of the distribution that each token was drawn from."""
    record_top: int = 0
    """How many of the model's likeliest entries to record at each token, with their log-probabilities at temperature 1,
    before bias, penalties and truncation; 0 for none."""
    record_routing: bool = False
    """Whether to record the experts (of a mixture-of-experts model) of each token of prompt and answer."""

    @property
    def truncated(self) -> bool:
        """Return whether the parameters exclude some tokens from being drawn, by top-k, top-p, min-p or a structure."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or bool(self.structure)
