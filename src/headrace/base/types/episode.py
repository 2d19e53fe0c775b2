"""What happened for one attempt at a task."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace.base.types.recorded import Routing
from headrace.base.types.tokens import Tokens, versions_of


class EpisodeKey(NamedTuple):
    """Names one episode of a run for ever: the group and its place in it."""

    group: int
    place: int

    def __str__(self) -> str:
        return f"{self.group}.{self.place}"


class StopReason(enum.StrEnum):
    """Why a sampled turn ended."""

    STOP = "stop"
    """A stop token was sampled, or a stop string was completed."""
    LENGTH = "length"
    """It reached ``max_new_tokens``."""
    ABORTED = "aborted"
    """Its request was withdrawn."""
    DEADLINE = "deadline"
    """Its request's time was up."""
    SPLIT = "split"
    """It did not: the turn was cut here afterwards, and goes on in another."""


class EpisodeStatus(enum.StrEnum):
    """How an episode ended.

    RUNNING ──▶ FINISHED ──▶ SCORED ──▶ MASKED(cause)
       │           │           └──────▶ LEFT_OUT(cause)
       ├───────────┼──────────────────▶ LEFT_OUT(cause)
       └───────────┴──────────────────▶ FAILED(cause)
    """

    RUNNING = "running"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"
    LEFT_OUT = "left_out"
    """Nothing is wrong with it, and it is not trained: it was withdrawn, or a filter left it out of its group."""
    MASKED = "masked"
    """Its reward counts in the baseline of its group; its tokens carry no loss."""

    @property
    def ended(self) -> bool:
        """Whether its tokens and its reward are final."""
        return self is EpisodeStatus.SCORED or self.untrained

    @property
    def untrained(self) -> bool:
        """Whether it has ended and none of its tokens will carry loss, for the reason that its cause gives."""
        return self in (EpisodeStatus.FAILED, EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)


def role_of(agent: str) -> str:
    """Agents of one role are told apart by what follows a slash; policy and baseline are of the role.

    >>> role_of("solver/2"), role_of("proposer")
    ('solver', 'proposer')
    """
    return agent.partition("/")[0]


class Branch(NamedTuple):
    """Which branch a turn belongs to that was resampled from within a turn of its episode."""

    pivot: int
    """Where it leaves the episode: the branches of one pivot are compared with each other."""
    number: int
    """Which of those it is."""
    reward: float | None
    """What the branch earned as a whole; ``None`` where it has no reward, and carries no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Contiguous tokens by one author."""

    author: str
    """``"task"`` for what was given; otherwise the policy, tool or agent that wrote it."""
    tokens: Tokens
    parent: int | None = None
    """Index of the turn it continues; ``None`` for a root."""
    stop_reason: StopReason | None = None
    """Why sampling ended; ``None`` for a turn that was not sampled."""
    context_routing: Routing | None = None
    """The experts of every token it was sampled after, from the root on; ``None`` where nothing was recorded."""
    failed: bool = False
    """Whether it is the answer of a tool, and an error."""
    untrained: str = ""
    """Why its sampled tokens carry no loss; empty where they do."""
    reward: float | None = None
    """What of its episode's reward was earned here; ``None`` where nobody said. What turns do not account for belongs
    to the last one."""
    process: float | None = None
    """The process reward of a segment, beside its episode's reward; ``None`` where there is none."""
    branch: Branch | None = None
    """Of a turn that was resampled; ``None`` for those of the episode itself."""
    teacher: str = ""
    """Which of several teachers says what its tokens are ``taught``; empty where there is but one, or none."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The columns that reward functions logged of it with ``log_extra``: numbers and short texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPart:
    """Tokens of a turn that is being sampled, those that came since its last part or all of them."""

    key: EpisodeKey
    turn: int
    """Which of the sampled turns of its episode, from 0, in the order they were begun."""
    prompt: str
    """A digest of what the turn was sampled after: a turn goes on only after the same."""
    tokens: Tokens
    stop_reason: StopReason | None = None
    """Set on the last one."""
    context_routing: Routing | None = None
    """The experts of every token before the turn, on the first part; ``None`` where nothing was recorded."""
    lost: str = ""
    """Why the parts before this one are void; empty where they are not."""
    request_id: int | None = None
    """What the engine calls the sequence that it is of; ``None`` for one of an earlier life."""


@dataclass(slots=True, kw_only=True)
class EpisodeGraph:
    """The graph of turns of one attempt, and what it earned. Grows while it runs; read-only once it has ended."""

    key: EpisodeKey
    turns: list[Turn] = field(default_factory=list)
    """Every turn, parents before children."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    reward: float | None = None
    """``None`` until scored."""
    cause: str = ""
    """Why it failed, was left out or masked: ``reason`` or ``reason: words``; empty otherwise."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of its reward by name, clamped and not weighted; empty where it has but one."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """What each agent earned, where that is told apart: every one is then credited with its own."""
    ended_s: float | None = field(default=None, compare=False)
    """When it came to its end, on the clock; ``None`` if that was not in this life of the run."""

    @property
    def length(self) -> int:
        """Sampled tokens of the episode itself, those of branches aside."""
        return sum(turn.tokens.num_sampled for turn in self.turns if turn.branch is None)

    @property
    def num_sampled(self) -> int:
        """Tokens that a policy sampled, over all turns."""
        return sum(turn.tokens.num_sampled for turn in self.turns)

    @property
    def shares(self) -> dict[str, float]:
        """What agents earned, those aside that answered and whose answers carry no loss."""
        answers = [turn for turn in self.turns if turn.stop_reason is not None]
        idle = {turn.author for turn in answers} - {turn.author for turn in answers if not turn.untrained}
        return {agent: reward for agent, reward in self.agent_rewards.items() if agent not in idle}

    def leaves(self) -> list[int]:
        """Indices of the turns that no other turn continues."""
        parents = {turn.parent for turn in self.turns}
        return [index for index in range(len(self.turns)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Indices of the turns from the root to ``leaf``."""
        indices: list[int] = []
        at: int | None = leaf
        while at is not None:
            indices.append(at)
            at = self.turns[at].parent
        return indices[::-1]

    def path_tokens(self, path: Sequence[int]) -> Tokens:
        """The tokens of the turns of ``path``, one after the other. What the last sampled turn recorded of its context
        stands in for what the turns before it did not: given tokens, and the last token of a turn, whose experts are
        known only once another turn continues it."""
        tokens = Tokens.concat([self.turns[index].tokens for index in path])
        before = 0
        context: Routing | None = None
        for index in path:
            turn = self.turns[index]
            if turn.context_routing is not None and len(turn.context_routing) == before:
                context = turn.context_routing
            before += len(turn.tokens)
        if context is None:
            return tokens
        routing = context if tokens.routing is None else context + tokens.routing[len(context) :]
        missing = len(tokens) - len(routing)
        if missing:
            _, num_layers, top_k = routing.experts_RLK.shape
            routing += Routing.unknown(
                missing, num_layers=num_layers, top_k=top_k, dtype=routing.experts_RLK.dtype
            )  # fmt: skip
        return replace(tokens, routing=routing)

    def versions(self) -> tuple[int, int] | None:
        """The oldest and newest version that sampled a token of it; ``None`` if nothing was sampled."""
        return versions_of([turn.tokens for turn in self.turns])
