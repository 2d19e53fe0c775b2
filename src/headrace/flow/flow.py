"""The flow: the state machine of the groups, with the buffer of scored groups and the ledger, which are updated
together.

A group holds the attempts at one task. It is *admitted* when it may start, *ready* when it may be trained, *taken* when
the batch of a step contains it, and *released* when the engines use the weights of the step that trained it. From its
admission to its release, it occupies a *slot*.

Methods never wait, except :meth:`Flow.flush`: they act at once, or return that nothing can be done yet. A loop of the
controller that cannot continue waits for the signal ``changed`` and calls again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.base.clock import Clock
from headrace.base.errors import StoreError
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, TokenChunk
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import ScoredGroup
from headrace.flow.columns import ColumnFiles
from headrace.flow.config import FlowConfig
from headrace.flow.ledger import LedgerWriter, ResumeState
from headrace.flow.ledger.base import CommitVersion, DropEpisodes, EndEpisode, EndStep, Move, ResumedGroup, Submit
from headrace.flow.ledger.streams import RunningTurns
from headrace.flow.pacing import Eager, OpenGroups, SynchronousTime
from headrace.flow.ready import ReadyColumns
from headrace.flow.state import FlowState, GroupEntry

_OPEN = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORED)
"""The states of groups with episodes that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The permission to start one group: what the flow returns to the rollout loop for each group that it admits."""

    number: int
    """The number of the group in the run."""
    row: int
    """The index of the dataset row that the group attempts."""
    ended: tuple[EpisodeGraph, ...] = ()
    """Episodes that had ended before a crash and are not sampled again."""
    partial_turns: tuple[TokenChunk, ...] = ()
    """Recorded tokens of the turns of the other episodes, from which these turns continue after a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """The batch that the next step trains, as the flow returns it to the learner loop."""

    step: int
    """The number of the step."""
    groups: list[ScoredGroup]
    """The groups of the batch, in the order in which they are laid out in it."""
    oldest_version: int | None
    """Tokens of older versions carry no loss; ``None``: every token carries loss."""


