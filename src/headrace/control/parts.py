"""The components that a controller drives: engine, learner, environment, scorers and tasks, behind their contracts."""

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
    """The components that attempt tasks and score the attempts."""

    engine: Engine
    scorer: Scorer
    env: Environment
    clock: Clock
    eval_tasks: Sequence[Task]
    """The held-out rows; empty: there is no evaluation."""
    sampling: Sampling
    """The sampling settings of training; the seed is replaced for every turn."""
    max_context: int
    """Number of tokens that prompt and completion may have together."""
    decode: Callable[[Sequence[int]], str]
    """Converts the token ids of a completion into the text that is scored."""
    agents: Agents = POLICY_ALONE
    """The agents that answer, by name; agents with fixed weights have engines of their own."""
    chat: Chat | None = None
    """Renders and parses the model's messages; ``None``: the environment uses token ids."""
    limits: EpisodeLimits = UNLIMITED
    """The limits of one episode, in turns, tokens and tool calls."""
    episode_timeout_s: float | None = None
    """Seconds that an attempt may take; ``None``: no limit."""
    turn_scorer: TurnScorer | None = None
    """Scores turns while their episode is still running; ``None``: turns are not scored."""
    segments: Callable[[Tokens], Sequence[int]] | None = None
    """Returns the starts of a turn's segments, except for the first, to which process rewards are given; ``None``:
    process rewards are given to whole turns."""
    episode_retries: int = 0
    """Number of times that an episode whose environment failed is attempted again."""
    work_signs: Callable[[], int] = lambda: 0
    """Returns a count that grows while processes work that report it in no other way; growth shows that the run is
    alive."""
    standstills: Callable[[], Sequence[Standstill]] = tuple
    """Returns the processes that make no progress."""

    def num_steps(self) -> int:
        """Return the steps of all engines plus the signs of work; while this grows, the run is alive."""
        return self.work_signs() + sum(engine.stats().steps for engine in (self.engine, *self.agents.engines.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(Serving):
    """The components of one run, behind their contracts: fakes, processes of this machine, or processes of a
    cluster."""

    learner: Learner
    tasks: Sequence[Task]
    """The rows to train on, by row index."""
    advantages: Callable[[Sequence[ScoredGroup]], Sequence[Credit]]
    """Computes the credit of every episode of a batch that counts in a baseline, in order: one advantage, or one for
    each turn."""
    run_dir: Path
    """The run's directory, in which checkpoints are written."""
    teachers: Teachers | None = None
    """The teachers that read answers while these are scored; ``None``: there are none."""
    engine_set: EngineSet | None = None
    """The set of engines behind ``engine``, which may leave and join; ``None``: there is one engine, which stays."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """How running sequences continue when new weights are committed."""
