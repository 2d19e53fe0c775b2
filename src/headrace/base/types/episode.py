"""The episode: the graph of turns of one attempt at a task, and its lifecycle.

A *turn* is a run of contiguous tokens by one author. Turns form a tree: a turn can have several continuations. A
*version* is the integer that names one set of weights.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from headrace.base.errors import EngineFull, RequestError, SequenceFailed
from headrace.base.types.recorded import Routing
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens, versions_of


class EpisodeKey(NamedTuple):
    """The permanent identifier of an episode in a run: the number of its group and its index in the group."""

    group: int
    """The number of the group in the run."""
    place: int
    """The index of the episode in its group, from 0."""

    def __str__(self) -> str:
        """Return the key as ``group.place``, for example ``12.3``."""
        return f"{self.group}.{self.place}"


NO_EPISODE = EpisodeKey(-1, -1)
"""The key that stands for an unknown episode."""
_KINDS = {kind.__name__: kind for kind in (RequestError, EngineFull, SequenceFailed)}
"""The classes of error that a chunk can carry, by name."""
RESTARTED = "restarted"
"""The value of ``TokenChunk.lost`` for a sequence that the engine has begun again from its prompt."""


class StopReason(enum.StrEnum):
    """The reason why a sampled turn ended."""

    STOP = "stop"
    """A stop token was sampled, or a stop string was completed."""
    LENGTH = "length"
    """The turn reached ``max_new_tokens``."""
    ABORTED = "aborted"
    """The request was withdrawn by its sender."""
    DEADLINE = "deadline"
    """The deadline of the request passed."""
    SPLIT = "split"
    """Sampling did not end here: the turn was cut at this place afterwards, and continues in another turn."""


class EpisodeStatus(enum.StrEnum):
    """The state of an episode.

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
    """The episode is valid and is not trained: it was withdrawn, or a filter left it out of its group."""
    MASKED = "masked"
    """The reward counts in the baseline of the group; the tokens carry no loss."""

    @property
    def ended(self) -> bool:
        """Return whether the tokens and the reward of the episode are final: it is scored, failed, left out or
        masked."""
        return self is EpisodeStatus.SCORED or self.untrained

    @property
    def untrained(self) -> bool:
        """Return whether the episode has ended and none of its tokens will carry loss. The field ``cause`` of the
        episode says why."""
        return self in (EpisodeStatus.FAILED, EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)


class AttemptKind(enum.StrEnum):
    """The part that an attempt has among the attempts at one episode."""

    ALONE = "alone"
    """No attempt will begin as this one did."""
    ORIGIN = "origin"
    """Branches may leave it when it has ended: attempts with the same task and seed, in which the model gives the same
    answers up to some token. An environment that can resume its world keeps what that takes."""
    BRANCH = "branch"
    """It repeats an ``ORIGIN`` of the same task and seed up to some token, and continues otherwise. An environment may
    resume the world of that moment, in place of making it again."""


def role_of(agent: str) -> str:
    """Return the role of an agent: its name up to a slash. Agents of one role share policy and baseline.

    >>> role_of("solver/2"), role_of("proposer")
    ('solver', 'proposer')
    """
    return agent.partition("/")[0]


