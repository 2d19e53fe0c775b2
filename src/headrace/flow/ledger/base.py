"""What a ledger records, and what it can prove.

Everything is an operation, and each operation is one transaction: after a crash it is there whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.types.episode import Episode
from headrace.types.group import GroupState


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
class EndEpisode:
    """An episode has ended, with everything it holds."""

    episode: Episode
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


Operation = Submit | Move | EndEpisode | EndStep | CommitVersion | Note


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
    episodes: tuple[Episode, ...]
    """Those that have ended."""


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


class Ledger(Protocol):
    """Where the operations are kept."""

    def apply(self, operation: Operation) -> None:
        """Record one operation, in one transaction. :class:`~headrace.errors.LedgerError` if it cannot be kept."""
        ...

    def recall(self, step: int) -> Recalled:
        """Roll back to a checkpoint at ``step`` and return what is to go on.

        Groups of later steps become READY again and remember their step, so that each is trained again in the same
        batch; groups that were running become SUBMITTED and keep the episodes that had ended.
        """
        ...

    def conservation(self) -> Conservation:
        """Count everything."""
        ...

    def persist(self) -> None:
        """Make what was applied outlast a loss of power; what a killed process leaves behind outlasts it anyway."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
