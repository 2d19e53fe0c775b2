"""The data of an episode, one attempt at a task: its turns, their sampled tokens, and its status.

A *turn* is a run of contiguous tokens by one author. Turns form a tree, since a turn can have several continuations. A
*version* is the integer that names one set of weights.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from headrace.base.errors import EngineFull, RequestError, SequenceFailed
from headrace.base.types.recorded import Routing
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens, find_version_range


class EpisodeKey(NamedTuple):
    """The permanent identifier of an episode in a run: the number of its group and its index within the group."""

    group: int
    """The number of the group in the run."""
    place: int
    """The index of the episode in its group, from 0."""

    def __str__(self) -> str:
        """Return the key as ``group.place``, for example ``12.3``."""
        return f"{self.group}.{self.place}"


NO_EPISODE = EpisodeKey(-1, -1)
"""The key of an unknown episode."""
_KINDS = {kind.__name__: kind for kind in (RequestError, EngineFull, SequenceFailed)}
"""The error classes that a chunk can contain, by name."""
RESTARTED = "restarted"
"""The value of ``TokenChunk.lost`` for a sequence that the engine has restarted from its prompt."""


class StopReason(enum.StrEnum):
    """The reason why a sampled turn ended."""

    STOP = "stop"
    """A stop token was sampled, or a stop string was completed."""
    LENGTH = "length"
    """The turn reached ``max_new_tokens``."""
    ABORTED = "aborted"
    """The sender of the request has withdrawn it."""
    DEADLINE = "deadline"
    """The deadline of the request passed."""
    SPLIT = "split"
    """Sampling did not end here: the turn was divided at this token afterwards, and continues in another turn."""


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
    """The episode is valid but not trained: it was withdrawn, or a filter left it out of its group."""
    MASKED = "masked"
    """The reward of the episode counts in the baseline of the group; its tokens carry no loss."""

    @property
    def ended(self) -> bool:
        """Return whether the tokens and the reward of the episode are final: it is scored, failed, left out or
        masked."""
        return self is EpisodeStatus.SCORED or self.untrained

    @property
    def untrained(self) -> bool:
        """Return whether the episode has ended and none of its tokens will carry loss. Its field ``cause`` contains the
        reason."""
        return self in (EpisodeStatus.FAILED, EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)


class AttemptKind(enum.StrEnum):
    """Whether an episode shares its beginning with other attempts at the same task."""

    ALONE = "alone"
    """No other attempt shares the beginning of this attempt."""
    ORIGIN = "origin"
    """Branches may be created from this attempt after it has ended. A branch is an attempt with the same task and seed
    that repeats the model's answers up to some token. An environment that can resume its world stores the necessary
    snapshots."""
    BRANCH = "branch"
    """The attempt repeats an ``ORIGIN`` of the same task and seed up to some token, and then continues on its own. An
    environment may resume its world from a snapshot instead of creating it again."""


def get_role(agent: str) -> str:
    """Return the role of an agent: its name up to the first slash. Agents of one role share policy and baseline.

    >>> get_role("solver/2"), get_role("proposer")
    ('solver', 'proposer')
    """
    return agent.partition("/")[0]


class Branch(NamedTuple):
    """The branch that a turn belongs to. A branch is a continuation that was sampled again from a *pivot*, an earlier
    token of the same episode."""

    pivot: int
    """The number of the pivot from which the branch continues. Branches of one pivot are compared with each other."""
    number: int
    """The number of the branch among the branches of its pivot."""
    reward: float | None
    """The reward of the whole branch; ``None`` if it has no reward and therefore carries no loss."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an episode: contiguous tokens by one author. It is a node of the episode's tree; its parent is the
    turn that it continues."""

    author: str
    """The author: ``"task"`` for a given prompt; otherwise the policy, tool or agent that wrote the turn."""
    tokens: Tokens
    parent: int | None = None
    """The index of the turn that this turn continues; ``None`` for a root."""
    stop_reason: StopReason | None = None
    """Why sampling ended; ``None`` for a turn that was not sampled."""
    context_routing: Routing | None = None
    """The experts of every token before the turn, from the root on; ``None`` if they were not recorded."""
    failed: bool = False
    """Whether the turn is the answer of a tool that reports an error."""
    untrained: str = ""
    """The reason why the turn's sampled tokens carry no loss; empty if they carry loss."""
    reward: float | None = None
    """The part of the episode's reward that was earned in this turn; ``None`` if it is unknown. The last turn receives
    the part of the reward that no turn accounts for."""
    process: float | None = None
    """The process reward of a segment, in addition to the episode's reward; ``None`` if there is none."""
    branch: Branch | None = None
    """The branch of a resampled turn; ``None`` for a turn of the episode itself."""
    teacher: str = ""
    """The name of the teacher that scored the turn's tokens, if there are several teachers; empty otherwise."""
    extra: dict[str, Any] = {}
    """The columns that reward functions logged about the turn with ``log_extra``: numbers and short texts."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of one sampled sequence: the tokens since the sequence's previous chunk, or all tokens after
    :meth:`concat`.

    The engine creates the chunk, and the controller receives it unchanged. The rollout then sets ``key``, ``turn`` and
    ``prompt``, which identify the turn of the episode, and the ledger stores the chunk.

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
    if no engine has sampled the sequence since the run was last started."""
    top: TopScores | None = None
    """The model's likeliest entries at each token of the chunk, if the request records them (``Sampling.record_top``);
    else ``None``."""
    prompt_routing: Routing | None = None
    """The experts of every token before the sequence, on its first chunk; ``None`` if they were not recorded."""
    lost: str = ""
    """Why earlier chunks of this sequence are void: ``RESTARTED``, or another reason under which the ledger counts
    their tokens; empty if they are valid."""
    error: str = ""
    """Why the request was refused or failed, as ``problem; remedy``; set on the last chunk only, otherwise empty."""
    error_kind: str = ""
    """The name of the error's class in :mod:`headrace.base.errors`; empty without an error."""
    key: EpisodeKey = NO_EPISODE
    """The episode that the sequence belongs to; ``NO_EPISODE`` in an engine, which has no information about
    episodes."""
    turn: int = 0
    """The index of the turn among the sampled turns of its episode, from 0, in the order in which they were started."""
    prompt: str = ""
    """A digest of the tokens before the turn. A stored turn is reused only if the tokens before it are the same."""

    @property
    def ended(self) -> bool:
        """Return whether this is the last chunk of its sequence."""
        return self.stop_reason is not None or bool(self.error)

    def with_error(self, error: RequestError) -> TokenChunk:
        """Return this chunk as the last chunk of its sequence, which ended with ``error``."""
        return msgspec.structs.replace(self, error=f"{error.problem}; {error.remedy}", error_kind=type(error).__name__)

    def raise_error(self) -> None:
        """Raise the :class:`~headrace.base.errors.RequestError` with which the sequence ended; do nothing if there was
        no error."""
        if self.error:
            problem, _, remedy = self.error.partition("; ")
            kind = _KINDS.get(self.error_kind, SequenceFailed)
            raise kind(problem, remedy=remedy or "look at the request and at the weights")

    @classmethod
    def concat(cls, chunks: Sequence[TokenChunk]) -> TokenChunk:
        """Return consecutive chunks of one sequence as one chunk with all their tokens. ``chunks`` must not be
        empty."""
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
    """The tree of turns of one attempt at a task, and its rewards. It grows while the episode runs, and does not change
    afterwards."""

    key: EpisodeKey
    turns: list[Turn] = field(default_factory=list)
    """All turns, parents before children. A turn refers to its parent by the index in this list."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    reward: float | None = None
    """The reward of the episode; ``None`` until it is scored."""
    cause: str = ""
    """Why the episode failed, was left out or was masked: ``reason`` or ``reason: words``; empty otherwise."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of the reward by name, clamped and not weighted; empty if the reward has one component."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """The reward of each agent; empty if all agents share the episode's reward."""
    ended_s: float | None = field(default=None, compare=False)
    """The time when the episode ended, on the clock; ``None`` if it ended before the run was last started."""

    @property
    def length(self) -> int:
        """Return the number of tokens that the policy or another agent sampled in the episode, without the tokens of
        branches."""
        return sum(turn.tokens.num_sampled for turn in self.turns if turn.branch is None)

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that a policy or another agent sampled, over all turns, branches included."""
        return sum(turn.tokens.num_sampled for turn in self.turns)

    @property
    def shares(self) -> dict[str, float]:
        """Return the reward of each agent by its name. Agents are left out if they answered but none of their answers
        carries loss. The result is empty if all agents share the episode's reward."""
        answers = [turn for turn in self.turns if turn.stop_reason is not None]
        idle = {turn.author for turn in answers} - {turn.author for turn in answers if not turn.untrained}
        return {agent: reward for agent, reward in self.agent_rewards.items() if agent not in idle}

    @property
    def is_chain(self) -> bool:
        """Return whether each turn continues the previous turn, so that one path contains all turns."""
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

    def path_spans(self, path: Sequence[int]) -> list[Tokens]:
        """Return the tokens of each of the turns with the indices ``path``, which begins at the root. No column is
        copied.

        The routing (the experts of a mixture-of-experts model) is completed from the record of the last sampled turn,
        which also contains the experts of its context. Without it, the experts are missing for given tokens, and for
        the last token of each turn, which becomes known only after another turn continues it.
        """
        spans = [self.turns[index].tokens for index in path]
        ends = list(accumulate(map(len, spans), initial=0))
        for place in reversed(range(len(path))):
            context = self.turns[path[place]].context_routing
            if context is not None and len(context) == ends[place]:
                return [
                    *(msgspec.structs.replace(spans[i], routing=context[ends[i] : ends[i + 1]]) for i in range(place)),
                    *spans[place:],
                ]
        return spans

    def path_tokens(self, path: Sequence[int]) -> Tokens:
        """Return the tokens of :meth:`path_spans` as one span."""
        return Tokens.concat(self.path_spans(path))

    def versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version that sampled a token of the episode; ``None`` if nothing was sampled."""
        return find_version_range([turn.tokens for turn in self.turns])