class Branch(NamedTuple):
    """The branch that a turn belongs to. A branch is a continuation that was sampled again from a *pivot*, an earlier
    place of the same episode."""

    pivot: int
    """The number of the pivot where the branch leaves the episode. Branches of one pivot are compared with each
    other."""
    number: int
    """The number of the branch among those of its pivot."""
    reward: float | None
    """The reward of the whole branch; ``None`` if it has none and carries no loss."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an episode: contiguous tokens by one author. It is a node of the episode's graph, below the turn that
    it continues."""

    author: str
    """The author: ``"task"`` for a given prompt; otherwise the policy, tool or agent that wrote the turn."""
    tokens: Tokens
    parent: int | None = None
    """The index of the turn that this one continues; ``None`` for a root."""
    stop_reason: StopReason | None = None
    """Why sampling ended; ``None`` for a turn that was not sampled."""
    context_routing: Routing | None = None
    """The experts of every token before the turn, from the root on; ``None`` if they were not recorded."""
    failed: bool = False
    """Whether the turn is the answer of a tool that reports an error."""
    untrained: str = ""
    """The reason why its sampled tokens carry no loss; empty if they carry loss."""
    reward: float | None = None
    """The part of the episode's reward that was earned in this turn; ``None`` if it is unknown. The last turn earns
    what the turns do not account for."""
    process: float | None = None
    """The process reward of a segment, in addition to the episode's reward; ``None`` if there is none."""
    branch: Branch | None = None
    """The branch of a resampled turn; ``None`` for a turn of the episode itself."""
    teacher: str = ""
    """The name of the teacher that scored its tokens, if there are several; empty otherwise."""
    extra: dict[str, Any] = {}
    """The columns that reward functions logged about the turn with ``log_extra``: numbers and short texts."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of one sampled sequence: the tokens since its last chunk, or all of them after chunks were joined.

    The engine makes it, the controller receives it unchanged, the rollout sets ``key``, ``turn`` and ``prompt`` to say
    which turn of which episode it belongs to, and the ledger stores it.

    >>> span = Tokens(ids_T=[7, 8], logprobs_T=[-0.5, -0.1], versions_T=[3, 3])
    >>> chunk = TokenChunk(tokens=span, stop_reason=StopReason.LENGTH)
    >>> chunk.ended, chunk.lost, len(chunk.tokens)
    (True, '', 2)
    """

    tokens: Tokens
    """The sampled tokens of this chunk."""
    stop_reason: StopReason | None = None
    """Why sampling ended; set on the last chunk only, and not if the sequence ended with an ``error``."""
    request_id: int = -1
    """The engine's number of the sequence, for a later :class:`~headrace.base.types.messages.engine.ForkRequest`; −1
    if no engine has sampled it since the run was last started."""
    top: TopScores | None = None
    """The model's likeliest entries at each token of the chunk, if the request records them (``Sampling.record_top``);
    else ``None``."""
    prompt_routing: Routing | None = None
    """The experts of every token before the sequence, on its first chunk; ``None`` if they were not recorded."""
    lost: str = ""
    """Why the chunks of this sequence before this one are void: ``RESTARTED``, or another reason under which the ledger
    counts their tokens; empty if they are valid."""
    error: str = ""
    """Why the request was refused or failed, as ``problem; remedy``; set on the last chunk only."""
    error_kind: str = ""
    """The name of the error's class in :mod:`headrace.base.errors`; empty without an error."""
    key: EpisodeKey = NO_EPISODE
    """The episode that the sequence is a turn of; ``NO_EPISODE`` in an engine, which does not know it."""
    turn: int = 0
    """The index of the turn among the sampled turns of its episode, from 0, in the order they were begun."""
    prompt: str = ""
    """A digest of the tokens before the turn. A stored turn is continued only after the same tokens."""

    @property
    def ended(self) -> bool:
        """Return whether this is the last chunk of its sequence."""
        return self.stop_reason is not None or bool(self.error)

    def failed(self, error: RequestError) -> TokenChunk:
        """Return this chunk as the last one of its sequence, which ended with ``error``."""
        return msgspec.structs.replace(self, error=f"{error.problem}; {error.remedy}", error_kind=type(error).__name__)

    def raise_error(self) -> None:
        """Raise the :class:`~headrace.base.errors.RequestError` that the sequence ended with; do nothing if there was
        none."""
        if self.error:
            problem, _, remedy = self.error.partition("; ")
            kind = _KINDS.get(self.error_kind, SequenceFailed)
            raise kind(problem, remedy=remedy or "look at the request and at the weights")

    @classmethod
    def joined(cls, chunks: Sequence[TokenChunk]) -> TokenChunk:
        """Return consecutive chunks of one sequence, of which there is at least one, as one chunk with all their
        tokens."""
        first, last = chunks[0], chunks[-1]
        if first is last:
            return first
        return msgspec.structs.replace(
            first,
            tokens=Tokens.concat([chunk.tokens for chunk in chunks]),
            top=None if first.top is None else TopScores.concat([chunk.top for chunk in chunks if chunk.top]),
            stop_reason=last.stop_reason,
            request_id=last.request_id,
        )


@dataclass(slots=True, kw_only=True)
class EpisodeGraph:
    """The graph of turns of one attempt at a task, and its rewards. It grows while the episode runs, and is read-only
    afterwards."""

    key: EpisodeKey
    turns: list[Turn] = field(default_factory=list)
    """Every turn, parents before children. A turn names its parent by its index in this list."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    reward: float | None = None
    """The reward of the episode; ``None`` until it is scored."""
    cause: str = ""
    """Why it failed, was left out or was masked: ``reason`` or ``reason: words``; empty otherwise."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of its reward by name, clamped and not weighted; empty if the reward has one component."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """The reward of each agent; empty if all agents share the episode's reward."""
    ended_s: float | None = field(default=None, compare=False)
    """When the episode ended, on the clock; ``None`` if that was before the run was last started."""

    @property
    def length(self) -> int:
        """Return the number of tokens that the policy or another agent sampled in the episode itself, without those of
        branches."""
        return sum(turn.tokens.num_sampled for turn in self.turns if turn.branch is None)

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that a policy or another agent sampled, over all turns, branches included."""
        return sum(turn.tokens.num_sampled for turn in self.turns)

    @property
    def shares(self) -> dict[str, float]:
        """Return the reward of each agent by its name, without the agents that answered but none of whose answers
        carries loss. Empty if all agents share the episode's reward."""
        answers = [turn for turn in self.turns if turn.stop_reason is not None]
        idle = {turn.author for turn in answers} - {turn.author for turn in answers if not turn.untrained}
        return {agent: reward for agent, reward in self.agent_rewards.items() if agent not in idle}

    @property
    def is_chain(self) -> bool:
        """Return whether each turn continues the one before it, so that there is one path through all of them."""
        return [turn.parent for turn in self.turns[:1]] == [None] and all(
            turn.parent == index for index, turn in enumerate(self.turns[1:])
        )

    def leaves(self) -> list[int]:
        """Return the indices in ``turns`` of the turns that no other turn continues."""
        parents = {turn.parent for turn in self.turns}
        return [index for index in range(len(self.turns)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Return the indices in ``turns`` of the turns from the root to the turn ``leaf``, both included."""
        indices: list[int] = []
        at: int | None = leaf
        while at is not None:
            indices.append(at)
            at = self.turns[at].parent
        return indices[::-1]

    def path_tokens(self, path: Sequence[int]) -> Tokens:
        """Return the concatenated tokens of the turns with the indices ``path``, from the root on.

        The routing (the experts of a mixture-of-experts model) that the last sampled turn recorded of its context fills
        in what the turns before it lack: the experts of given tokens, and of the last token of a turn, which are known
        only after another turn continues it.
        """
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
        return msgspec.structs.replace(tokens, routing=routing)

    def versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version that sampled a token of the episode; ``None`` if nothing was sampled."""
        return versions_of([turn.tokens for turn in self.turns])
