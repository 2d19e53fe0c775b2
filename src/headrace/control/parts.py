"""What a controller controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.base.clock import Clock
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import Credit, ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.control.board import Standstill
from headrace.control.teaching import Teachers
from headrace.engine import Engine, EngineSet
from headrace.learner import Learner
from headrace.rollout import UNLIMITED, Chat, EpisodeLimits
from headrace.rollout.agents import POLICY_ALONE, Agents
from headrace.rollout.environments import Environment
from headrace.rollout.scoring import Scorer, TurnScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What it takes to attempt a task and to score the attempt."""

    engine: Engine
    scorer: Scorer
    env: Environment
    clock: Clock
    eval_tasks: Sequence[Task]
    """Held-out rows; empty: no evaluation."""
    sampling: Sampling
    """How training samples; its seed is replaced for every turn."""
    max_context: int
    """Prompt and completion together may be this long."""
    decode: Callable[[Sequence[int]], str]
    """Ids of a completion to the text that is scored."""
    agents: Agents = POLICY_ALONE
    """Who answers under which name; those with frozen weights have engines of their own."""
    chat: Chat | None = None
    """Writes and reads the messages of the model; ``None``: the environment asks in tokens."""
    limits: EpisodeLimits = UNLIMITED
    """What one episode may have."""
    episode_timeout_s: float | None = None
    """How long an attempt may take; ``None``: no limit."""
    turn_scorer: TurnScorer | None = None
    """Scores turns while their episode goes on; ``None``: nobody does."""
    segments: Callable[[Tokens], Sequence[int]] | None = None
    """Where the segments of a turn begin that process rewards grade, the first aside; ``None``: they grade turns."""
    episode_retries: int = 0
    """How often an episode whose environment failed is attempted again."""
    signs: Callable[[], int] = lambda: 0
    """Signs of work of processes that tell nobody else of it: while their number grows, something moves."""
    standing: Callable[[], Sequence[Standstill]] = tuple
    """Processes that do not go on."""

    def num_steps(self) -> int:
        """Steps of all engines, and signs of work of the learner: while it grows, answers are on their way."""
        return self.signs() + sum(engine.stats().steps for engine in (self.engine, *self.agents.engines.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(Serving):
    """The parts of one run, behind their contracts: fakes, processes of this machine, or a cluster's."""

    learner: Learner
    tasks: Sequence[Task]
    """The rows to train on, by row index."""
    advantages: Callable[[Sequence[ScoredGroup]], Sequence[Credit]]
    """The groups of a batch to the advantage of every episode that counts in a baseline, in order: a number, or one for
    each of its turns."""
    run_dir: Path
    """Where checkpoints go."""
    teachers: Teachers | None = None
    """Who is asked about answers while they are scored; ``None``: nobody."""
    crew: EngineSet | None = None
    """Of engines that come and go behind ``engine``; ``None``: it is there, and stays."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of running sequences when new weights are committed."""
