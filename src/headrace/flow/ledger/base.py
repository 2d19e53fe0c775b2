"""The operations that a ledger records, the results of its queries, and its contract.

Every change is an operation. After a crash, the ledger contains all operations up to some point, each of them complete.
In every operation, ``numbers`` are the numbers of groups, and ``at_s`` is the Unix time in seconds. A *version* is the
integer that names one set of weights; the *age* of a trained token is measured in versions.

A token counts as submitted from the moment it is recorded: with its episode when the episode ends, or earlier, in a
part of a running turn. A token that was not recorded before a crash was never submitted; ``flow.record_tokens`` limits
the number of such tokens of each running sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, TokenChunk
from headrace.base.types.group import GroupState
from headrace.base.types.outline import LostGroup
from headrace.base.types.scored import TokenResults
from headrace.base.types.stored import Stored
from headrace.base.types.tokens import find_version_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The operation that creates groups, each for one row of the dataset."""

    numbers: tuple[int, ...]
    """The numbers of the new groups."""
    rows: tuple[int, ...]
    """The index of the dataset row of each group."""
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The operation that moves groups to another state, the same state for all of them."""

    numbers: tuple[int, ...]
    state: GroupState
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""
    oldest_version: int | None = None
    """Oldest version of the groups' tokens; only for the states ADMITTED and READY."""
    step: int | None = None
    """The step that takes the groups; only for the state TAKEN."""
    reason: str = ""
    """Why the groups are dropped; only for the state DROPPED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The operation that records tokens of turns that are still running. A turn may have several parts, within one
    operation or over several; they are in the order in which they were sampled."""

    parts: tuple[TokenChunk, ...]
    """The new tokens. Each chunk belongs to one turn."""
    at_s: float
    """When the operation was recorded, as wall-clock time in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpisode:
    """The operation that records an episode that has ended, with all its turns. It replaces the parts that were
    recorded while these turns ran. Tokens of parts that the episode does not contain are counted as ``discarded``."""

    episode: EpisodeGraph
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEpisodes:
    """The operation that sets the status of some episodes of a group, for example because a filter left them out. The
    group itself is not dropped."""

    number: int
    """Number of the group."""
    places: tuple[int, ...]
    """Positions of the episodes in the group; each of them has ended."""
    status: EpisodeStatus
    """The new status."""
    reason: str
    """Why the episodes are not trained; empty for episodes that are trained."""
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep:
    """The operation that records the end of ``step``: the optimizer has trained on its groups."""

    step: int
    numbers: tuple[int, ...]
    """The numbers of the groups that were trained."""
    trained_tokens: int
    """Number of tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """Number of sampled tokens of the batch that carried no loss, by reason."""
    ages: dict[int, int]
    """Number of trained tokens by age, in versions."""
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""
    learned: TokenResults | Stored | None = None
    """The results that the learner computed for each token of the step, or where they lie in the store of the run;
    ``None`` if they are not recorded."""
    updates: int = 1
    """Number of updates of the weights that the learner made with the step's batch."""
    lost: tuple[LostGroup, ...] = ()
    """The groups among ``numbers`` that carried no loss because columns of them could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVersion:
    """The operation that records that the engines use ``version`` of the weights; the groups ``numbers``, on which this
    version was trained, are released."""

    version: int
    numbers: tuple[int, ...]
    """The numbers of the groups that are released."""
    checksum: str
    """One hash of the hashes of all tensors. Processes with equal checksums have the same weights."""
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The operation that records an event of the run: a start, a resume, a checkpoint, a warning, an end."""

    kind: str
    """The kind of event, one word."""
    detail: str
    """The event in words."""
    at_s: float
    """The wall-clock time at which it was recorded, in seconds."""


Operation = Submit | Move | Stream | EndEpisode | DropEpisodes | EndStep | CommitVersion | Note


