"""Settings of the mathematics: ``[algo]`` of a run file. Loads without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pydantic

from headrace.algo.advantages import AdvantageConfig, GrpoAdvantage
from headrace.algo.advantages.scores import Floats, Scores
from headrace.algo.bundles import expand
from headrace.algo.corrections import CorrectionConfig, Tis
from headrace.algo.losses import AnyLoss, Dapo, LossConfig
from headrace.algo.reductions import ReductionConfig, TokenMean
from headrace.algo.shaping import ShapingConfig
from headrace.config import Section
from headrace.errors import ConfigError


class AlgoConfig(Section):
    """How rewards become credit, and credit becomes a gradient. A name alone stands for its table:
    ``loss = "gspo"`` is ``[algo.loss] kind = "gspo"``.
    """

    bundle: str | None = None
    """A complete recipe by name; every key that is set here replaces the recipe's."""
    shaping: tuple[ShapingConfig, ...] = ()
    """What is added to rewards first, one table after the other."""
    advantage: AdvantageConfig = GrpoAdvantage()
    """How rewards become credit."""
    loss: LossConfig = Dapo()
    """The formula of one token."""
    correction: tuple[CorrectionConfig, ...] = (Tis(),)
    """What makes up for tokens that older weights sampled: one table or several; ``"none"`` for none. Unset: ``tis``,
    or none for a loss that takes its own ratio against μ, or that has no ratio."""
    reduction: ReductionConfig = TokenMean()
    """How token losses become one number. Unset: the one of the loss's paper."""
    allow_uncorrected: bool = False
    """Permit training on stale tokens without any correction."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _complete(cls, tree: Any) -> Any:
        """Names become tables, the bundle is laid under the keys, and what the loss decides is filled in."""
        return _fill(expand(dict(tree))) if isinstance(tree, dict) else tree

    @pydantic.model_validator(mode="after")
    def _counts_once(self) -> AlgoConfig:
        weights = [f"correction {part.kind!r}" for part in self.correction if part.weighs]
        if self.loss.corrects():
            weights.insert(0, f"loss {self.loss.kind!r}, whose ratio is π/μ,")
        if len(weights) > 1:
            raise ConfigError(
                f"algo counts the correction of stale tokens twice: {' and '.join(weights)} both weigh by it",
                remedy="keep one: set algo.correction = 'none', or algo.loss.anchor = 'old' where the loss has it",
            )
        return self

    @property
    def corrected(self) -> bool:
        """Whether tokens of older weights are accounted for: what an asynchronous run asks."""
        no_ratio = not self.loss.needs() & {"log_old", "log_mu"}
        return no_ratio or self.loss.corrects() or any(part.corrects for part in self.correction)

    def credit(self, scores: Scores) -> Floats:
        """The advantage of every episode (or token, if ``advantage.per_token``) from its shaped reward."""
        for shaping in self.shaping:
            scores = replace(scores, rewards_E=shaping(scores))
        return self.advantage(scores)


def _fill(tree: dict[str, Any]) -> dict[str, Any]:
    try:
        loss: AnyLoss = _LOSS.validate_python(tree.get("loss", Dapo()))
    except pydantic.ValidationError:
        return tree  # the field itself says what is wrong
    tree.setdefault("reduction", {"kind": loss.reduction})
    by_itself = loss.corrects() or "log_old" not in loss.needs()
    tree.setdefault("correction", () if by_itself else (Tis(),))
    return tree


_LOSS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(LossConfig)
