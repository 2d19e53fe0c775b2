"""The assembly of the batch of a step in a rank of the learner, from an outline and from the columns to which the
outline refers. These columns are in the store of the run (tokens of large groups, kept-sets, experts); every rank reads
them itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from headrace.base.errors import ComponentDied, RunError, StoreError
from headrace.base.store import (
    COLUMNS_LOST,
    LEARNED,
    ColumnStore,
    StoreReader,
    lies_in_store,
    read_batch,
    remove_groups,
)
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline, LostGroup, groups_in_words
from headrace.base.types.scored import TokenResults
from headrace.flow.layout import LaidOutBatch, lay_out
from headrace.flow.ledger.turns import encode_token_results
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import AnyRanks, SingleRank

INLINE_RESULTS = 1 << 20
"""The largest number of tokens of a step whose results are sent in its report and recorded in the ledger itself. The
results of a larger step are written into the store."""
_REASONS = msgspec.msgpack.Decoder(dict[int, str])
"""The decoder of the message in which rank 0 sends the groups without loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch whose columns are all in memory."""

    batch: Batch
    """The batch."""
    laid_out: LaidOutBatch | None = None
    """The layout of this batch, from before its kept-sets and experts were read; ``None`` if the batch was not laid out
    from an outline."""
    lost_tokens: int = 0
    """The number of tokens that carry no loss because columns of their groups could not be read."""
    lost: tuple[LostGroup, ...] = ()
    """The groups of these tokens. Without a layout, their numbers are those that they have in the batch."""

    def complete_report(self, report: StepReport) -> StepReport:
        """Return a copy of ``report``, the report of the step on this batch, for the controller. The copy also contains
        the results of the layout, and the groups that carried no loss because columns could not be read."""
        if self.laid_out is not None:
            report = self.laid_out.complete_report(report)
        if not self.lost:
            return report
        dropped = {**report.dropped_tokens, COLUMNS_LOST: self.lost_tokens}
        groups = groups_in_words([each.number for each in self.lost])
        problem = f"columns of {groups} could not be read, so that their tokens carried no loss: {self.lost[0].why}"
        problems = (*report.problems, problem)
        return msgspec.structs.replace(report, dropped_tokens=dropped, problems=problems, lost=self.lost)


class ResultsStore:
    """The store of the run as rank 0 uses it for the results of large steps. A report then contains only a reference to
    its results."""

    def __init__(self, start: StoreStart | None) -> None:
        """Use the store that ``start`` describes; ``None``: there is no store, and every report contains its
        results."""
        self._start = start
        self._store: ColumnStore | None = None
        """The opened store; ``None`` before the first results are written."""

    def store(self, report: StepReport) -> StepReport:
        """Write the results for tokens in ``report`` into the store, and return a copy of the report with a reference
        in their place. Return the report unchanged if the results are few or there is no store. If the results cannot
        be written, return a copy without them that names the problem."""
        learned = report.learned
        if self._start is None or not isinstance(learned, TokenResults) or len(learned.log_pi_L) <= INLINE_RESULTS:
            return report
        data = np.frombuffer(encode_token_results(learned), np.uint8)
        try:
            if self._store is None:
                self._store = ColumnStore(Path(self._start.directory), LEARNED)
            return msgspec.structs.replace(report, learned=self._store.put(data))
        except StoreError as error:
            problem = f"the log-probabilities of its tokens were not recorded: {error.problem}"
            return msgspec.structs.replace(report, learned=None, problems=(*report.problems, problem))


def read_outline(outline: BatchOutline, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return the batch of ``outline`` with all columns in memory; columns in the store that ``start`` describes are
    read. All ranks, which ``ranks`` connects, must call this with the same outline. If rank 0 cannot read the tokens of
    a group, every rank omits this group. If rank 0 cannot read another column of a group, the tokens of this group
    carry no loss, on every rank. If no token remains that carries loss, every rank omits all groups, and the batch has
    no samples.

    Raises :class:`~headrace.base.errors.StoreError` if the tokens of no group can be read,
    :class:`~headrace.base.errors.ComponentDied` on a rank that cannot read a column that rank 0 could read, and
    :class:`~headrace.base.errors.RunError` if tokens are in a store and this learner has none.
    """
    bundles = {group.number: group.columns for group in outline.groups if isinstance(group.columns, memoryview)}
    left_out: Mapping[int, str] = {}
    if len(bundles) < len(outline.groups):
        stored, failures = _read_bundles(outline, Path(_require_store(start, outline.step).directory))
        bundles |= stored
        left_out = _agree(failures, ranks)
    if left_out and len(left_out) == len(outline.groups):
        raise StoreError(
            f"no tokens of step {outline.step} could be read: {next(iter(left_out.values()))}",
            remedy="keep the folder 'columns' of the run's directory whole while the run goes on, then --resume",
        )
    whole = lay_out(outline, lambda group: None if group.number in left_out else bundles[group.number])
    loaded = read(whole.batch, start, ranks)
    lost = [LostGroup(number=number, left_out=True, why=why) for number, why in left_out.items()]
    lost += [msgspec.structs.replace(each, number=whole.groups[each.number]) for each in loaded.lost]
    num_left_out = sum(group.num_loss_tokens for group in outline.groups if group.number in left_out)
    complete = ReadBatch(
        batch=loaded.batch, laid_out=whole, lost_tokens=loaded.lost_tokens + num_left_out, lost=tuple(lost)
    )
    return _without_samples(outline, complete) if lost and not loaded.batch.num_loss_tokens else complete


