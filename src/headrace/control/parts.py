"""The components that a controller uses: engine, learner, environment, scorers and tasks, each behind its contract.
They may be fakes, local processes or processes of a cluster."""

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
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.base.types.weights import Interrupt
from headrace.control.board import Standstill
from headrace.control.teaching import Teachers
from headrace.engine import Engine, EngineSet
from headrace.learner import Learner
from headrace.rollout import UNLIMITED, Chat, EpisodeLimits, EpisodeRunner, Withdrawal
from headrace.rollout.agents import POLICY_ALONE, Agents
from headrace.rollout.environments import Environment
from headrace.rollout.scoring import Scorer, TurnScorer
from headrace.rollout.siblings import OnEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The components that run episodes and score them, which an evaluation needs."""

    engine: Engine
    """The engine that samples tokens; it may be a router in front of several engines."""
    scorer: Scorer
    """The scorer of whole answers, which computes their rewards."""
    env: Environment
    """The environment in which an episode runs."""
    clock: Clock
    eval_tasks: Sequence[Task]
    """The held-out rows; empty: there is no evaluation."""
    sampling: Sampling
    """The sampling settings of training; the seed is replaced for every turn."""
    max_context: int
    """Maximum number of tokens of prompt and completion together."""
    decode: Callable[[Sequence[int]], str]
    """A function that converts the token ids of a completion into the text that is scored."""
    agents: Agents = POLICY_ALONE
    """The agents that write turns, by name. Agents with fixed weights have their own engines."""
    chat: Chat | None = None
    """The chat format, which renders and parses the model's messages; ``None``: the environment uses token ids."""
    limits: EpisodeLimits = UNLIMITED
    """The limits of one episode, in turns, tokens and tool calls."""
    episode_timeout_s: float | None = None
    """Seconds that an attempt may take; ``None``: no limit."""
    turn_scorer: TurnScorer | None = None
    """The scorer of turns, which scores them while their episode is running; ``None``: turns are not scored."""
    segments: Callable[[Tokens], Sequence[int]] | None = None
    """A function that cuts a turn into segments, each of which gets a process reward: it returns the index of the first
    token of each segment except the first one. ``None``: whole turns get process rewards."""
    episode_retries: int = 0
    """Maximum number of times that an episode is repeated after its environment failed."""
    work_signs: Callable[[], int] = lambda: 0
    """A function that returns a count which increases while processes work that report no other progress."""
    standstills: Callable[[], Sequence[Standstill]] = tuple
    """A function that returns the processes that make no progress."""

    def num_steps(self) -> int:
        """Return the number of steps of all engines plus the count of ``work_signs``. The stall watchdog treats an
        increase as progress of the run."""
        return self.work_signs() + sum(engine.stats().steps for engine in (self.engine, *self.agents.engines.values()))

    def decode_answer(self, ids_T: IntColumn) -> str:
        """Return the text of the sampled tokens ``ids_T``, without the stop token, as reward functions score it."""
        ids = ids_T.tolist()
        return self.decode(ids[:-1] if ids and ids[-1] in self.sampling.stop_ids else ids)

    def make_runner(self, run_seed: int, on_tokens: Callable[[int], None]) -> EpisodeRunner:
        """Return a runner of episodes of these components. Their random numbers follow from ``run_seed``, and
        ``on_tokens`` is called with the number of tokens each time that some arrive."""
        return EpisodeRunner(
            engine=self.engine,
            env=self.env,
            sampling=self.sampling,
            run_seed=run_seed,
            on_tokens=on_tokens,
            agents=self.agents,
            chat=self.chat,
            limits=self.limits,
            timeout_s=self.episode_timeout_s,
            retries=self.episode_retries,
        )


class EpisodeShards(Protocol):
    """The contract of rollout shards: processes that run the episodes of training outside the controller. They return
    the same episodes as :class:`~headrace.rollout.EpisodeRunner` and
    :class:`~headrace.rollout.siblings.SiblingRunner`."""

    def connect(self, on_parts: Callable[[Sequence[TokenChunk]], None], note: Callable[[str], None]) -> None:
        """Set the callbacks: ``on_parts`` is called with tokens of running turns that the ledger must record, and
        ``note`` with the text of each unusual event."""

    async def run_episode(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal, partial_turns: Sequence[TokenChunk] = ()
    ) -> EpisodeGraph:
        """Run one episode of ``task``, which continues from the recorded tokens ``partial_turns``, and return it."""

    async def run_group(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run all ``size`` episodes of the group ``number``. ``on_ended`` is called with the episodes that end
        together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(Serving):
    """The components of a training run."""

    learner: Learner
    """The learner, which trains the policy and publishes its weights."""
    tasks: Sequence[Task]
    """The rows to train on; a row's index is its position."""
    advantages: Callable[[Sequence[ScoredGroup]], Sequence[Credit]]
    """A function that receives the groups of a batch and returns the credit of every episode that counts in a baseline,
    in order: one advantage, or one for each turn."""
    run_dir: Path
    """The run's directory, in which checkpoints are written."""
    columns_shared: bool = False
    """Whether the learner reads files of the run's directory: then it gets references to the tokens of large groups."""
    teachers: Teachers | None = None
    """The teachers that score the tokens of answers while rewards are computed; ``None``: there are none."""
    engine_set: EngineSet | None = None
    """The set of engines behind ``engine``, which may join and leave during the run; ``None``: there is one permanent
    engine."""
    shards: EpisodeShards | None = None
    """The rollout shards, which run the episodes; ``None``: episodes run in the controller's process."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What happens to running sequences when new weights are committed."""
