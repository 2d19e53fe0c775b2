"""The components that a controller drives: engine, learner, environment, scorers and tasks, each behind its contract,
so that the controller does not know whether they are fakes, local processes or processes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import Credit, ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.control.board import Standstill
from headrace.control.teaching import Teachers
from headrace.engine import Engine, EngineSet
from headrace.learner import Learner
from headrace.rollout import UNLIMITED, Chat, EpisodeLimits, Withdrawal
from headrace.rollout.agents import POLICY_ALONE, Agents
from headrace.rollout.environments import Environment
from headrace.rollout.scoring import Scorer, TurnScorer
from headrace.rollout.siblings import OnEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The components that attempt tasks and score the attempts: all that an evaluation needs."""

    engine: Engine
    """Samples tokens; it may stand for several engines."""
    scorer: Scorer
    """Computes the rewards of whole answers."""
    env: Environment
    """The environment in which an episode runs."""
    clock: Clock
    eval_tasks: Sequence[Task]
    """The held-out rows; empty: there is no evaluation."""
    sampling: Sampling
    """The sampling settings of training; the seed is replaced for every turn."""
    max_context: int
    """Number of tokens that prompt and completion may have together."""
    decode: Callable[[Sequence[int]], str]
    """A function that converts the token ids of a completion into the text that is scored."""
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
    """A function that returns the index of the first token of each segment of a turn but the first. Process rewards are
    given to segments; ``None``: they are given to whole turns."""
    episode_retries: int = 0
    """Number of times that an episode whose environment failed is attempted again."""
    work_signs: Callable[[], int] = lambda: 0
    """A function that returns a count which grows while processes work that do not report it in another way; growth
    shows that the run is alive."""
    standstills: Callable[[], Sequence[Standstill]] = tuple
    """A function that returns the processes that make no progress."""

    def num_steps(self) -> int:
        """Return the number of steps of all engines plus the signs of work. The stall watchdog reads it: while it
        grows, the run is alive."""
        return self.work_signs() + sum(engine.stats().steps for engine in (self.engine, *self.agents.engines.values()))


class EpisodeShards(Protocol):
    """Processes that run the episodes of training beside the controller. They give the same episodes as
    :class:`~headrace.rollout.EpisodeRunner` and :class:`~headrace.rollout.siblings.SiblingRunner`."""

    def connect(self, on_parts: Callable[[Sequence[TokenChunk]], None], note: Callable[[str], None]) -> None:
        """Call ``on_parts`` with the tokens of running turns that the ledger is to record, and ``note`` with notes on
        unusual events, from now on."""
        ...

    async def run_episode(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal, begun: Sequence[TokenChunk] = ()
    ) -> EpisodeGraph:
        """Run one episode of ``task``, which continues from the recorded tokens ``begun``, and return it."""
        ...

    async def run_group(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run all ``size`` episodes of the group ``number``. ``on_ended`` is called with those that end together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(Serving):
    """The components of one run, with those for training: fakes, processes of this machine, or processes of a
    cluster."""

    learner: Learner
    """Trains the policy, and publishes its weights."""
    tasks: Sequence[Task]
    """The rows to train on; a row's index is its position."""
    advantages: Callable[[Sequence[ScoredGroup]], Sequence[Credit]]
    """A function that computes the credit of every episode of a batch that counts in a baseline, in order: one
    advantage, or one for each turn."""
    run_dir: Path
    """The run's directory, in which checkpoints are written."""
    columns_shared: bool = False
    """Whether the learner reads files of the run's directory: then it gets references to the tokens of large groups."""
    teachers: Teachers | None = None
    """The teachers that score the tokens of answers while rewards are computed; ``None``: there are none."""
    engine_set: EngineSet | None = None
    """The set of engines behind ``engine``, which may leave and join; ``None``: there is one engine, which stays."""
    shards: EpisodeShards | None = None
    """The processes that run episodes; ``None``: they run in the controller."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What happens to running sequences when new weights are committed."""
