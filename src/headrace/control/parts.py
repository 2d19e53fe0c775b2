"""What a controller controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.clock import Clock
from headrace.engine import Engine
from headrace.env import Env
from headrace.learner import Learner
from headrace.scoring import Scorer
from headrace.types.sampling import Sampling
from headrace.types.scored import ScoredGroup
from headrace.types.task import Task
from headrace.types.weights import Interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What it takes to attempt a task and to score the attempt."""

    engine: Engine
    scorer: Scorer
    env: Env
    clock: Clock
    eval_tasks: Sequence[Task]
    """Held-out rows; empty: no evaluation."""
    sampling: Sampling
    """How training samples; its seed is replaced for every turn."""
    max_context: int
    """Prompt and completion together may be this long."""
    decode: Callable[[Sequence[int]], str]
    """Ids of a completion to the text that is scored."""
    episode_timeout_s: float | None = None
    """How long an attempt may take; ``None``: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Serving):
    """The parts of one run, behind their contracts: fakes, processes of this machine, or a cluster's."""

    learner: Learner
    tasks: Sequence[Task]
    """The rows to train on, by row index."""
    advantages: Callable[[Sequence[ScoredGroup]], Sequence[float]]
    """The groups of a batch to one advantage per episode that counts in a baseline, in order."""
    run_dir: Path
    """Where checkpoints go."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of running sequences when new weights are committed."""