@dataclass(slots=True, kw_only=True)
class UnitCounts:
    """The number of units of one kind (groups, episodes or tokens) by outcome: trained, dropped or still in flight."""

    submitted: int = 0
    """Number of all units."""
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped units by reason."""
    in_flight: int = 0
    """Number of units that are neither trained nor dropped yet."""

    @property
    def balance(self) -> int:
        """Return submitted − trained − dropped − in flight: 0 if no unit was lost or counted twice."""
        return self.submitted - self.trained - sum(self.dropped.values()) - self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """The counts with which submitted = trained + dropped + in flight can be checked, for each kind of unit. The four
    numbers are counted by separate queries."""

    groups: UnitCounts
    episodes: UnitCounts
    tokens: UnitCounts

    @property
    def holds(self) -> bool:
        """Return whether submitted = trained + dropped + in flight holds for groups, for episodes and for tokens."""
        return all(counts.balance == 0 for counts in (self.groups, self.episodes, self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedGroup:
    """A group with which a resumed run continues: it was not dropped, and no step before the checkpoint has trained
    it."""

    number: int
    row: int
    """The index of its dataset row."""
    state: GroupState
    oldest_version: int
    """The oldest version of its tokens if the group was ready; otherwise the version that was committed when the group
    was admitted; 0 if it was not admitted."""
    step: int | None
    """The step that had taken the group, and takes it again; ``None`` if no step had taken it."""
    episodes: tuple[EpisodeGraph, ...]
    """Episodes of the group that have ended."""
    partial_turns: tuple[TokenChunk, ...] = ()
    """Recorded tokens of the turns of the other episodes, one chunk for each turn."""

    def kept_version(self) -> int | None:
        """Return the oldest version among the tokens that may still be trained: the tokens of scored episodes and of
        partial turns. ``None`` if there are none."""
        scored = [episode for episode in self.episodes if episode.status is EpisodeStatus.SCORED]
        turns = [turn.tokens for episode in scored for turn in episode.turns]
        versions = find_version_range([*turns, *(part.tokens for part in self.partial_turns)])
        return None if versions is None else versions[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state of a run at a checkpoint, according to its ledger. The run resumes from it."""

    num_submitted: int
    """Number of groups that were ever created."""
    dropped: dict[str, int]
    """Number of dropped groups by reason."""
    num_released: int
    """Number of groups that were trained before the checkpoint."""
    groups: tuple[ResumedGroup, ...]
    """The groups with which the run continues."""
    checksums: dict[int, str]
    """Checksums of the weights of the checkpoint's version and all newer versions, by version. A run that repeats these
    steps compares its weights with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """A group with the rewards of its episodes. A resumed run restores the state of its curriculum from these
    records."""

    number: int
    row: int
    """The index of its dataset row."""
    oldest_version: int
    """The oldest version of its tokens if the group was ready; otherwise the version that was committed when the group
    was admitted; 0 if it was not admitted."""
    closed: bool
    """Whether all episodes of the group have ended or were dropped with it."""
    rewards: tuple[float, ...]
    """Rewards of the episodes that have a reward, in the order of their positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of episodes in sampled tokens, as two lists in ascending order. If the two distributions differ,
    episodes of some lengths are more likely to be trained than episodes of other lengths."""

    submitted: tuple[int, ...]
    """Lengths of all ended episodes of groups that were trained or dropped, without groups in flight."""
    trained: tuple[int, ...]
    """Lengths of the episodes that were trained, including those of which some tokens carried no loss."""
    num_withdrawn: int = 0
    """Number of episodes that were cancelled before they ended. Neither list contains them."""


class Ledger(Protocol):
    """The contract of a ledger: it records the operations of a run and answers queries about them. Implementations
    store it in a SQLite file, in memory or on a Redis server."""

    def apply(self, *operations: Operation) -> None:
        """Record ``operations`` in the order given.

        Raises :class:`~headrace.base.errors.LedgerError` if an operation cannot be recorded. Operations before it in
        the same call may be recorded or not; operations after it are not recorded.
        """

    def roll_back(self, step: int) -> ResumeState:
        """Restore the state of the checkpoint of ``step``, where ``step`` is the first step to repeat, and return the
        groups and counts with which the run continues.

        Groups of this step and later ones become READY and keep their step, so that each is trained again in the same
        batch. Groups that were running become SUBMITTED; they keep their ended episodes and the recorded tokens of
        their other episodes.
        """

    def episodes(self, number: int) -> list[EpisodeGraph]:
        """Return the episodes of the group ``number`` that have ended, in the order of their positions."""

    def conservation(self) -> Conservation:
        """Return the counts of groups, episodes and tokens by outcome, all counted at the same moment."""

    def ages(self) -> dict[int, int]:
        """Return the number of trained tokens by age, in versions."""

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of all episodes of groups that were trained or dropped, and the
        lengths of the trained episodes."""

    def attempts(self, first: int) -> list[GroupAttempt]:
        """Return the groups from number ``first`` on, in the order of their numbers, with the rewards of their
        episodes."""

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the groups that each step trained, by step."""

    def updates(self) -> dict[int, int]:
        """Return the number of updates of the weights that each step made with its batch, by step."""

    def lost(self) -> dict[int, tuple[LostGroup, ...]]:
        """Return the groups that carried no loss in their step because columns could not be read, by step. Steps
        without such groups are left out. A step that has dropped tokens for this reason, and of which the groups are
        not recorded, is present without groups: an older version of Headrace made it."""

    def checksums(self) -> dict[int, str]:
        """Return the checksum of the weights of every committed version, by version."""

    def notes(self) -> list[tuple[str, str, float]]:
        """Return the kind, the detail and the Unix time in seconds of every note about an event of the run, oldest
        first."""

    def persist(self) -> None:
        """Sync the applied operations to the disk, so that they survive a power failure. They survive the death of the
        process even without this call."""

    def close(self) -> None:
        """Close the ledger; it cannot be used afterwards."""
