"""What is kept of simulated groups, and how they are written out where real code looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.flow import TakenBatch
from headrace.flow.filters import REDUNDANT
from headrace.wings.plan.engine import SimulatedAnswer, SimulatedEngine
from headrace.wings.plan.learner import SimulatedWork

FAILED = "env_error"
"""Why an episode has no reward."""


@dataclass(slots=True, eq=False, kw_only=True)
class Episodic(SimulatedAnswer):
    """One attempt at a task, of which one answer after the other is sampled."""

    group: SimulatedGroup
    place: int
    """In its group, from 0."""
    turns: int
    """Answers that are still to come, this one included."""
    home: SimulatedEngine | None = None
    """Where its last turn was sampled, or is."""
    home_version: int = 0
    """The weights under which its context was computed there."""
    cut: bool = False
    """Whether an answer reached the limit."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    reward: float | None = None
    """``None`` until it is scored, and where it failed."""

    @property
    def sampled(self) -> float:
        """Tokens that were sampled of it and written down."""
        return sum(self.versions.values())


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedGroup:
    """Attempts at one task."""

    number: int
    chance: float
    """Of each to solve it."""
    episodes: list[Episodic] = field(default_factory=list)
    num_finished: int = 0
    num_ended: int = 0
    home: SimulatedEngine | None = None
    """Where its prompt was read last."""
    home_version: int = 0
    ends_s: list[float] = field(default_factory=list)
    trained: dict[int, float] = field(default_factory=dict)
    """Tokens that are to be trained, by version."""
    tokens: float = 0.0
    """Of the trained episodes, prompts included."""
    squares: float = 0.0
    """The squares of their lengths, added up."""

    def add(self, episode: Episodic) -> None:
        """It is to be trained."""
        for version, tokens in episode.versions.items():
            self.trained[version] = self.trained.get(version, 0.0) + tokens
        self.tokens += episode.context
        self.squares += episode.context**2


@dataclass(slots=True, kw_only=True)
class SimulatedBatch(SimulatedWork):
    """What one step trains."""

    taken: TakenBatch
    groups: list[SimulatedGroup]


class SimulatedRecorder:
    """Writes groups out as a real run keeps them, with two tokens for all of an answer: of its oldest and of its newest
    version. Where a filter asks for lengths there are as many as were sampled."""

    def __init__(self, *, whole: bool) -> None:
        """``whole``: as many tokens as were sampled."""
        self._whole = whole
        self._known: dict[tuple[int, int, int], Tokens] = {}

    def group(self, group: SimulatedGroup) -> ScoredGroup:
        """One of which every episode is trained: a single one stands for all."""
        tokens = self._tokens(min(group.trained), max(group.trained), 2)
        written = EpisodeGraph(key=EpisodeKey(group.number, 0), status=EpisodeStatus.SCORED, reward=0.0)
        written.turns.append(Turn(author="policy", tokens=tokens))
        return ScoredGroup(number=group.number, episodes=(written,))

    def episode(self, episode: Episodic) -> EpisodeGraph:
        """One as it ended."""
        causes = {EpisodeStatus.FAILED: FAILED, EpisodeStatus.LEFT_OUT: REDUNDANT}
        written = EpisodeGraph(
            key=EpisodeKey(episode.group.number, episode.place),
            status=episode.status,
            reward=episode.reward,
            cause=causes.get(episode.status, ""),
        )
        if episode.versions:
            count = max(2, round(episode.sampled)) if self._whole else 2
            tokens = self._tokens(min(episode.versions), max(episode.versions), count)
            reason = StopReason.LENGTH if episode.cut else StopReason.STOP
            written.turns.append(Turn(author="policy", tokens=tokens, stop_reason=reason))
        return written

    def _tokens(self, oldest: int, newest: int, count: int) -> Tokens:
        key = (oldest, newest, count)
        if key not in self._known:
            versions_T = np.full(count, oldest, np.int32)
            versions_T[-1] = newest
            zeros_T = np.zeros(count, np.int32)
            self._known[key] = Tokens(ids_T=zeros_T, logprobs_T=zeros_T.astype(np.float32), versions_T=versions_T)
        return self._known[key]
