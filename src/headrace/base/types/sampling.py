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
    """The temperature, by which logits are divided. At 0 the likeliest token is chosen with certainty, so that its
    recorded logprob is 0."""
    top_k: int = 0
    """The number of likeliest tokens that can be drawn, together with tokens exactly as likely as the last of them; 0
    for all."""
    top_p: float = 1.0
    """The smallest set of likeliest tokens whose probabilities together reach this value can be drawn; 1 for all."""
    min_p: float = 0.0
    """Only tokens with at least this fraction of the likeliest token's probability can be drawn; 0 for all."""
    repetition_penalty: float = 1.0
    """The divisor of positive logits, and factor of negative logits, of tokens that are in the prompt or the answer; 1
    for no penalty."""
    presence_penalty: float = 0.0
    """The amount subtracted from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """The amount subtracted from the logit of a token for each time it is in the answer."""
    logit_bias: dict[int, float] = {}
    """The amounts added to the logits of these token ids."""
    stop_ids: tuple[int, ...] = ()
    """The token ids that end the sequence when they are sampled. The sampled stop token is kept as the last token."""
    stop: tuple[str, ...] = ()
    """The strings that end the answer. The token that completes a string is the last token of the answer. Special
    tokens are part of the searched text, so that a string may name a special token."""
    structure: str = ""
    """The form that the answer must have, such as a JSON schema, in the language of the engine's mask maker; empty for
    any form. Tokens that violate the form cannot be drawn, and kept-sets do not contain them."""
    seed: int = 0
    """The random seed. The seed and the position of a token determine the draw of the token, independently of other
    sequences in the batch."""
    record_kept: bool = False
    """Whether to record each token's kept-set: the vocabulary entries that could be drawn."""
    record_entropy: bool = False
    """Whether to record the entropy of the distribution that each token was drawn from."""
    record_top: int = 0
    """The number of the model's likeliest entries to record at each token, with their log-probabilities at temperature
    1, before bias, penalties and truncation; 0 for none."""
    record_routing: bool = False
    """Whether to record the experts (of a mixture-of-experts model) of each token of prompt and answer."""

    @property
    def truncated(self) -> bool:
        """Return whether the parameters exclude some tokens from being drawn, by top-k, top-p, min-p or a structure."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or bool(self.structure)
