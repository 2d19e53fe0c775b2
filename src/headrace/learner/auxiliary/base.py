"""The contract of an auxiliary model, which adds columns to a batch before the training passes, and is notified of
every update.

    batch ──▶ mask, weights ──▶ auxiliary.prepare(work) ──▶ ... ──▶ the training passes, which read the columns
    gradient is complete ──▶ auxiliary.before_clip() ──▶ its norm is clipped
    gradient is finite ──▶ auxiliary.before_update() ──▶ the optimizer ──▶ auxiliary.after_update(version)
    snapshot ──▶ auxiliary.state() ··▶ one file under its name ··▶ auxiliary.set_state(tensors)

With several ranks, all ranks call each method together.
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
    """The parts of a learner at version 0 that the constructors of auxiliary models get."""

    model: PreTrainedModel
    """The trained model."""
    config: LearnerConfig
    """The settings of the learner, ``[learner]`` of the run file."""
    objective: Objective
    """The objective that the learner minimises; its ``columns`` are the columns that it reads."""
    context: LearnerContext
    """Other settings of the run, such as the sampling temperature."""
    forward: Forward
    """The forward passes of the trained model over batches."""
    optimizer: ShardOptimizer
    """The optimizer of the trained model, with the list of all trained weights."""
    ranks: AnyRanks
    """The processes of the learner."""


class AuxiliaryModel:
    """The base class of auxiliary models. Its methods do nothing; subclasses override the methods that they need."""

    name: ClassVar[str]
    """The name of the model's files in a snapshot, and of its spans in the trace."""
    columns: ClassVar[frozenset[Column]] = frozenset()
    """The columns that this model computes for objectives."""
    prepares: ClassVar[bool] = True
    """Whether :meth:`prepare` does anything, so that it has to be called."""

    @property
    def swaps_weights(self) -> bool:
        """Return whether the trained model has the weights of another version during :meth:`prepare`, so that no other
        thread may copy its weights."""
        return False

    @property
    def has_state(self) -> bool:
        """Return whether a snapshot must contain the :meth:`state` of this auxiliary model."""
        return True

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with the columns of this auxiliary model, computed without a gradient of the trained model.

        Called before the first training pass over the batch, or over a part of it. ``work.weights_N`` are the token
        weights of the loss; for a part they are not normalised yet. Metrics are added to ``work.metrics``; each rank
        adds its share.
        """
        return work

    def scale(self, factor: float) -> None:
        """Multiply the gradient of this model, if it has one, by ``factor``. Called after :meth:`prepare` for all parts
        of a step."""

    def discard_gradient(self) -> None:
        """Discard the gradient of this model, if it has one, because the step failed."""

    def allocate(self) -> None:
        """Allocate the memory for the update of this model. After a failure it is called again, and allocates only
        missing memory."""

    def before_clip(self) -> dict[str, float]:
        """Called before each update, when the gradient of the trained model is complete and neither clipped nor known
        to be finite. The gradient may be changed; weights whose gradient is removed are not updated. Return
        metrics."""
        return {}

    def before_update(self) -> None:
        """Called before an update: the gradient is finite, and the trained model still has the weights of the previous
        version."""

    def after_update(self, version: int) -> None:
        """Called after an update: the trained model now has the weights of ``version``."""

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Return pairs of a name and a tensor for a snapshot, with the same names in the same order on every rank. Of a
        tensor that is sharded over the ranks, each rank writes its part."""
        return ()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the state that :meth:`state` returned. ``state`` contains whole tensors, or saved tensors, of which
        :func:`~headrace.learner.parallel.shards.slice_shard` reads this rank's shard. Raises ``KeyError`` or
        ``ValueError`` if it does not match this model."""
