"""The operations that a ledger records, the questions that it can answer, and its contract.

Every change is an operation. After a crash an operation is present as a whole or not at all, and none before it is
missing. In each of them ``numbers`` are the numbers of groups, and ``at_s`` is the Unix time in seconds. A *version* is
the integer that names one set of weights; the *age* of a trained token is measured in versions.

A token counts as submitted from the moment it is recorded: with its episode when that ends, or earlier, in a part of a
running turn. A token that was not recorded before a crash was never submitted; ``flow.record_tokens`` bounds how many
tokens of each running sequence that can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, TokenChunk
from headrace.base.types.group import GroupState
from headrace.base.types.scored import TokenResults
from headrace.base.types.stored import Stored
from headrace.base.types.tokens import versions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The operation that creates groups, each for one row of the dataset."""

    numbers: tuple[int, ...]
    """The numbers of the new groups."""
    rows: tuple[int, ...]
    """The index of the dataset row of each group."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The operation that moves groups to another state, all together."""

    numbers: tuple[int, ...]
    state: GroupState
    at_s: float
    oldest_version: int | None = None
    """Oldest version of the groups' tokens; only for the states ADMITTED and READY."""
    step: int | None = None
    """The step that takes the groups; only for the state TAKEN."""
    reason: str = ""
    """Why the groups are dropped; only for the state DROPPED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The operation that records new tokens of running turns. The parts of one turn come in the order in which they
    were sampled."""

    parts: tuple[TokenChunk, ...]
    """The new tokens, one chunk for each turn or several in order."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpisode:
    """The operation that records an episode that has ended, with all its turns. It replaces the parts of these turns
    that were recorded while they ran; tokens of parts that the episode does not contain are counted as
    ``discarded``."""

    episode: EpisodeGraph
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEpisodes:
    """The operation that gives some episodes of a group a new status, the same for all of them. The group itself is not
    dropped."""

    number: int
    """Number of the group."""
    places: tuple[int, ...]
    """Positions of the episodes in the group; each of them has ended."""
    status: EpisodeStatus
    """The new status."""
    reason: str
    """Why the episodes are not trained; empty for episodes that are trained."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep:
    """The operation that records that the optimizer has trained on the groups of ``step``."""

    step: int
    numbers: tuple[int, ...]
    """The numbers of the groups that were trained."""
    trained_tokens: int
    """Number of tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """Number of tokens of the batch that could not carry loss, by reason."""
    ages: dict[int, int]
    """Number of trained tokens by age, in versions."""
    at_s: float
    learned: TokenResults | Stored | None = None
    """The results that the learner computed for each token of the step, or where they lie in the store of the run;
    ``None`` if they are not recorded."""
    updates: int = 1
    """The number of updates of the weights that were made from the step's batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVersion:
    """The operation that records that the engines use ``version`` of the weights; the groups ``numbers``, which helped
    to make it, are released."""

    version: int
    numbers: tuple[int, ...]
    """The numbers of the groups that are released."""
    checksum: str
    """One hash of the hashes of all tensors. Two processes that hold the version have the same weights if it is
    equal."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The operation that records an event of the run: a start, a resume, a checkpoint, a warning, an end."""

    kind: str
    """The kind of event, one word."""
    detail: str
    """The event in words."""
    at_s: float


Operation = Submit | Move | Stream | EndEpisode | DropEpisodes | EndStep | CommitVersion | Note


