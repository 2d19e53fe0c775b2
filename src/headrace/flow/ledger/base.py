"""What a ledger records, and what it can prove.

Everything is an operation: after a crash it is there whole or not at all, and none before it is missing.

A token counts as submitted from the moment it is recorded: with its episode when that ends, or before, in a part of a
running turn. A token that nobody has recorded when everything dies was never submitted; how many that can be for each
running sequence is what ``flow.record_tokens`` bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, TurnPart
from headrace.base.types.group import GroupState
from headrace.base.types.scored import Learned
from headrace.base.types.tokens import versions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Groups come into being."""

    numbers: tuple[int, ...]
    rows: tuple[int, ...]
    """The dataset row of each."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Groups move to another state, all together."""

    numbers: tuple[int, ...]
    state: GroupState
    at_s: float
    oldest_version: int | None = None
    """Set with ADMITTED and READY."""
    step: int | None = None
    """Set with TAKEN."""
    reason: str = ""
    """Set with DROPPED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Running turns of unfinished episodes have grown. Parts of one turn come in the order they were sampled."""

    parts: tuple[TurnPart, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpisode:
    """An episode has ended, with everything it holds: it takes the place of the parts of its turns. Tokens of parts
    that it does not hold were ``discarded``."""

    episode: EpisodeGraph
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEpisodes:
    """Episodes of a group that goes on are judged anew, all of them alike."""

    number: int
    """Of the group."""
    places: tuple[int, ...]
    """Theirs in it; each of them has ended."""
    status: EpisodeStatus
    reason: str
    """Why they are not trained; empty for episodes that are."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep:
    """The optimizer has stepped on the groups of ``step``."""

    step: int
    numbers: tuple[int, ...]
    trained_tokens: int
    dropped_tokens: dict[str, int]
    ages: dict[int, int]
    """Tokens trained at each age."""
    at_s: float
    learned: Learned | None = None
    """What became of its tokens, where the learner said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVersion:
    """The engines use ``version``; the groups that made it are released."""

    version: int
    numbers: tuple[int, ...]
    checksum: str
    """One hash of all its tensors' hashes: two lives of a run agree on a version's weights where this agrees."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth remembering: a start, a resume, a checkpoint, a warning, an end."""

    kind: str
    detail: str
    at_s: float


Operation = Submit | Move | Stream | EndEpisode | DropEpisodes | EndStep | CommitVersion | Note


@dataclass(slots=True, kw_only=True)
class Fates:
    """Where the units of one kind are."""

    submitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    in_flight: int = 0

    @property
    def balance(self) -> int:
        """0 when nothing was lost and nothing counted twice."""
        return self.submitted - self.trained - sum(self.dropped.values()) - self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """submitted = trained + dropped + in flight, in each unit; the four figures are counted separately."""

    groups: Fates
    episodes: Fates
    tokens: Fates

    @property
    def holds(self) -> bool:
        """Whether the books balance."""
        return all(fates.balance == 0 for fates in (self.groups, self.episodes, self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalledGroup:
    """What a ledger remembers of a group that is neither dropped nor part of the checkpoint."""

    number: int
    row: int
    state: GroupState
    oldest_version: int
    step: int | None
    """The step that took it and is to take it again; ``None`` where none did."""
    episodes: tuple[EpisodeGraph, ...]
    """Those that have ended."""
    begun: tuple[TurnPart, ...] = ()
    """What is recorded of the turns of those that have not: one part for each turn."""

    def kept_version(self) -> int | None:
        """No token that it keeps is older; ``None`` where it keeps none."""
        scored = [episode for episode in self.episodes if episode.status is EpisodeStatus.SCORED]
        turns = [turn.tokens for episode in scored for turn in episode.turns]
        found = versions_of([*turns, *(part.tokens for part in self.begun)])
        return None if found is None else found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What a run resumes from."""

    num_submitted: int
    dropped: dict[str, int]
    num_released: int
    """Groups that the checkpoint contains."""
    groups: tuple[RecalledGroup, ...]
    checksums: dict[int, str]
    """What the weights of versions newer than the checkpoint hashed to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """One group, and how it did."""

    number: int
    row: int
    oldest_version: int
    closed: bool
    """Whether nothing more will come of it."""
    rewards: tuple[float, ...]
    """Of its episodes that have one, by place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Sampled tokens of each episode, ascending: where the two differ, training prefers some lengths to others."""

    submitted: tuple[int, ...]
    """Of every episode that has ended, of groups that were trained or dropped: none in flight."""
    trained: tuple[int, ...]
    """Of those that were trained, in whole or but for tokens that carried no loss."""
    num_withdrawn: int = 0
    """Episodes that were withdrawn before they had ended: not among them."""


class Ledger(Protocol):
    """Where the operations are kept."""

    def apply(self, *operations: Operation) -> None:
        """Record them in this order. :class:`~headrace.base.errors.LedgerError` if one cannot be kept: those given
        before it in the same call may be kept or not, those after it are not."""
        ...

    def recall(self, step: int) -> Recalled:
        """Roll back to a checkpoint at ``step`` and return what is to go on.

        Groups of later steps become READY again and remember their step, so that each is trained again in the same
        batch; groups that were running become SUBMITTED and keep the episodes that had ended, and what is recorded of
        the others.
        """
        ...

    def episodes(self, number: int) -> list[EpisodeGraph]:
        """The episodes of one group that have ended, in order."""
        ...

    def conservation(self) -> Conservation:
        """Count everything, as of one moment."""
        ...

    def ages(self) -> dict[int, int]:
        """Tokens trained at each age, by age."""
        ...

    def lengths(self) -> Lengths:
        """How long the episodes were whose fate is decided, and those that were trained."""
        ...

    def attempts(self, first: int) -> list[GroupAttempt]:
        """The groups from number ``first`` on, in order."""
        ...

    def steps(self) -> dict[int, tuple[int, ...]]:
        """The groups of every step that was trained, in order."""
        ...

    def checksums(self) -> dict[int, str]:
        """What the weights of every committed version hashed to."""
        ...

    def notes(self) -> list[tuple[str, str, float]]:
        """Kind, detail and time of every note, oldest first."""
        ...

    def persist(self) -> None:
        """Make what was applied outlast a loss of power; what a killed process leaves behind outlasts it anyway."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
