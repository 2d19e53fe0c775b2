"""The contract between a learner and the rest of the system."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.base.clock import Clock, RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.weights import WeightUpdate
from headrace.learner.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A snapshot of the weights that is being published to the engines."""

    version: int
    """Version of the weights."""
    slot: int
    """Number of the shared buffer that holds the copy."""
    exposed_s: float
    """Seconds that training stood still for the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """The parts of a run's settings that a learner needs."""

    temperature: float
    """Temperature of the sampling, by which logits are divided."""
    total_steps: int
    """The step at which a decaying schedule ends."""
    model_dir: Path
    """Directory with the files of the tokenizer, which are copied into every snapshot."""
    clock: Clock
    """Clock from which spans and durations are measured."""
    progress: Progress = field(default_factory=lambda: Progress(RealClock()))
    """Receives the unit of work that the learner is at."""


class Learner(Protocol):
    """A learner as the controller sees it. It carries out calls one after the other, in the order in which they were
    made: a step may be requested while the step before it is being computed."""

    async def step(self, outline: BatchOutline) -> StepReport:
        """Lay out the batch of ``outline`` and make one step of it, forward and backward passes over micro-batches,
        gradient clipping and update, and return its metrics, token counts and results for each token."""
        ...

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Return log π of every token in the mask of ``batch``, ``[N]``, under the current weights and the sampling
        temperature; 0 elsewhere."""
        ...

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Copy the weights of ``version`` into the shared buffer number ``slot``, from which engines read them, and
        return as soon as training may continue."""
        ...

    async def published(self, publication: Publication) -> WeightUpdate:
        """Wait until the snapshot is hashed and can be staged by engines, and return the message that announces it to
        them."""
        ...

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Publish the same snapshot once more, as whole tensors, for an engine that could not use it.

        Raises :class:`~headrace.base.errors.WeightsError` if the buffer does not hold it any more.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Begin to write model, optimizer, schedule and random state into a new directory, and return when the learner
        can go on: it has copied them, or has written them already."""
        ...

    async def saved(self, directory: Path) -> None:
        """Wait until everything that :meth:`save` began to write into ``directory`` is there, flushed to disk."""
        ...
