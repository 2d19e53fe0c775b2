"""The contract of a learner: the interface that the controller calls, and the settings that a learner gets from the
run."""

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
    """The version of the weights."""
    slot: int
    """The index of the shared buffer that contains the copy."""
    exposed_s: float
    """The time, in seconds, that training stood still for the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """The parts of a run's settings that a learner needs."""

    temperature: float
    """The sampling temperature, by which logits are divided."""
    total_steps: int
    """The step at which a decaying schedule ends."""
    model_dir: Path
    """The directory with the files of the tokenizer, which are copied into every snapshot."""
    clock: Clock
    """The clock by which spans and durations are measured."""
    progress: Progress = field(default_factory=lambda: Progress(RealClock()))
    """The record of the learner's present unit of work."""


class Learner(Protocol):
    """The asynchronous interface of a learner, for the controller. Calls are executed one after the other, in the order
    in which they were made, so a step may be requested while the previous step is being computed."""

    async def step(self, outline: BatchOutline) -> StepReport:
        """Lay out the batch of ``outline`` and make one step of it, forward and backward passes over micro-batches,
        gradient clipping and update, and return its metrics, token counts and results for each token."""
        ...

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Return log π of every token in the mask of ``batch``, ``[N]``, under the current weights and the sampling
        temperature; 0 elsewhere."""
        ...

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Copy the weights of ``version`` into the shared buffer with the index ``slot``, from which engines read them.
        Return as soon as training may continue."""
        ...

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        """Wait until the snapshot of ``publication`` is hashed and engines can stage it, and return the message that
        announces it to the engines."""
        ...

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Publish the snapshot of ``publication`` once more, as whole tensors, for an engine that could not use it.

        Raises :class:`~headrace.base.errors.WeightsError` if the buffer does not contain this version any more.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Start to write model, optimizer, schedule and random state into a new directory. Return when the learner can
        continue, because the state is copied or written."""
        ...

    async def wait_until_saved(self, directory: Path) -> None:
        """Wait until all files that :meth:`save` started to write into ``directory`` are complete and flushed to
        disk."""
        ...
