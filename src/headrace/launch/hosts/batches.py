"""The assembly of the batch of a step in a rank of the learner, from an outline and from the columns to which the
outline refers. These columns are in the store of the run (tokens of large groups, kept-sets, experts); every rank reads
them itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    without_groups,
)
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline, GroupOutline
from headrace.base.types.scored import TokenResults
from headrace.flow.layout import LaidOutBatch, lay_out
from headrace.flow.ledger.turns import encode_token_results
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import AnyRanks, SingleRank

INLINE_RESULTS = 1 << 20
"""The greatest number of tokens of a step whose results are sent in its report and recorded in the ledger itself. The
results of a larger step are written into the store."""
_REASONS = msgspec.msgpack.Decoder(dict[int, str])
"""The decoder of the message in which rank 0 sends the groups without loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch whose columns are all in memory."""

    batch: Batch
    laid_out: LaidOutBatch | None = None
    """The layout of this batch, from before its kept-sets and experts were read; ``None`` if the batch was not laid out
    from an outline."""
    lost_tokens: int = 0
    """The number of tokens that carry no loss because columns of their groups could not be read."""
    why: str = ""
    """The reason for the first of these groups; empty if there are none."""

    def complete_report(self, report: StepReport) -> StepReport:
        """Return a copy of ``report``, the report of the step on this batch, for the controller. The copy also contains
        the results of the layout, and the tokens that carried no loss because columns could not be read."""
        if self.laid_out is not None:
            report = self.laid_out.complete_report(report)
        if not self.why:
            return report
        dropped = {**report.dropped_tokens, COLUMNS_LOST: self.lost_tokens}
        words = f"columns of tokens could not be read, so that the tokens of their groups carried no loss: {self.why}"
        return msgspec.structs.replace(report, dropped_tokens=dropped, problems=(*report.problems, words))


class ResultsStore:
    """The store of the run as rank 0 uses it for the results of large steps. A report then contains only a reference to
    its results."""

    def __init__(self, start: StoreStart | None) -> None:
        """Use the store that ``start`` describes; ``None``: there is no store, and every report contains its
        results."""
        self._start = start
        self._store: ColumnStore | None = None

    def stored(self, report: StepReport) -> StepReport:
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
            words = f"the log-probabilities of its tokens were not recorded: {error.problem}"
            return msgspec.structs.replace(report, learned=None, problems=(*report.problems, words))


def read_outline(outline: BatchOutline, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return the batch of ``outline`` with all columns in memory; columns in the store that ``start`` describes are
    read. All ranks must call this with the same outline. If rank 0 cannot read the tokens of a group, every rank leaves
    out this group. If rank 0 cannot read another column of a group, the tokens of this group carry no loss, on every
    rank.

    Raises :class:`~headrace.base.errors.StoreError` if the tokens of no group can be read,
    :class:`~headrace.base.errors.ComponentDied` on a rank that cannot read a column that rank 0 could read, and
    :class:`~headrace.base.errors.RunError` if a column is in a store and this learner has none.
    """
    stored = [group for group in outline.groups if not isinstance(group.columns, bytes)]
    if not stored:
        return _read_rest(lay_out(outline, _inline), start, ranks)
    reader = StoreReader(Path(_required(start, outline.step).directory))
    bundles: dict[int, bytes | memoryview] = {}
    failures: dict[int, str] = {}
    for group in outline.groups:
        try:
            bundles[group.number] = group.columns if isinstance(group.columns, bytes) else reader.part(group.columns)
        except StoreError as error:
            failures[group.number] = error.problem
    lost = _agreed(failures, ranks)
    if len(lost) == len(outline.groups):
        raise StoreError(
            f"no tokens of step {outline.step} could be read: {next(iter(lost.values()))}",
            remedy="keep the folder 'columns' of the run's directory whole while the run goes on, then --resume",
        )
    whole = lay_out(outline, lambda group: None if group.number in lost else bundles[group.number])
    found = _read_rest(whole, start, ranks)
    if not lost:
        return found
    lost_tokens = found.lost_tokens + sum(group.num_loss_tokens for group in stored if group.number in lost)
    return ReadBatch(
        batch=found.batch, laid_out=whole, lost_tokens=lost_tokens, why=next(iter(lost.values()))
    )  # fmt: skip


def _read_rest(whole: LaidOutBatch, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return the batch ``whole``, which was laid out from an outline, with its kept-sets and experts in memory."""
    found = read(whole.batch, start, ranks)
    return ReadBatch(batch=found.batch, laid_out=whole, lost_tokens=found.lost_tokens, why=found.why)


def read(batch: Batch, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return a copy of ``batch`` with all columns in memory; columns in the store that ``start`` describes are read.
    All ranks must call this with the same batch. If rank 0 cannot read a column of a group, the tokens of the group
    carry no loss, on every rank. Raises the errors of :func:`read_outline`."""
    if not lies_in_store(batch):
        return ReadBatch(batch=batch)
    loaded, lost = read_batch(batch, StoreReader(Path(_required(start, batch.step).directory)))
    reasons = _agreed({group: error.problem for group, error in lost.items()}, ranks)
    if not reasons:
        return ReadBatch(batch=loaded)
    loaded, lost_tokens = without_groups(loaded, reasons)
    return ReadBatch(batch=loaded, lost_tokens=lost_tokens, why=next(iter(reasons.values())))


def _inline(group: GroupOutline) -> bytes:
    """Return the bundle of ``group``, which arrived with the outline."""
    assert isinstance(group.columns, bytes)
    return group.columns


def _required(start: StoreStart | None, step: int) -> StoreStart:
    """Return ``start``, which describes the store of the run. Raises :class:`~headrace.base.errors.RunError` if this
    learner has no store; ``step`` is the step that needs it."""
    if start is None:
        raise RunError(
            f"the batch of step {step} refers to columns in a store, and this learner has none",
            remedy="resume the run; controller and learner must have the same version of headrace",
        )
    return start


def _agreed(reasons: Mapping[int, str], ranks: AnyRanks) -> Mapping[int, str]:
    """Return the groups that carry no loss, with the reason of each, as rank 0 has found them. ``reasons`` contains the
    groups that this rank cannot read. Raises :class:`~headrace.base.errors.ComponentDied` if rank 0 could read one of
    these groups."""
    if isinstance(ranks, SingleRank):
        return reasons
    leaders = ranks.broadcast(msgspec.msgpack.encode(reasons) if ranks.is_leader else None)
    lost_groups: dict[int, str] = _REASONS.decode(leaders)
    unreadable = [why for group, why in reasons.items() if group not in lost_groups]
    if unreadable:
        raise ComponentDied(
            f"a rank cannot read what rank 0 has read: {unreadable[0]}", remedy="run all ranks on one machine"
        )  # fmt: skip
    return lost_groups