def _without_samples(outline: BatchOutline, loaded: ReadBatch) -> ReadBatch:
    """Return ``loaded``, the batch of ``outline`` in which no token carries loss, because columns of groups could not
    be read, without its samples. The learner counts such a batch as a step, and a replay of the step has the same
    batch, because every group is recorded as omitted (``left_out``)."""
    assert loaded.laid_out is not None, "it was laid out from an outline"
    why = loaded.lost[0].why
    remaining = {group.number for group in outline.groups} - {each.number for each in loaded.lost}
    # the tokens of the remaining groups carry no loss by another rule: they are too old, for example
    lost = [msgspec.structs.replace(each, left_out=True) for each in loaded.lost]
    lost += [LostGroup(number=number, left_out=True, why=why) for number in sorted(remaining)]
    laid_out = replace(lay_out(outline, lambda _: None), masked=loaded.laid_out.masked)
    return replace(loaded, batch=laid_out.batch, laid_out=laid_out, lost=tuple(lost))


def _read_bundles(outline: BatchOutline, directory: Path) -> tuple[dict[int, memoryview], dict[int, str]]:
    """Return the bundles of ``outline`` that are in the store ``directory``, by the number of the group, and the groups
    whose bundles cannot be read, with the reason of each."""
    reader = StoreReader(directory)
    bundles: dict[int, memoryview] = {}
    failures: dict[int, str] = {}
    for group in outline.groups:
        if isinstance(group.columns, memoryview):
            continue
        try:
            bundles[group.number] = reader.part(group.columns)
        except StoreError as error:
            failures[group.number] = error.problem
    return bundles, failures


def read(batch: Batch, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return a copy of ``batch`` with all columns in memory; columns in the store that ``start`` describes are read.
    All ranks, which ``ranks`` connects, must call this with the same batch. If rank 0 cannot read a column of a group,
    the tokens of the group carry no loss, on every rank. If ``start`` is ``None``, no column in a store can be read:
    the learner of a resumed run is on another machine than the store that an earlier life of the run has written.
    Raises :class:`~headrace.base.errors.ComponentDied` on a rank that cannot read a column that rank 0 could read."""
    if not lies_in_store(batch):
        return ReadBatch(batch=batch)
    loaded, lost = read_batch(batch, StoreReader(None if start is None else Path(start.directory)))
    reasons = _agree({group: error.problem for group, error in lost.items()}, ranks)
    if not reasons:
        return ReadBatch(batch=loaded)
    loaded, lost_tokens = remove_groups(loaded, reasons)
    return ReadBatch(
        batch=loaded,
        lost_tokens=lost_tokens,
        lost=tuple([LostGroup(number=number, left_out=False, why=why) for number, why in reasons.items()]),
    )


def _require_store(start: StoreStart | None, step: int) -> StoreStart:
    """Return ``start``, which describes the store of the run. Raises :class:`~headrace.base.errors.RunError` if this
    learner has no store; ``step`` is the step that needs it."""
    if start is None:
        raise RunError(
            f"the batch of step {step} refers to columns in a store, and this learner has none",
            remedy="resume the run; controller and learner must have the same version of headrace",
        )
    return start


def _agree(reasons: Mapping[int, str], ranks: AnyRanks) -> Mapping[int, str]:
    """Return the groups that carry no loss, with the reason of each, as rank 0 has found them and sent through
    ``ranks``. ``reasons`` contains the groups that this rank cannot read. Raises
    :class:`~headrace.base.errors.ComponentDied` if rank 0 could read one of these groups."""
    if isinstance(ranks, SingleRank):
        return reasons
    data = ranks.broadcast(msgspec.msgpack.encode(reasons) if ranks.is_leader else None)
    lost_groups: dict[int, str] = _REASONS.decode(data)
    unreadable = [why for group, why in reasons.items() if group not in lost_groups]
    if unreadable:
        raise ComponentDied(
            f"a rank cannot read what rank 0 has read: {unreadable[0]}", remedy="run all ranks on one machine"
        )  # fmt: skip
    return lost_groups
