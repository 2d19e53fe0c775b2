"""The contract of an auxiliary model: it adds columns to a batch before the model computes it, and follows every
update.

    batch ──▶ mask, weights ──▶ auxiliary.prepare(work) ──▶ ... ──▶ the model's own passes, which read the columns
    gradient is finite ──▶ auxiliary.before_update() ──▶ the optimizer ──▶ auxiliary.after_update(version)
    snapshot ──▶ auxiliary.state() ··▶ one file under its name ··▶ auxiliary.set_state(tensors)

With several ranks, all of them call each method together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from headrace.algo.base import Column
from headrace.algo.objective import Objective
from headrace.learner.base import LearnerContext
from headrace.learner.config import LearnerConfig
from headrace.learner.forward import Forward
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.work import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """The parts of a learner, at version 0, from which an auxiliary model is built. The learner passes them to the
    constructor of each auxiliary model."""

    model: PreTrainedModel
    """The trained model."""
    config: LearnerConfig
    """The settings of the learner, ``[learner]`` of the run file."""
    objective: Objective
    """What is minimised; it says which columns it reads."""
    context: LearnerContext
    """The other settings of the run that a learner needs, such as the sampling temperature."""
    forward: Forward
    """The forward passes of the trained model over a batch."""
    optimizer: ShardOptimizer
    """The optimizer of the trained model, which knows all trained weights."""
    ranks: AnyRanks
    """The processes over which the learner is spread."""


class AuxiliaryModel:
    """The base class of auxiliary models, whose methods do nothing unless they are overridden."""

    name: ClassVar[str]
    """Name of its files in a snapshot, and of its spans in the trace."""
    columns: ClassVar[frozenset[Column]] = frozenset()
    """Columns that it makes available to an objective."""

    @property
    def swaps_weights(self) -> bool:
        """Return whether the model temporarily holds other weights during :meth:`prepare`, so that no other thread may
        copy them."""
        return False

    @property
    def has_state(self) -> bool:
        """Return whether a snapshot must contain a state of this auxiliary model."""
        return True

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with the columns of this auxiliary model, computed without a gradient of the main model.

        It is called before the first pass of the main model over the batch, or over a part of it. ``work.weights_N``
        are the weights of the loss; for a part they are not normalised yet. Measured metrics go into ``work.metrics``,
        where each rank adds its share.
        """
        return work

    def scale(self, factor: float) -> None:
        """Multiply its own gradient, if it has one, by ``factor``. It is called when all parts of the step have been
        prepared."""

    def discard_gradient(self) -> None:
        """Discard its own gradient, if it has one, because the step failed."""

    def allocate(self) -> None:
        """Allocate the memory that its update will need. After a failure it is called again, and then allocates what is
        missing."""

    def before_update(self) -> None:
        """Prepare for an update: the gradient is finite, and the weights are still those of the version before."""

    def after_update(self, version: int) -> None:
        """Follow an update: the weights are now those of ``version``."""

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Return the state that a snapshot contains, with the same names in the same order on every rank. A tensor that
        is sharded over the ranks is written in parts."""
        return ()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the state that :meth:`state` returned, given as whole tensors, or as saved tensors, of which
        :func:`~headrace.learner.parallel.shards.part_of` reads this rank's part. Raises ``KeyError`` or ``ValueError``
        if it does not fit."""
