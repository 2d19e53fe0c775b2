"""A ledger of dictionaries, and as much of an episode as the flow looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headrace.base.types.episode import EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.tokens import Tokens
from headrace.flow.ledger.base import CommitVersion, EndEpisode, EndStep, Move, Operation, ResumedGroup, ResumeState
from headrace.flow.ledger.base import Submit as SubmitGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """As much of an episode as the flow looks at."""

    key: EpisodeKey
    status: EpisodeStatus
    sampled_under: tuple[int, int]

    @property
    def turns(self) -> list[Turn]:
        return [_turn(*self.sampled_under)]

    @property
    def num_sampled(self) -> int:
        return 2

    def versions(self) -> tuple[int, int]:
        return self.sampled_under


@lru_cache
def _turn(oldest: int, newest: int) -> Turn:
    return Turn(author="policy", tokens=Tokens(ids_T=[0, 0], logprobs_T=[0, 0], versions_T=[oldest, newest]))


@dataclass(slots=True, kw_only=True)
class Row:
    """What is remembered of one group."""

    row: int
    state: GroupState = GroupState.SUBMITTED
    reason: str = ""
    oldest_version: int = 0
    step: int | None = None
    episodes: dict[int, Any] = field(default_factory=dict)


class DictLedger:
    """Remembers the operations in dictionaries; it is the writer and what a crash leaves behind."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def write(self, operation: Operation) -> None:
        match operation:
            case SubmitGroups(numbers=numbers, rows=rows):
                for number, row in zip(numbers, rows, strict=True):
                    assert number not in self.rows
                    self.rows[number] = Row(row=row)
            case Move():
                self._move(operation)
            case EndEpisode(episode=episode):
                self.rows[episode.key.group].episodes[episode.key.place] = episode
            case EndStep(numbers=numbers):
                self._all(numbers, GroupState.TRAINED)
            case CommitVersion(numbers=numbers):
                self._all(numbers, GroupState.RELEASED)

    def _move(self, move: Move) -> None:
        for number in move.numbers:
            row = self.rows[number]
            row.state, row.reason = move.state, move.reason
            row.oldest_version = row.oldest_version if move.oldest_version is None else move.oldest_version
            row.step = row.step if move.step is None else move.step

    def _all(self, numbers: tuple[int, ...], state: GroupState) -> None:
        for number in numbers:
            self.rows[number].state = state

    async def flush(self) -> None:
        return

    def close(self) -> None:
        return

    def roll_back(self, step: int) -> ResumeState:
        for row in self.rows.values():
            if row.state is GroupState.DROPPED:
                continue
            if row.step is not None:
                row.state = GroupState.READY if row.step >= step else GroupState.RELEASED
            elif row.state is not GroupState.READY:
                row.state = GroupState.SUBMITTED
        dropped: dict[str, int] = {}
        for row in self.rows.values():
            if row.state is GroupState.DROPPED:
                dropped[row.reason] = dropped.get(row.reason, 0) + 1
        going_on = {n: r for n, r in sorted(self.rows.items()) if r.state in (GroupState.READY, GroupState.SUBMITTED)}
        return ResumeState(
            num_submitted=len(self.rows),
            dropped=dropped,
            num_released=sum(row.state is GroupState.RELEASED for row in self.rows.values()),
            groups=tuple(
                ResumedGroup(
                    number=number,
                    row=row.row,
                    state=row.state,
                    oldest_version=row.oldest_version,
                    step=row.step,
                    episodes=tuple(row.episodes[place] for place in sorted(row.episodes)),
                )
                for number, row in going_on.items()
            ),
            checksums={},
        )
