"""The groups and episodes of a simulated run, and their conversion into the types of a real run, which filters and the
flow read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.flow import GroupBatch
from headrace.flow.filters import REDUNDANT
from headrace.wings.plan.engine import SimulatedAnswer, SimulatedEngine
from headrace.wings.plan.learner import SimulatedWork

FAILED = "env_error"
"""Cause of an episode that ended without a reward."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedEpisode(SimulatedAnswer):
    """One attempt at a task, whose answers (turns) are sampled one after another on simulated engines."""

    group: SimulatedGroup
    """The group that the episode belongs to."""
    index: int
    """Index of the episode in its group."""
    turns: int
    """Number of answers that are not finished, the current answer included."""
    cache_engine: SimulatedEngine | None = None
    """Engine whose cache contains the episode's context: it samples the current turn or has sampled the last turn;
    ``None`` if there is no such engine."""
    cache_version: int = 0
    """Version of the weights under which that engine computed the cached context."""
    truncated: bool = False
    """Whether an answer reached the length limit."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    """The state of the episode: running, finished, scored, failed or left out."""
    reward: float | None = None
    """Reward; ``None`` until the episode is scored, and if it failed."""

    @property
    def sampled(self) -> float:
        """Return the number of tokens sampled for the episode so far. The tokens of a running answer are added when the
        answer leaves the engine's batch."""
        return sum(self.versions.values())


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedGroup:
    """A group of attempts at one task, which are trained together, with the totals over these attempts."""

    number: int
    """Number of the group in the flow."""
    chance: float
    """Probability with which each attempt solves the task."""
    episodes: list[SimulatedEpisode] = field(default_factory=list)
    """The attempts; emptied once the group is trained."""
    num_finished: int = 0
    """Number of episodes whose last answer is sampled."""
    num_ended: int = 0
    """Number of episodes that are scored, failed or left out."""
    cache_engine: SimulatedEngine | None = None
    """Engine that has prefilled the group's prompt last; ``None`` if none has."""
    cache_version: int = 0
    """Version of the weights under which that engine computed the cached prompt."""
    ends_s: list[float] = field(default_factory=list)
    """Times at which episodes of the group finished, in seconds of the run."""
    trained: dict[int, float] = field(default_factory=dict)
    """Number of tokens to be trained, by the version that sampled them."""
    tokens: float = 0.0
    """Number of tokens of the trained episodes, prompts included."""
    squares: float = 0.0
    """Sum of the squared lengths of the trained episodes."""

    def add(self, episode: SimulatedEpisode) -> None:
        """Add the tokens of ``episode``, which will be trained, to the totals of the group."""
        for version, tokens in episode.versions.items():
            self.trained[version] = self.trained.get(version, 0.0) + tokens
        self.tokens += episode.context
        self.squares += episode.context**2


@dataclass(slots=True, kw_only=True)
class SimulatedBatch(SimulatedWork):
    """The simulated batch of one training step, with its groups."""

    flow_batch: GroupBatch
    """The batch as the flow returned it."""
    groups: list[SimulatedGroup]
    """The simulated groups of the batch."""


class SimulatedRecorder:
    """A converter of simulated groups and episodes into the types of a real run, which the flow and its filters read. A
    converted answer has two tokens, with the oldest and the newest version of the simulated answer; if a filter reads
    lengths, it has as many tokens as were sampled."""

    def __init__(self, *, full_length: bool) -> None:
        """Create a converter. ``full_length``: converted answers have as many tokens as were sampled, instead of
        two."""
        self._full_length = full_length
        self._cache: dict[tuple[int, int, int], Tokens] = {}
        """Converted tokens by oldest version, newest version and number, since few combinations occur."""

    def group(self, group: SimulatedGroup) -> ScoredGroup:
        """Return the converted group for a ``group`` of which every episode is trained. A single episode, with the
        oldest and the newest version of the group, represents all episodes."""
        tokens = self._tokens(min(group.trained), max(group.trained), 2)
        record = EpisodeGraph(key=EpisodeKey(group.number, 0), status=EpisodeStatus.SCORED, reward=0.0)
        record.turns.append(Turn(author="policy", tokens=tokens))
        return ScoredGroup(number=group.number, episodes=(record,))

    def episode(self, episode: SimulatedEpisode) -> EpisodeGraph:
        """Return the converted episode for an ``episode`` that has ended, with its status, reward and cause."""
        causes = {EpisodeStatus.FAILED: FAILED, EpisodeStatus.LEFT_OUT: REDUNDANT}
        record = EpisodeGraph(
            key=EpisodeKey(episode.group.number, episode.index),
            status=episode.status,
            reward=episode.reward,
            cause=causes.get(episode.status, ""),
        )
        if episode.versions:
            count = max(2, round(episode.sampled)) if self._full_length else 2
            tokens = self._tokens(min(episode.versions), max(episode.versions), count)
            reason = StopReason.LENGTH if episode.truncated else StopReason.STOP
            record.turns.append(Turn(author="policy", tokens=tokens, stop_reason=reason))
        return record

    def _tokens(self, oldest: int, newest: int, count: int) -> Tokens:
        """Return ``count`` tokens with ids of 0. The last token has the version ``newest``, all other tokens
        ``oldest``, since the flow reads only the oldest and the newest version."""
        key = (oldest, newest, count)
        if key not in self._cache:
            versions_T = np.full(count, oldest, np.int32)
            versions_T[-1] = newest
            zeros_T = np.zeros(count, np.int32)
            self._cache[key] = Tokens(ids_T=zeros_T, logprobs_T=zeros_T.astype(np.float32), versions_T=versions_T)
        return self._cache[key]
