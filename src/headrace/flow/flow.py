"""The flow: the state machine, the buffer of scored groups and the ledger, kept in step with each other.

Methods that decide are plain functions: they act at once or say "not yet". Whoever waits, waits for ``changed``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, TurnPart
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import Learned, ScoredGroup
from headrace.flow.config import FlowConfig
from headrace.flow.ledger import LedgerWriter, Recalled
from headrace.flow.ledger.base import CommitVersion, DropEpisodes, EndEpisode, EndStep, Move, RecalledGroup, Submit
from headrace.flow.ledger.streams import RunningTurns
from headrace.flow.signal import Signal
from headrace.flow.state import FlowState, GroupEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A group that may start."""

    number: int
    row: int
    """The dataset row it attempts."""
    ended: tuple[EpisodeGraph, ...] = ()
    """Episodes that had ended before a crash: they are not asked again."""
    begun: tuple[TurnPart, ...] = ()
    """What the ledger holds of the turns of the others: they go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """What the next step trains."""

    step: int
    groups: list[ScoredGroup]
    """In the order they are laid out."""
    oldest_version: int | None
    """Tokens of older versions carry no loss; ``None``: every token carries it."""


class Flow:
    """Where every group is. ``pick_row`` says which dataset row a group attempts, asked once for each number in order;
    ``None``: the rows are used up."""

    def __init__(
        self,
        config: FlowConfig,
        *,
        writer: LedgerWriter,
        clock: Clock,
        last_step: int,
        pick_row: Callable[[int], int | None],
    ) -> None:
        self.config = config
        self.state = FlowState(limits=config.limits())
        self.changed = Signal()
        self._policy = config.policy
        self._writer = writer
        self._clock = clock
        self.running_turns = RunningTurns(writer, clock, most=config.record_tokens)
        self._last_step = last_step
        self._pick_row = pick_row
        self._out_of_rows = False
        self._buffer: dict[int, ScoredGroup] = {}
        self._recalled: dict[int, RecalledGroup] = {}
        self._unreleased: dict[int, tuple[int, ...]] = {}
        self.wasted_tokens: Counter[str] = Counter()
        """Tokens of groups that were ready and left untrained, in this life of the run, by reason."""

    # --- generation's side

    def admit(self) -> list[Admission]:
        """The groups that may start now; those that a crash interrupted come first."""
        needed = self._last_step * self.config.groups_per_step
        room = needed - self.state.counts[GroupState.RELEASED] - self.state.num_held
        count = self._policy.admit(self.state)
        if not self._policy.recorded:
            count = min(count, room)
        waiting = self.state.counts[GroupState.SUBMITTED]
        rows = self._pick_rows(count - waiting)
        numbers = self.state.call_up(max(0, min(count, waiting + len(rows))))
        if rows:
            self._writer.write(Submit(numbers=tuple(rows), rows=tuple(rows.values()), at_s=self._clock.wall()))
        self._move(numbers, GroupState.ADMITTED, versions=(self.state.version, self.state.version))
        return [self._admission(number, rows.get(number)) for number in numbers]

    def _pick_rows(self, count: int) -> dict[int, int]:
        """The rows of up to ``count`` groups that do not exist yet, by number: fewer where the rows are used up."""
        rows: dict[int, int] = {}
        while len(rows) < count and not self._out_of_rows:
            number = self.state.num_submitted + len(rows)
            row = self._pick_row(number)
            if row is None:
                self._out_of_rows = True
                self.changed.ring()  # who waits for a batch may wait in vain
            else:
                rows[number] = row
        return rows

    def _admission(self, number: int, fresh_row: int | None) -> Admission:
        if fresh_row is not None:
            return Admission(number=number, row=fresh_row)
        recalled = self._recalled.pop(number)
        return Admission(number=number, row=recalled.row, ended=recalled.episodes, begun=recalled.begun)

    def start(self, number: int) -> None:
        """Its first episode runs."""
        self._move([number], GroupState.RUNNING)

    def end_episode(self, episode: EpisodeGraph) -> None:
        """One of its episodes has ended."""
        self.running_turns.ended(episode.key)
        self._writer.write(EndEpisode(episode=episode, at_s=self._clock.wall()))

    def drop_episodes(self, number: int, places: Sequence[int], *, status: EpisodeStatus, reason: str) -> None:
        """Episodes of a group that goes on have another status than the one they ended with."""
        at_s = self._clock.wall()
        self._writer.write(
            DropEpisodes(number=number, places=tuple(places), status=status, reason=reason, at_s=at_s)
        )  # fmt: skip

    def scored(self, group: ScoredGroup) -> None:
        """Every episode has ended and there is a baseline: the group may be trained."""
        self._move([group.number], GroupState.SCORED)
        entry = self.state.groups[group.number]
        assert entry.oldest_version is not None
        versions = group.versions() or (entry.oldest_version, entry.oldest_version)
        self._buffer[group.number] = group
        self._move([group.number], GroupState.READY, versions=versions)
        self._let_go(self._policy.leave(self.state))

    def drop(self, number: int, reason: str) -> None:
        """The group leaves untrained; its slot is free."""
        ready = self._buffer.pop(number, None)
        if ready is not None:
            self.wasted_tokens[reason] += sum(episode.num_sampled for episode in ready.scored)
        self._move([number], GroupState.DROPPED, reason=reason)

    # --- the learner's side

    def take(self) -> TakenBatch | None:
        """The next batch; ``None``: not yet. What has become too old leaves first, where the policy says so."""
        if self.state.next_step >= self._last_step:
            return None
        selection = self._policy.select(self.state)
        while selection.leave:
            self._let_go(selection.leave)
            selection = self._policy.select(self.state)
        if not selection.take:
            return None
        step = self.state.next_step
        self._move(selection.take, GroupState.TAKEN, step=step)
        self.state.next_step += 1
        groups = [self._buffer.pop(number) for number in selection.take]
        return TakenBatch(step=step, groups=groups, oldest_version=selection.oldest_version)

    def _let_go(self, leave: Mapping[int, str]) -> None:
        for number, reason in leave.items():
            self.drop(number, reason)

    def trained(
        self, groups: Sequence[ScoredGroup], report: StepReport, ages: dict[int, int], learned: Learned | None = None
    ) -> None:
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
                learned=learned,
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

    def set_max_age(self, max_age: int) -> None:
        """The bound from now on; what was admitted under a higher one keeps it."""
        self.state.set_max_age(max_age)
        self.changed.ring()

    def resume_max_age(self, max_age: int | None) -> None:
        """Go on with the tuned bound of an earlier life (``None``: with the first), while what that life left may
        become as old as any bound allows."""
        kept = [group.oldest_version for group in self.state.groups.values() if group.oldest_version is not None]
        limit = self.config.greatest_age
        if max_age is not None:
            self.state.set_max_age(min(max_age, limit))
        self.state.promise(max(kept, default=-1) + 1, limit)

    def set_capacity(self, capacity: int) -> None:
        """How many groups may be generated or scored at once from now on."""
        self.state.limits = replace(self.state.limits, capacity=capacity)
        self.changed.ring()

    @property
    def finished(self) -> bool:
        """Whether the last step has taken its batch."""
        return self.state.next_step >= self._last_step

    @property
    def starts_groups(self) -> bool:
        """Whether a group may still be admitted."""
        return not self.finished or self._policy.recorded

    @property
    def used_up(self) -> bool:
        """Whether the rows are used up and nothing is left that could fill a batch."""
        waiting = self.state.counts[GroupState.SUBMITTED]
        return self._out_of_rows and not waiting and self.state.num_held == self.state.counts[GroupState.READY]

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
            newest = None
            if group.state is GroupState.READY:
                _, newest = episodes.versions() or (None, None)
                oldest: int | None = group.oldest_version
                self._buffer[group.number] = episodes
            else:
                oldest = group.kept_version()  # what is kept goes on ageing
                self._recalled[group.number] = group
            entry = GroupEntry(state=group.state, oldest_version=oldest, newest_version=newest, step=group.step)
            self.state.restore(group.number, entry)
        assert self.state.conserved(), f"the ledger does not add up: {self.state.counts}, {recalled.dropped}"

    def _move(
        self,
        numbers: Sequence[int],
        state: GroupState,
        *,
        versions: tuple[int, int] | None = None,
        step: int | None = None,
        reason: str = "",
    ) -> None:
        if not numbers:
            return
        for number in numbers:
            self.state.move(number, state, reason=reason, versions=versions)
        self._writer.write(
            Move(
                numbers=tuple(numbers),
                state=state,
                at_s=self._clock.wall(),
                oldest_version=None if versions is None else versions[0],
                step=step,
                reason=reason,
            )
        )
        self.changed.ring()
