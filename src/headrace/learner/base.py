"""What a learner is to the rest of the system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.weights import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A snapshot that is on its way to the engines."""

    version: int
    slot: int
    exposed_s: float
    """How long the learner stood still for the copy."""


class Learner(Protocol):
    """A learner as the controller sees it. It carries out its orders one after the other, in the order in which they
    were given: a step may be ordered while the one before is being made."""

    async def train(self, batch: Batch) -> StepReport:
        """One optimizer step: forward and backward over micro-batches, clip, update."""
        ...

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """log π of every token of the batch's mask, under the current weights and the sampling temperature; 0
        elsewhere."""
        ...

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Copy the weights into shared buffer ``slot``; returns as soon as the learner may go on."""
        ...

    async def published(self, publication: Publication) -> WeightUpdate:
        """Wait until that snapshot is hashed and can be staged."""
        ...

    async def resend(self, publication: Publication) -> WeightUpdate:
        """The same snapshot once more, whole, for an engine that could not use it as it came.

        Raises :class:`~headrace.base.errors.WeightsError` if the buffer does not hold it any more.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state into a fresh directory, flushed to disk."""
        ...
