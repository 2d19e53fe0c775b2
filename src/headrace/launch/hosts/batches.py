"""The assembly of a batch in a rank of the learner. A batch arrives in parts. It may contain references to columns in
the store of the run (kept-sets, experts); every rank reads these columns itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.errors import ComponentDied, RunError
from headrace.base.store import COLUMNS_LOST, StoreReader, lies_in_store, read_batch, without_groups
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.messages.learner import BatchPart
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import AnyRanks, SingleRank

_REASONS = msgspec.msgpack.Decoder(dict[int, str])
"""The decoder of the message in which rank 0 sends the groups without loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch whose columns are all in memory."""

    batch: Batch
    """The batch."""
    lost_tokens: int = 0
    """The number of tokens that carry no loss because columns of their groups could not be read."""
    why: str = ""
    """The reason for the first of these groups; empty if there are none."""

    def told(self, report: StepReport) -> StepReport:
        """Return a copy of ``report``, the report of the step on this batch, that also contains the tokens without
        loss."""
        if not self.why:
            return report
        dropped_tokens = {**report.dropped_tokens, COLUMNS_LOST: self.lost_tokens}
        problem = (
            f"kept-sets or experts could not be read, so that the tokens of their groups carried no loss: {self.why}"
        )
        return msgspec.structs.replace(report, dropped_tokens=dropped_tokens, problems=(*report.problems, problem))


def put_together(last: Batch, num_parts: int, call: int, parts: Sequence[BatchPart]) -> Batch:
    """Return the complete batch of the order ``call``. ``last`` contains its last samples, and ``parts`` are the parts
    that arrived before. Raises :class:`~headrace.base.errors.RunError` if they are not exactly the ``num_parts`` parts
    of this order."""
    own = [part.batch for part in parts if part.call == call]
    if len(own) != num_parts or len(own) != len(parts):
        raise RunError(
            f"the batch of step {last.step} should come in {num_parts} parts and a rest, but {len(own)} of "
            f"{len(parts)} parts are its own",
            remedy="resume the run; controller and learner must have the same version of headrace",
        )
    return Batch.join([*own, last])


def read(batch: Batch, start: StoreStart | None, ranks: AnyRanks) -> ReadBatch:
    """Return a copy of ``batch`` with all columns in memory; columns in the store that ``start`` describes are read.
    All ranks must call this with the same batch. If rank 0 cannot read a column of a group, the tokens of the group
    carry no loss, on every rank.

    Raises :class:`~headrace.base.errors.ComponentDied` on a rank that cannot read a column that rank 0 could read, and
    :class:`~headrace.base.errors.RunError` if there is no store.
    """
    if not lies_in_store(batch):
        return ReadBatch(batch=batch)
    if start is None:
        raise RunError(
            f"the batch of step {batch.step} refers to columns in a store, and this learner has none",
            remedy="resume the run; controller and learner must have the same version of headrace",
        )
    loaded, lost = read_batch(batch, StoreReader(Path(start.directory)))
    reasons = {group: error.problem for group, error in lost.items()}
    if not isinstance(ranks, SingleRank):
        reasons = _read_reasons(reasons, ranks.broadcast(msgspec.msgpack.encode(reasons) if ranks.is_leader else None))
    if not reasons:
        return ReadBatch(batch=loaded)
    loaded, lost_tokens = without_groups(loaded, reasons)
    return ReadBatch(batch=loaded, lost_tokens=lost_tokens, why=next(iter(reasons.values())))


def _read_reasons(reasons: dict[int, str], leaders: bytes) -> dict[int, str]:
    """Return the groups that carry no loss, with the reason of each, from ``leaders``, the message of rank 0. Raises
    :class:`~headrace.base.errors.ComponentDied` if ``reasons``, the groups that this rank cannot read, contain another
    group."""
    lost_groups: dict[int, str] = _REASONS.decode(leaders)
    unreadable = [why for group, why in reasons.items() if group not in lost_groups]
    if unreadable:
        raise ComponentDied(
            f"a rank cannot read what rank 0 has read: {unreadable[0]}", remedy="run all ranks on one machine"
        )  # fmt: skip
    return lost_groups