@dataclass(slots=True, kw_only=True)
class UnitCounts:
    """The number of units of one kind (groups, episodes or tokens) by what became of them."""

    submitted: int = 0
    """Number of all units."""
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped units by reason."""
    in_flight: int = 0
    """Number of units that are neither trained nor dropped yet."""

    @property
    def balance(self) -> int:
        """Return the number of units that are unaccounted for: 0 if nothing was lost and nothing was counted twice."""
        return self.submitted - self.trained - sum(self.dropped.values()) - self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """The counts that prove submitted = trained + dropped + in flight, for each kind of unit. The four numbers are
    counted separately."""

    groups: UnitCounts
    episodes: UnitCounts
    tokens: UnitCounts

    @property
    def holds(self) -> bool:
        """Return whether submitted = trained + dropped + in flight holds for groups, for episodes and for tokens."""
        return all(fates.balance == 0 for fates in (self.groups, self.episodes, self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedGroup:
    """A group with which a resumed run continues: the steps before the checkpoint have not trained it, and it was not
    dropped."""

    number: int
    row: int
    """The index of its dataset row."""
    state: GroupState
    oldest_version: int
    """The oldest version of its tokens if it was ready; otherwise the version that was committed when it was admitted,
    0 before that."""
    step: int | None
    """The step that took the group and takes it again; ``None`` if no step had taken it."""
    episodes: tuple[EpisodeGraph, ...]
    """Episodes of the group that have ended."""
    partial_turns: tuple[TokenChunk, ...] = ()
    """Recorded tokens of the turns of the other episodes, one chunk for each turn."""

    def kept_version(self) -> int | None:
        """Return the oldest version of the tokens that the group keeps and may still train, which are those of scored
        episodes and of partial turns; ``None`` if it has none."""
        scored = [episode for episode in self.episodes if episode.status is EpisodeStatus.SCORED]
        turns = [turn.tokens for episode in scored for turn in episode.turns]
        found = versions_of([*turns, *(part.tokens for part in self.partial_turns)])
        return None if found is None else found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state of a run in its ledger at a checkpoint, from which the run resumes."""

    num_submitted: int
    """Number of groups that were ever created."""
    dropped: dict[str, int]
    """Number of dropped groups by reason."""
    num_released: int
    """Number of groups that were trained before the checkpoint."""
    groups: tuple[ResumedGroup, ...]
    """The groups with which the run continues."""
    checksums: dict[int, str]
    """Checksums of the weights of the checkpoint's version and newer ones, by version: a run that repeats these steps
    compares its weights with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """A group with the rewards of its episodes, from which a resumed run restores its curriculum."""

    number: int
    row: int
    """The index of its dataset row."""
    oldest_version: int
    """The oldest version of its tokens if it was ready; otherwise the version that was committed when it was admitted,
    0 before that."""
    closed: bool
    """Whether no more episodes of the group will end."""
    rewards: tuple[float, ...]
    """Rewards of the episodes that have one, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The number of sampled tokens of each episode, in two lists in ascending order. If the two distributions differ,
    episodes of some lengths are more likely to be trained than those of others."""

    submitted: tuple[int, ...]
    """Lengths of all ended episodes of groups that were trained or dropped, without groups in flight."""
    trained: tuple[int, ...]
    """Lengths of the episodes that were trained, including those of which some tokens carried no loss."""
    num_withdrawn: int = 0
    """Number of episodes that were withdrawn before they ended. Neither list contains them."""


class Ledger(Protocol):
    """The contract of a ledger: it records the operations of a run and answers questions about them. Implementations
    keep it in a SQLite file, in memory or on a Redis server."""

    def apply(self, *operations: Operation) -> None:
        """Record the operations in this order.

        Raises :class:`~headrace.base.errors.LedgerError` if one of them cannot be recorded. Operations before it in the
        same call may be recorded or not; operations after it are not.
        """
        ...

    def roll_back(self, step: int) -> ResumeState:
        """Undo what happened after the checkpoint of ``step``, the number of the first step to repeat, and return the
        groups with which the run continues.

        Groups of later steps become READY again and remember their step, so that each is trained again in the same
        batch. Groups that were running become SUBMITTED; they keep the episodes that had ended and the recorded tokens
        of the others.
        """
        ...

    def episodes(self, number: int) -> list[EpisodeGraph]:
        """Return the episodes of the group ``number`` that have ended, in the order of their positions."""
        ...

    def conservation(self) -> Conservation:
        """Return the counts of groups, episodes and tokens by what became of them, all counted at one moment."""
        ...

    def ages(self) -> dict[int, int]:
        """Return the number of trained tokens by age, in versions."""
        ...

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of the episodes of all groups that were trained or dropped, and those
        of the trained episodes."""
        ...

    def attempts(self, first: int) -> list[GroupAttempt]:
        """Return the groups from number ``first`` on, in the order of their numbers, with the rewards of their
        episodes."""
        ...

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the groups that each step trained, by step."""
        ...

    def updates(self) -> dict[int, int]:
        """Return the number of updates of the weights that each step made of its batch, by step."""
        ...

    def checksums(self) -> dict[int, str]:
        """Return the checksum of the weights of every committed version, by version."""
        ...

    def notes(self) -> list[tuple[str, str, float]]:
        """Return the kind, the detail and the Unix time in seconds of every note about an event of the run, oldest
        first."""
        ...

    def persist(self) -> None:
        """Make the applied operations survive a power failure. A killed process loses nothing even without this
        call."""
        ...

    def close(self) -> None:
        """Close the ledger; it cannot be used afterwards."""
        ...
