"""The settings of the mathematics: ``[algo]`` of a run file. Importing this module does not import torch.

π is the policy in training, μ the policy that sampled a token, π_old the policy in the denominator of a loss's ratio,
and ρ = π_old/μ. *Stale* tokens are tokens that older weights sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pydantic

from headrace.algo.advantages import AdvantageConfig, GrpoAdvantage
from headrace.algo.advantages.outcomes import Floats, Outcomes
from headrace.algo.advantages.tokens import ReverseKl
from headrace.algo.base import Column, Old
from headrace.algo.bundles import expand
from headrace.algo.corrections import CorrectionConfig, Tis
from headrace.algo.losses import AnyLoss, Dapo, LossConfig
from headrace.algo.reductions import ReductionConfig, TokenMean
from headrace.algo.shaping import ShapingConfig
from headrace.base.config import Section
from headrace.base.errors import ConfigError


class AlgoConfig(Section):
    """The settings of how rewards become advantages and gradients. The plain name of a formula replaces its table:
    ``loss = "gspo"`` means ``[algo.loss] kind = "gspo"``.
    """

    bundle: str | None = None
    """The name of a complete recipe; every key that is set here replaces the recipe's key. ``None``: no recipe."""
    shaping: tuple[ShapingConfig, ...] = ()
    """The terms that are added to the rewards, in the order of the tables."""
    advantage: AdvantageConfig = GrpoAdvantage()
    """The formula that computes advantages from rewards."""
    loss: LossConfig = Dapo()
    """The formula of the loss of one token."""
    correction: tuple[CorrectionConfig, ...] = (Tis(),)
    """The corrections for tokens that older weights sampled: one table or several; ``"none"`` for none. Unset: ``tis``.
    But unset means none for a loss whose ratio is relative to μ or that has no ratio, and if ``old`` is ``"engine"``,
    as it is by default in a run with ``flow.max_age`` above 0."""
    old: Old = "learner"
    """The policy that is π_old. ``"learner"``: the learner's weights before this step. If a batch is one update, the
    loss's ratio π/π_old is then 1 in value: no clip acts, and the correction multiplies by π_old/μ. ``"engine"``: μ
    itself, so that the loss's own ratio π/μ and its clips account for older weights; corrections by π_old/μ are
    refused. ``"kept"``: the weights that ``learner.old`` keeps, so that the loss's clips bound the distance of π from
    these weights; the correction multiplies by π_old/μ. ``"sampled"``: the learner's weights of the version that
    sampled each token, so that the clips act only on changes since that version, and the correction only on the
    mismatch of engine and learner. A copy of the weights is kept for each version up to ``flow.max_age``. Unset:
    ``"engine"`` in a run with ``flow.max_age`` above 0 that does not set a correction, if the loss has a ratio to
    π_old; ``"learner"`` otherwise."""
    reduction: ReductionConfig = TokenMean()
    """The rule that combines the losses of all tokens into one number. Unset: the reduction of the loss's paper."""
    allow_uncorrected: bool = False
    """Whether to allow training on stale tokens without any correction."""
    epochs: int = pydantic.Field(default=1, ge=1)
    """Number of passes over each batch. If a batch has more than one update, π_old of all updates is the learner before
    the first update (or the policy that ``old`` names), so that the loss's clips act. A version still is one batch."""
    minibatches: int = pydantic.Field(default=1, ge=1)
    """Number of parts of each batch. Each part makes one update. The groups of a batch are distributed over the parts
    anew in each pass, and never divided."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expand(cls, tree: Any) -> Any:
        """Return the table ``[algo]`` with names replaced by tables, merged over the bundle that it names, and with
        defaults that depend on the loss. Pydantic calls this before validation. A value that is not a table is returned
        unchanged."""
        return _add_loss_defaults(expand(dict(tree))) if isinstance(tree, dict) else tree

    @pydantic.model_validator(mode="after")
    def _refuse_conflicts(self) -> AlgoConfig:
        """Refuse two formulas that both multiply by the ratio to μ, kept weights that no formula reads, and several
        updates per batch for formulas that allow only one. Pydantic calls this after validation."""
        self._refuse_several()
        if self.old == "engine":
            return self._refuse_rho()
        if self.old in ("kept", "sampled"):
            self._refuse_unread_old()
        weights = [f"correction {part.kind!r}" for part in self.correction if part.weighs]
        if self.loss.corrects():
            weights.insert(0, f"loss {self.loss.kind!r}, whose ratio is π/μ,")
        if len(weights) > 1:
            raise ConfigError(
                f"algo counts the correction of stale tokens twice: {' and '.join(weights)} both weigh by it",
                remedy="keep one: set algo.correction = 'none', or algo.loss.anchor = 'old' where the loss has it",
            )
        return self

    def _refuse_several(self) -> None:
        """Refuse several updates per batch (``epochs``, ``minibatches``) if a formula uses the whole batch under the
        weights before the batch, or if there is a critic, which learns once per batch."""
        if self.epochs * self.minibatches == 1:
            return
        once = {"selected": "chooses its tokens", "baseline": "takes its baseline"}
        found = [f"a formula {words} from the whole batch" for column, words in once.items() if column in self.columns]
        found += ["the critic learns once of a batch"] if self.advantage.by_critic else []
        if found:
            raise ConfigError(
                f"algo.epochs={self.epochs} and algo.minibatches={self.minibatches} make several updates of a batch, "
                f"and {found[0]} under the weights before it",
                remedy="leave algo.epochs and algo.minibatches out, or choose another loss, correction or advantage",
            )

    def _refuse_unread_old(self) -> None:
        """Refuse ``old = "kept"`` or ``"sampled"`` if no formula reads log π_old: the copies of weights would be
        unused."""
        parts = (self.loss, *self.correction)
        replaced = next((part for part in self.correction if part.replaces_old), None)
        if replaced is None and any("log_old" in part.columns() for part in parts):
            return
        why = "neither loss nor correction reads π_old"
        if replaced is not None:
            why = f"correction {replaced.kind!r} gives its own π_old"
        raise ConfigError(f"algo.old={self.old!r} has no effect: {why}", remedy="leave algo.old out")

    def _refuse_rho(self) -> AlgoConfig:
        """Refuse corrections by ρ = π_old/μ if μ is π_old: ρ is then 1, and the loss's ratio already corrects."""
        for part in self.correction:
            if part.weighs or {"log_old", "log_mu"} <= part.columns():
                raise ConfigError(
                    f"algo counts the correction of stale tokens twice: with algo.old='engine' the loss's own ratio is "
                    f"π/μ, and correction {part.kind!r} reads π_old/μ, which is 1",
                    remedy="set algo.correction = 'none', or algo.old = 'learner'",
                )
        return self

    @property
    def columns(self) -> frozenset[Column]:
        """Return the columns that loss and corrections read in addition to those that every batch has."""
        return frozenset[Column]().union(*(part.columns() for part in (self.loss, *self.correction)))

    @property
    def corrected(self) -> bool:
        """Return whether the loss or a correction compensates for tokens of older weights, or no compensation is
        needed. An asynchronous run requires this."""
        columns = self.loss.columns()
        by_itself = self.loss.corrects() or (self.old in ("engine", "sampled") and "log_old" in columns)
        return not columns & {"log_old", "log_mu"} or by_itself or any(part.corrects for part in self.correction)

    @property
    def clip_is_idle(self) -> bool:
        """Return whether the loss's ratio π/π_old is 1 in value, because a batch is one update and π_old are the
        weights before it. Neither the clip nor other bounds of the loss then act on any token."""
        replaced = any(part.replaces_old for part in self.correction)
        several = self.epochs * self.minibatches > 1
        return not several and self.old == "learner" and _has_ratio_to_old(self.loss) and not replaced

    def credit(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode (or of every token, if ``advantage.per_token``), computed from its
        shaped reward. ``outcomes`` contains the rewards of a group or of a batch."""
        return self.advantage(self.shape_rewards(outcomes))

    def shape_rewards(self, outcomes: Outcomes) -> Outcomes:
        """Return ``outcomes`` with the shaped rewards in ``rewards_E``. The shaping terms of the configuration are
        applied in order, each to the result of the previous term."""
        for shaping in self.shaping:
            outcomes = replace(outcomes, rewards_E=shaping(outcomes))
        return outcomes

    def credit_of_episodes(self, outcomes: Outcomes) -> Floats:
        """Return the number for each episode of ``outcomes`` that a run sends to its learner. It is the advantage; or
        the shaped reward, if the learner's critic computes the advantages; or the reward's term of the advantage, if
        the learner adds the teacher's term."""
        shaped = self.shape_rewards(outcomes)
        if isinstance(self.advantage, ReverseKl):
            return self.advantage.credit_rewards(shaped)
        return shaped.values_E if self.advantage.by_critic else self.advantage(shaped)


def _add_loss_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the default reduction and correction of the loss to ``tree``, the table ``[algo]``, where it does not set
    them, and return it. ``tree`` is changed in place. An invalid loss is left for the validation to report."""
    try:
        loss: AnyLoss = _LOSS.validate_python(tree.get("loss", Dapo()))
    except pydantic.ValidationError:
        return tree  # validation of the field itself will report it
    tree.setdefault("reduction", {"kind": loss.reduction})
    by_itself = not _is_corrected_by_rho(loss) or tree.get("old") == "engine"
    tree.setdefault("correction", () if by_itself else (Tis(),))
    return tree


def _is_corrected_by_rho(loss: AnyLoss) -> bool:
    """Return whether the default of a correction by ρ = π_old/μ applies to the loss: it reads log π_old, and its own
    ratio is not relative to μ."""
    return "log_old" in loss.columns() and not loss.corrects()


def _has_ratio_to_old(loss: AnyLoss) -> bool:
    """Return whether the loss's ratio is π/π_old; false for a function of the user, whose ratio is unknown."""
    return _is_corrected_by_rho(loss) and "log_mu" not in loss.columns()


def for_old_tokens(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table ``[algo]`` for a run that trains tokens of older weights. If ``tree`` sets neither π_old nor the
    correction, π_old becomes μ, so that the loss's own clip acts on these tokens.

    >>> for_old_tokens({"loss": "grpo"})
    {'loss': 'grpo', 'old': 'engine'}
    >>> for_old_tokens({"loss": "grpo", "correction": "tis"})
    {'loss': 'grpo', 'correction': 'tis'}
    """
    try:
        whole = expand(dict(tree))
        loss: AnyLoss = _LOSS.validate_python(whole.get("loss", Dapo()))
    except (pydantic.ValidationError, ConfigError):
        return dict(tree)  # validation of the field itself will report it
    if "old" in whole or "correction" in whole:
        return dict(tree)
    return {**tree, "old": "engine"} if _has_ratio_to_old(loss) else dict(tree)


_LOSS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(LossConfig)
"""The validator of a single ``[algo.loss]``."""
