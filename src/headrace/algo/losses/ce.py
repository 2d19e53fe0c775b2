"""Cross-entropy: supervised learning of the tokens of the mask."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import LossSection


class Ce(LossSection):
    """−log π. Advantages are not looked at: it is for demonstrations, in a loop of your own. A run, which has only what
    the model has sampled, refuses it. Source: maximum likelihood."""

    kind: Literal["ce"] = "ce"
    """Selects this loss."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        return TokenLoss(tokens_N=-inputs.log_pi_N)
