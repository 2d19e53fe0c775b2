"""Trials find the episode that kills its environment worker: the suspected episodes are divided into halves, and each
half begins again together in a worker of its own.

    a worker dies ──▶ its episodes begin again in the shared workers (most deaths have a cause outside: a kill, memory)
    it happens to an episode a second time ──▶ it is a suspect, as are all that were lost twice in that worker
    suspects ──▶ two halves, a trial each ──▶ the half that kills its worker is divided again ──▶ one episode is left

Among 64 suspects one culprit is found after six divisions. Nothing else waits for a trial.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.launch.clients.shift import EnvironmentWorker, EpisodeCall

TRIALS = 4
"""Trials that run at the same time: so many workers are started beyond those of the settings."""


@dataclass(slots=True, eq=False)
class SuspectTrial:
    """Suspected episodes that begin again together, in a worker that no other episode uses."""

    num_suspects: int
    """Episodes that were assigned to it."""
    worker: asyncio.Future[EnvironmentWorker] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The worker, when it is ready."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when none of its episodes needs the worker any more."""

    def leave(self) -> None:
        """One of its episodes has ended, or was lost."""
        self.num_suspects -= 1
        if not self.num_suspects:
            self.ended.set()


def divide(suspects: Sequence[EpisodeCall]) -> list[SuspectTrial]:
    """Assign the episodes of a worker that has died to trials, half of them to each; a single one to a trial alone."""
    middle = (len(suspects) + 1) // 2
    trials = []
    for half in (suspects[:middle], suspects[middle:]):
        if half:
            trial = SuspectTrial(num_suspects=len(half))
            trials.append(trial)
            for visit in half:
                visit.trial = trial
    return trials
