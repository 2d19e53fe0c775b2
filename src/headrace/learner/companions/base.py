"""What a companion is: it adds columns to a batch before the model computes it, and hears of every update.

    batch ──▶ mask, weights ──▶ companion.prepare(work) ──▶ ... ──▶ the model's own passes, which read the columns
    gradient is finite ──▶ companion.before_update() ──▶ the optimizer ──▶ companion.after_update(version)
    snapshot ──▶ companion.state() ··▶ one file under its name ··▶ companion.set_state(tensors)

Over several ranks all of them call each method together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from headrace.algo.base import Column
from headrace.algo.objective import Objective
from headrace.learner.config import LearnerConfig
from headrace.learner.forward import Forward
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.work import StepWork

if TYPE_CHECKING:
    from headrace.learner.core import LearnerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """What a companion is built from: the learner it stands beside, at version 0."""

    model: PreTrainedModel
    config: LearnerConfig
    objective: Objective
    context: LearnerContext
    forward: Forward
    optimizer: ShardOptimizer
    ranks: AnyRanks


class AuxiliaryModel:
    """Changes nothing and keeps nothing, unless a method says otherwise."""

    name: ClassVar[str]
    """Of its files in a snapshot, and of its spans in the trace."""
    columns: ClassVar[frozenset[Column]] = frozenset()
    """What an objective can read because of it."""

    @property
    def lends(self) -> bool:
        """Whether the model holds other weights while it prepares: nobody may copy them then."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether a snapshot has to hold something of it."""
        return True

    def prepare(self, work: StepWork) -> StepWork:
        """``work`` with columns of its own, computed without a gradient of the model, before the model's first pass
        over this batch, or over this part of one. ``work.weights_N`` are those of the loss; of a part,
        yet to be scaled.

        What it measures goes into ``work.metrics``, each rank's share.
        """
        return work

    def scale(self, factor: float) -> None:
        """All parts of the step have been prepared: multiply the gradient of its own, if it has one."""

    def forget(self) -> None:
        """Something failed: drop the gradient of its own, if it has one."""

    def make_room(self) -> None:
        """Take the memory that its part of the update will need, if it does not have it yet; it is called again where
        there was too little."""

    def before_update(self) -> None:
        """The gradient is finite; the weights are still those of the version before."""

    def after_update(self, version: int) -> None:
        """The weights are those of ``version``."""

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """What a snapshot holds of it: the same names in the same order on every rank. A tensor that lies on several
        ranks is written whole."""
        return ()

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what :meth:`state` gave, every tensor whole. Raises ``KeyError`` or ``ValueError`` for what
        does not fit."""