class Flow:
    """The state of every group of a run, with the operations that change it; each change is also recorded in the
    ledger. The controller owns it: its rollout and scoring loops move groups up to ready, and its learner loop takes
    and trains them."""

    def __init__(
        self,
        config: FlowConfig,
        *,
        writer: LedgerWriter,
        clock: Clock,
        last_step: int,
        pick_row: Callable[[int], int | None],
        columns: ColumnFiles | None = None,
        ready: ReadyColumns | None = None,
    ) -> None:
        """Create the flow of a run that has no groups yet. ``writer`` records every change in the ledger. ``last_step``
        is the number of steps of the whole run. ``pick_row`` returns the dataset row that the group with a given number
        attempts, and ``None`` when no rows are left; it is called once for each number, in order. ``columns`` are the
        files of the run's store; ``None``: there is none. ``ready`` stores the columns of ready groups; ``None``: they
        stay in memory."""
        self.config = config
        self.state = FlowState(limits=config.limits())
        self.changed = Signal()
        self._policy = config.policy
        self._pacer = (config.pacing if config.policy.paced and not config.policy.recorded else Eager()).pacer()
        self.planned_s: float | None = None
        """The time, in seconds on the clock, at which to call :meth:`admit` again even if nothing changes, because the
        pacing delays a group until then; ``None``: only a change can let another group start."""
        self._writer = writer
        self._clock = clock
        self.running_turns = RunningTurns(writer.write, clock, max_unrecorded=config.record_tokens)
        self._last_step = last_step
        self._pick_row = pick_row
        self.columns = columns
        self._ready = ready
        self._out_of_rows = False
        self._buffer: dict[int, ScoredGroup] = {}
        """The ready groups, by number."""
        self._resumed: dict[int, ResumedGroup] = {}
        """Groups that were in flight when the run was interrupted and are not admitted again yet, by number."""
        self._unreleased: dict[int, tuple[int, ...]] = {}
        """Numbers of the trained groups that still hold slots, by the version that contains their step."""
        self.wasted_tokens: Counter[str] = Counter()
        """Number of tokens of groups that were ready and then dropped since this process began, by reason."""

    # --- called by the rollout and scoring loops

    def admit(self) -> list[Admission]:
        """Return the groups that may start now, and record them as admitted. Groups that a crash interrupted come
        first. Empty if the policy, the pacing or the capacity allows none, or if no steps or dataset rows are left."""
        needed = self._last_step * self.config.groups_per_step
        room = needed - self.state.counts[GroupState.RELEASED] - self.state.num_held
        count = self._policy.admit(self.state)
        if not self._policy.recorded:
            count = min(count, room)
        waiting = self.state.counts[GroupState.SUBMITTED]
        # pacing does not delay groups that a crash interrupted
        count = max(self._apply_pacing(count), min(count, waiting))
        rows = self._pick_rows(count - waiting)
        numbers = self.state.next_submitted(max(0, min(count, waiting + len(rows))))
        if rows:
            self._writer.write(Submit(numbers=tuple(rows), rows=tuple(rows.values()), at_s=self._clock.wall()))
        for number in numbers:
            self._pacer.record_group_admitted(number, self.state.version, self._clock.now())
        self._move(numbers, GroupState.ADMITTED, versions=(self.state.version, self.state.version))
        return [self._admission(number, rows.get(number)) for number in numbers]

    def _apply_pacing(self, count: int) -> int:
        """Return how many of ``count`` groups, which the policy admits, may start now according to the pacing, and set
        ``planned_s``."""
        state, self.planned_s = self.state, None
        if count <= 0:
            return count
        groups = OpenGroups(
            step=state.free_step,
            batch_size=state.limits.batch_size,
            num_started=state.num_open - state.num_waiting,
            num_ready=sum(map(len, state.ready_by_oldest.values())),
            version=state.version,
            deadline=state.deadline,
            in_order=state.limits.strict or self._policy.in_order,
        )
        paced, self.planned_s = self._pacer.num_now(count, groups, self._clock.now())
        return paced

    def _pick_rows(self, count: int) -> dict[int, int]:
        """Choose the dataset rows of up to ``count`` new groups, fewer if the dataset has no rows left. Return the
        index of each group's row by the number of the group."""
        rows: dict[int, int] = {}
        while len(rows) < count and not self._out_of_rows:
            number = self.state.num_submitted + len(rows)
            row = self._pick_row(number)
            if row is None:
                self._out_of_rows = True
                self.changed.notify()  # wakes a loop that waits for a batch, so that it sees that none will come
            else:
                rows[number] = row
        return rows

    def _admission(self, number: int, fresh_row: int | None) -> Admission:
        """Return the admission of the group ``number``. ``fresh_row`` is the dataset row of a new group; ``None`` for a
        group that was in flight when the run was interrupted, whose admission contains its recorded episodes and
        tokens."""
        if fresh_row is not None:
            return Admission(number=number, row=fresh_row)
        resumed = self._resumed.pop(number)
        return Admission(number=number, row=resumed.row, ended=resumed.episodes, partial_turns=resumed.partial_turns)

    def start(self, number: int) -> None:
        """Record that the first episode of the admitted group ``number`` has started."""
        self._move([number], GroupState.RUNNING)

    def end_episode(self, episode: EpisodeGraph) -> None:
        """Record an episode that has ended, with its turns."""
        self.running_turns.forget(episode.key)
        if self.columns is not None:
            self.columns.record_ended_episode(episode.key.group, episode.turns, self._open_groups)
        self._writer.write(EndEpisode(episode=episode, at_s=self._clock.wall()))

    def drop_episodes(self, number: int, places: Sequence[int], *, status: EpisodeStatus, reason: str) -> None:
        """Record a new ``status`` for ended episodes of a group that is not dropped: a filter left them out or masked
        them, for example. ``places`` are their positions in group ``number``, and ``reason`` is counted."""
        at_s = self._clock.wall()
        self._writer.write(
            DropEpisodes(number=number, places=tuple(places), status=status, reason=reason, at_s=at_s)
        )  # fmt: skip

    def add_scored(self, group: ScoredGroup) -> None:
        """Add ``group`` to the buffer of ready groups; then drop the ready groups that the policy rejects. All of its
        episodes must have ended, and enough of them must be scored for a baseline. Raises
        :class:`~headrace.base.errors.StoreError` before any change if the columns of the group cannot be written."""
        versions = group.versions()
        if self._ready is not None:
            group = self._ready.put(group)
        self._move([group.number], GroupState.SCORED)
        entry = self.state.groups[group.number]
        assert entry.oldest_version is not None
        versions = versions or (entry.oldest_version, entry.oldest_version)
        self._buffer[group.number] = group
        self._pacer.record_group_ended(group.number, self._clock.now(), ready=True)
        self._move([group.number], GroupState.READY, versions=versions)
        self._drop_all(self._policy.leave(self.state))

    def drop(self, number: int, reason: str) -> None:
        """Drop the group ``number`` without training it, and count it under ``reason``. This frees its slot at once."""
        ready = self._buffer.pop(number, None)
        self._pacer.record_group_ended(number, self._clock.now(), ready=False)
        if ready is not None:
            self.wasted_tokens[reason] += sum(episode.num_sampled for episode in ready.scored)
            self._release([ready])
        if self.columns is not None:
            self.columns.record_dropped_group(number)
        self._move([number], GroupState.DROPPED, reason=reason)

    # --- called by the learner loop

    def take(self) -> GroupBatch | None:
        """Return the batch of the next step and record its groups as taken; ``None`` if there is no batch yet, or no
        further step. Before that, drop the groups that the policy rejects because of their age."""
        if self.state.next_step >= self._last_step:
            return None
        selection = self._policy.select(self.state)
        while selection.leave:
            self._drop_all(selection.leave)
            selection = self._policy.select(self.state)
        if not selection.take:
            return None
        step = self.state.next_step
        self._move(selection.take, GroupState.TAKEN, step=step)
        self.state.next_step += 1
        groups = [self._buffer.pop(number) for number in selection.take]
        self._pacer.record_batch_taken(step, selection.take, self._clock.now())
        return GroupBatch(step=step, groups=groups, oldest_version=selection.oldest_version)

    def record_batch_sent(self, step: int) -> None:
        """Tell the pacing that the batch of ``step`` is laid out and was sent to the learner, which does not wait for
        it from now on."""
        self._pacer.record_batch_sent(step, self._clock.now())

    @property
    def synchronous_time(self) -> SynchronousTime | None:
        """Return the time that the last trained step would have taken if generation and training took turns instead of
        overlapping; ``None`` if it is not known."""
        return self._pacer.synchronous_time

    def _drop_all(self, leave: Mapping[int, str]) -> None:
        """Drop each group whose number is a key of ``leave``, for the reason that is the value."""
        for number, reason in leave.items():
            self.drop(number, reason)

    def record_step_trained(self, groups: Sequence[ScoredGroup], report: StepReport) -> None:
        """Record that the optimizer has trained on ``groups``. ``report`` is the learner's result."""
        numbers = tuple(group.number for group in groups)
        self._writer.write(
            EndStep(
                step=report.step,
                numbers=numbers,
                trained_tokens=report.trained_tokens,
                dropped_tokens=report.dropped_tokens,
                ages=report.ages,
                at_s=self._clock.wall(),
                learned=report.learned,
                updates=report.updates,
                lost=report.lost,
            )
        )
        for number in numbers:
            self.state.move(number, GroupState.TRAINED)
        if self.columns is not None:
            self.columns.record_trained_groups(numbers, report.step)
        self._release(groups)
        self._unreleased[report.step + 1] = numbers
        self._pacer.record_step_trained(report.step, self._clock.now())
        self.changed.notify()

    def _release(self, groups: Sequence[ScoredGroup]) -> None:
        """Release the stored columns of ``groups``, which were trained or dropped."""
        if self._ready is not None:
            for group in groups:
                self._ready.release(group)

    def record_version_committed(self, version: int, checksum: str) -> None:
        """Record that the engines use ``version``, and release the groups of every step that this version contains,
        which frees their slots. ``checksum`` is one hash of all tensors of the version."""
        self.state.version = version
        self._pacer.record_version_committed(version, self._clock.now())
        contained = [made_version for made_version in self._unreleased if made_version <= version]
        numbers = tuple(number for made_version in contained for number in self._unreleased.pop(made_version))
        for number in numbers:
            self.state.move(number, GroupState.RELEASED)
        self._writer.write(CommitVersion(version=version, numbers=numbers, checksum=checksum, at_s=self._clock.wall()))
        assert self.state.conserved(), f"groups are not conserved at version {version}: {self.state.counts}"
        self.changed.notify()

    # --- called by several loops

    def set_max_age(self, max_age: int) -> None:
        """Set the staleness bound, in versions, from now on. Groups that were admitted under a higher bound keep the
        higher bound."""
        self.state.set_max_age(max_age)
        self.changed.notify()

    def resume_max_age(self, max_age: int | None) -> None:
        """Set the staleness bound after a restart to ``max_age``, the value that the tuning had reached before;
        ``None`` keeps the initial bound. Tokens from before the restart may reach the greatest age that the settings
        allow."""
        recorded = [group.oldest_version for group in self.state.groups.values() if group.oldest_version is not None]
        limit = self.config.largest_age
        if max_age is not None:
            self.state.set_max_age(min(max_age, limit))
        self.state.extend_bound(max(recorded, default=-1) + 1, limit)

    def set_capacity(self, capacity: int) -> None:
        """Set the greatest number of groups that may be generated or scored at once from now on."""
        self.state.limits = replace(self.state.limits, capacity=capacity)
        self.changed.notify()

    @property
    def finished(self) -> bool:
        """Return whether the last step of the run has taken its batch."""
        return self.state.next_step >= self._last_step

    @property
    def may_admit(self) -> bool:
        """Return whether the run may still admit groups: some of its steps have no batch yet, or it replays another
        run, whose record decides which groups are admitted."""
        return not self.finished or self._policy.recorded

    @property
    def used_up(self) -> bool:
        """Return whether the dataset has no rows left and every group that holds a slot is ready. If these groups do
        not form a batch now, there will be no further batch."""
        waiting = self.state.counts[GroupState.SUBMITTED]
        return self._out_of_rows and not waiting and self.state.num_held == self.state.counts[GroupState.READY]

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until the ledger has recorded all changes so far; if ``durable``, until the record would survive a power
        failure."""
        await self._writer.flush(durable=durable)

    def restore(self, step: int, resumed: ResumeState) -> str:
        """Restore the state at the checkpoint of ``step``. ``resumed`` contains the groups and counts from the ledger.
        Call this once, before any group is admitted. A ready group for which the store has no room stays in memory
        until it is trained; return the reason in words, empty if all of them are stored."""
        self.state.version = self.state.next_step = step
        self.state.num_submitted = resumed.num_submitted
        self.state.counts[GroupState.RELEASED] = resumed.num_released
        for reason, count in resumed.dropped.items():
            self.state.dropped[reason] += count
            self.state.counts[GroupState.DROPPED] += count
        if self._ready is not None:
            self._ready.clear()
        if self.columns is not None:
            self.columns.record_resumed_groups(resumed.groups)
        why = ""
        for group in resumed.groups:
            episodes = ScoredGroup(number=group.number, episodes=group.episodes)
            newest = None
            if group.state is GroupState.READY:
                _, newest = episodes.versions() or (None, None)
                oldest: int | None = group.oldest_version
                try:
                    self._buffer[group.number] = episodes if self._ready is None else self._ready.put(episodes)
                except StoreError as error:
                    self._buffer[group.number], why = episodes, f"{error.problem}; {error.remedy}"
            else:
                oldest = group.kept_version()  # tokens from before the crash keep their age
                self._resumed[group.number] = group
            entry = GroupEntry(state=group.state, oldest_version=oldest, newest_version=newest, step=group.step)
            self.state.restore(group.number, entry)
        assert self.state.conserved(), f"the ledger does not add up: {self.state.counts}, {resumed.dropped}"
        return why

    def close(self) -> None:
        """Remove the files of ready groups, at the end of a life of the run. The next life restores these groups from
        the ledger."""
        if self._ready is not None:
            self._ready.clear()

    def _open_groups(self) -> list[int]:
        """Return the numbers of the groups with episodes that have not ended."""
        return [number for number, entry in self.state.groups.items() if entry.state in _OPEN]

    def _move(
        self,
        numbers: Sequence[int],
        state: GroupState,
        *,
        versions: tuple[int, int] | None = None,
        step: int | None = None,
        reason: str = "",
    ) -> None:
        """Move the groups ``numbers`` to ``state``, record that in the ledger, and wake waiting loops. ``versions`` are
        the oldest and the newest version of their tokens, for ADMITTED and READY; ``step`` is the step that takes them,
        for TAKEN; ``reason`` is why they are dropped, for DROPPED."""
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
        self.changed.notify()


class Signal:
    """A signal between asyncio tasks: :meth:`notify` wakes every task that waits at that moment. A notification that no
    task waits for has no effect, so a task must check the state first and then wait, without an ``await`` in
    between."""

    def __init__(self) -> None:
        """Create a signal for which no task waits."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait until the next :meth:`notify`."""
        await self._event.wait()
