"""The flow: the state machine, the buffer of scored groups and the ledger, kept in step with each other.

Methods that decide are plain functions: they act at once or say "not yet". Whoever waits, waits for ``changed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.flow.config import FlowConfig
from headrace.flow.ledger import LedgerWriter, Recalled
from headrace.flow.ledger.base import CommitVersion, EndEpisode, EndStep, Move, RecalledGroup, Submit
from headrace.flow.policies import make_policy
from headrace.flow.signal import Signal
from headrace.flow.state import FlowState, GroupEntry
from headrace.types.episode import Episode
from headrace.types.group import GroupState
from headrace.types.messages.controller import StepReport
from headrace.types.scored import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A group that may start."""

    number: int
    row: int
    """The dataset row it attempts."""
    ended: tuple[Episode, ...] = ()
    """Episodes that had ended before a crash: they are not asked again."""


class Flow:
    """Where every group is. ``pick_row`` says which dataset row a group number attempts."""

    def __init__(
        self,
        config: FlowConfig,
        *,
        writer: LedgerWriter,
        clock: Clock,
        last_step: int,
        pick_row: Callable[[int], int],
    ) -> None:
        self.config = config
        self.state = FlowState()
        self.changed = Signal()
        self._policy = make_policy(config)
        self._writer = writer
        self._clock = clock
        self._last_step = last_step
        self._pick_row = pick_row
        self._buffer: dict[int, ScoredGroup] = {}
        self._recalled: dict[int, RecalledGroup] = {}
        self._unreleased: dict[int, tuple[int, ...]] = {}

    # --- generation's side

    def admit(self) -> list[Admission]:
        """The groups that may start now; those that a crash interrupted come first."""
        needed = self._last_step * self.config.groups_per_step
        room = needed - self.state.counts[GroupState.RELEASED] - self.state.num_held
        count = min(self._policy.admit(self.state), room)
        waiting = self.state.waiting()[: max(0, count)]
        fresh = [self.state.submit() for _ in range(count - len(waiting))]
        rows = tuple(self._pick_row(number) for number in fresh)
        if fresh:
            self._writer.write(Submit(numbers=tuple(fresh), rows=rows, at_s=self._clock.wall()))
        numbers = waiting + fresh
        self._move(numbers, GroupState.ADMITTED, oldest_version=self.state.version)
        return [self._admission(number) for number in numbers]

    def _admission(self, number: int) -> Admission:
        recalled = self._recalled.pop(number, None)
        if recalled is None or not recalled.episodes:
            return Admission(number=number, row=self._pick_row(number))
        return Admission(number=number, row=recalled.row, ended=recalled.episodes)

    def start(self, number: int) -> None:
        """Its first episode runs."""
        self._move([number], GroupState.RUNNING)

    def end_episode(self, episode: Episode) -> None:
        """One of its episodes has ended."""
        self._writer.write(EndEpisode(episode=episode, at_s=self._clock.wall()))

    def scored(self, group: ScoredGroup) -> None:
        """Every episode has ended and there is a baseline: the group may be trained."""
        self._move([group.number], GroupState.SCORED)
        entry = self.state.groups[group.number]
        oldest = group.oldest_version()
        entry.oldest_version = entry.oldest_version if oldest is None else oldest
        self._buffer[group.number] = group
        self._move([group.number], GroupState.READY, oldest_version=entry.oldest_version)

    def drop(self, number: int, reason: str) -> None:
        """The group leaves untrained; its slot is free."""
        self._buffer.pop(number, None)
        self._move([number], GroupState.DROPPED, reason=reason)

    # --- the learner's side

    def take(self) -> list[ScoredGroup] | None:
        """The groups of the next batch, in order; ``None``: not yet."""
        if self.state.next_step >= self._last_step:
            return None
        selection = self._policy.select(self.state)
        if selection is None:
            return None
        self._move(selection.take, GroupState.TAKEN, step=self.state.next_step)
        self.state.next_step += 1
        return [self._buffer.pop(number) for number in selection.take]

    def trained(self, groups: Sequence[ScoredGroup], report: StepReport, ages: dict[int, int]) -> None:
        """The optimizer has stepped on them."""
        numbers = tuple(group.number for group in groups)
        self._writer.write(
            EndStep(
                step=report.step,
                numbers=numbers,
                trained_tokens=report.trained_tokens,
                dropped_tokens=report.dropped_tokens,
                ages=ages,
                at_s=self._clock.wall(),
            )
        )
        for number in numbers:
            self.state.move(number, GroupState.TRAINED)
        self._unreleased[report.step + 1] = numbers
        self.changed.ring()

    def committed(self, version: int, checksum: str) -> None:
        """The engines use ``version``: the groups of every step up to it give their slots back."""
        self.state.version = version
        made_by = [made for made in self._unreleased if made <= version]
        numbers = tuple(number for made in made_by for number in self._unreleased.pop(made))
        for number in numbers:
            self.state.move(number, GroupState.RELEASED)
        self._writer.write(CommitVersion(version=version, numbers=numbers, checksum=checksum, at_s=self._clock.wall()))
        assert self.state.conserved(), f"groups are not conserved at version {version}: {self.state.counts}"
        self.changed.ring()

    # --- both

    @property
    def finished(self) -> bool:
        """Whether the last step has taken its batch."""
        return self.state.next_step >= self._last_step

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until everything that happened is recorded; if ``durable``, so that it outlasts a loss of power."""
        await self._writer.flush(durable=durable)

    def restore(self, step: int, recalled: Recalled) -> None:
        """Go on from a checkpoint at ``step``."""
        self.state.version = self.state.next_step = step
        self.state.num_submitted = recalled.num_submitted
        self.state.counts[GroupState.RELEASED] = recalled.num_released
        for reason, count in recalled.dropped.items():
            self.state.dropped[reason] += count
            self.state.counts[GroupState.DROPPED] += count
        for group in recalled.groups:
            episodes = ScoredGroup(number=group.number, episodes=group.episodes)
            if group.state is GroupState.READY:
                oldest: int | None = group.oldest_version
                self._buffer[group.number] = episodes
            else:
                oldest = episodes.oldest_version()  # what is kept goes on ageing
                self._recalled[group.number] = group
            self.state.restore(group.number, GroupEntry(state=group.state, oldest_version=oldest, step=group.step))
        assert self.state.conserved(), f"the ledger does not add up: {self.state.counts}, {recalled.dropped}"

    def _move(
        self,
        numbers: Sequence[int],
        state: GroupState,
        *,
        oldest_version: int | None = None,
        step: int | None = None,
        reason: str = "",
    ) -> None:
        if not numbers:
            return
        for number in numbers:
            self.state.move(number, state, reason=reason)
        self._writer.write(
            Move(
                numbers=tuple(numbers),
                state=state,
                at_s=self._clock.wall(),
                oldest_version=oldest_version,
                step=step,
                reason=reason,
            )
        )
        self.changed.ring()
