"""The drawing of tokens after a pass, in which a sequence may have several tokens: its newest token, and drafted tokens
after it.

    tokens of the pass:   newest    draft 1   draft 2   draft 3
    drawn after each:     draw 0    draw 1    draw 2    draw 3      each with the random number of its own position
    kept:                 draw 0 = draft 1, draw 1 = draft 2, draw 2 ≠ draft 3: the new tokens are draws 0, 1 and 2

A draw depends on its logits, the request's seed and its position. A draw is *kept* if all draws of the row before it
equal the drafted tokens. Its logits were then computed from the sequence's own tokens, so it is the token that the
sequence would have got without drafts. Keys and values computed after the last kept draw are overwritten by the next
pass. Rows whose logits change with every token (penalties, structures) are drawn *in order*, one position after the
other. A drafted token whose values are not finite could *spoil* the positions before it, because attention kernels
multiply masked values by 0. A spoilt row gets no token from the pass, and no further drafts.

Shape legend: P positions with logits, D rows that draw, A positions that are drawn together, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.types.columns import FloatColumn
from headrace.engine.native.controls import Controls
from headrace.engine.native.rows import Flags, Index, Rows
from headrace.engine.native.sampler import Draw
from headrace.engine.native.speculation import Speculation
from headrace.engine.native.stops import Stops

_NO_DRAFT = -1
"""Marks a row's last position in the pass, after which no token was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The outcome of a pass for the rows that sampled tokens: all rows whose context is complete, except spoilt
    rows."""

    rows_D: Index
    sound_D: Flags
    """Whether the logits of each row's newest token define a distribution (no NaN, no +∞, not only −∞)."""
    completed_D: Flags
    """Whether the newest token of each row completed one of its stop strings."""
    num_tokens: int
    """The number of tokens that were sampled."""
    spoilt: tuple[Index, Index]
    """The rows and the positions of drafted tokens whose keys and values may be NaN."""


class TokenDrawer:
    """The part of the engine that draws tokens after a pass with the sampling parameters in ``controls``, and records
    them in ``rows``. ``stops`` searches stop strings; ``None`` if the engine cannot decode tokens. ``speculation``
    drafts tokens; ``None`` if speculation is off."""

    def __init__(self, rows: Rows, controls: Controls, stops: Stops | None, speculation: Speculation | None) -> None:
        """Connect the parts by which tokens are drawn and recorded. The arguments are described at the class."""
        self._rows, self._controls, self._stops = rows, controls, stops
        self._speculation = speculation

    def draw(self, logits_PV: Tensor, rows_D: Index, drafts_D: Index | None, stamp: int | Index) -> Drawn:
        """Sample the next tokens of ``rows_D``, and record them with their logprobs, their version ``stamp`` (one
        number for all rows, or one for each) and the optional records of their requests. ``drafts_D`` is the number of
        drafted tokens of each row (``None``: no row has any); ``logits_PV`` are the logits of the last ``drafts_D + 1``
        positions of each row."""
        none = np.zeros(0, np.int64)
        if not len(rows_D):
            unset = np.zeros(0, bool)
            return Drawn(rows_D=rows_D, sound_D=unset, completed_D=unset, num_tokens=0, spoilt=(none, none))
        if drafts_D is None:
            draw = self._controls.draw(logits_PV, self._rows.length_R[rows_D], rows_D)
            self._controls.append(draw.ids_R, rows_D)
            ids_D, logprobs_D, sound_D = _to_host(draw)
            self._record(draw, (rows_D, ids_D, logprobs_D), stamp, 0)
            completed_D = self._completed(rows_D, ids_D, np.arange(len(rows_D)))
            return Drawn(
                rows_D=rows_D, sound_D=sound_D, completed_D=completed_D, num_tokens=len(rows_D), spoilt=(none, none)
            )
        verified = _Verification(self._rows, rows_D, drafts_D, self._controls.depends_on_answer(rows_D))
        verified.exclude_spoilt(logits_PV)
        stamp_P = stamp if isinstance(stamp, int) else np.repeat(stamp, drafts_D + 1)
        at = verified.first()
        while len(at):
            logits_AV = logits_PV if len(at) == len(logits_PV) else logits_PV[torch.from_numpy(at).to(logits_PV.device)]
            rows_A = verified.rows_P[at]
            draw = self._controls.draw(logits_AV, verified.positions_P[at], rows_A)
            self._controls.append(draw.ids_R, rows_A)
            ids_A, logprobs_A, sound_A = _to_host(draw)
            kept = verified.take(at, ids_A, sound_A)
            completed = self._completed(rows_A, ids_A, kept)
            kept = verified.stop(at, kept, completed)
            self._record(
                draw if len(kept) == len(at) else draw.take(kept),
                (rows_A[kept], ids_A[kept], logprobs_A[kept]),
                stamp_P if isinstance(stamp_P, int) else stamp_P[at[kept]],
                verified.offsets(at[kept]),
            )
            at = verified.next(at)
        drawn = verified.result()
        if self._speculation is not None:
            self._speculation.note(*verified.tested_drafts())
            self._speculation.bar(drawn.spoilt[0])
        return drawn

    def _record(
        self, draw: Draw, columns: tuple[Index, Index, FloatColumn], stamp: int | Index, offsets_A: Index | int
    ) -> None:
        """Append the tokens of ``draw`` to their rows. ``columns`` are the rows, ids and logprobs; ``stamp`` is the
        version, and ``offsets_A`` is as in :meth:`Rows.record`."""
        rows_A, ids_A, logprobs_A = columns
        entropies_A = None if draw.entropies_R is None else draw.entropies_R.cpu().numpy()
        self._rows.record(rows_A, ids_A, logprobs_A, stamp, entropies_A, offsets_D=offsets_A)
        self._rows.record_kept(rows_A, draw.kept)
        self._rows.record_top(rows_A, draw.top)

    def _completed(self, rows_A: Index, ids_A: Index, kept: Index) -> Flags:
        """Return for each token of ``ids_A`` whether it completes a stop string of its row. Only the tokens at the
        indices ``kept`` are checked, and in each row no token after the first that completes one."""
        completed_A = np.zeros(len(rows_A), bool)
        if self._stops is None:
            return completed_A
        ended = set[int]()
        for place in kept[self._rows.has_stop_strings_R[rows_A[kept]]].tolist():
            row = int(rows_A[place])
            if row not in ended and self._stops.push(row, int(ids_A[place])):
                completed_A[place] = True
                ended.add(row)
        return completed_A


class _Verification:
    """The state of a pass with drafts while its tokens are drawn. ``in_order_D`` marks the rows of ``rows_D`` that are
    drawn in order, one position after the other. An index ending in ``_P`` has one entry for each position of the pass
    with logits."""

    def __init__(self, rows: Rows, rows_D: Index, drafts_D: Index, in_order_D: Flags) -> None:
        """Number the positions with logits of ``rows_D``: each row has ``drafts_D + 1`` of them, in order."""
        counts_D = drafts_D + 1
        self._rows, self._rows_D, self._starts_D = rows, rows_D, np.cumsum(counts_D) - counts_D
        """The rows of the batch; those of the pass that draw tokens, and the index P of the first position of each."""
        self._row_index_P = np.repeat(np.arange(len(rows_D)), counts_D)
        """The index into ``rows_D`` of the row of each position."""
        self.rows_P = rows_D[self._row_index_P]
        self._offsets_P = np.arange(len(self._row_index_P)) - self._starts_D[self._row_index_P]
        """The number of each position among those of its row, from 0."""
        self.positions_P = rows.length_R[self.rows_P] + self._offsets_P
        """The position in its sequence of each token to draw."""
        drafted_P = self._offsets_P < drafts_D[self._row_index_P]
        self._draft_P = np.full(len(self._row_index_P), _NO_DRAFT, np.int64)
        """The drafted token at each position; ``_NO_DRAFT`` at the last position of each row."""
        self._draft_P[drafted_P] = rows.ids_RC[self.rows_P[drafted_P], self.positions_P[drafted_P]]
        self._in_order_P = in_order_D[self._row_index_P]
        """Whether the position belongs to a row that is drawn in order."""
        self._spoilt_D = np.zeros(len(rows_D), bool)
        """Whether each row has drafts and a position whose logits define no distribution."""
        self._kept_P, self._as_drafted_P, self._continues_P, self._sound_P, self._completed_P = (
            np.zeros(len(self._row_index_P), bool) for _ in range(5)
        )
        """For each position: whether its draw is kept, is the drafted token, lets the next position of the row be used,
        has logits that define a distribution, and completes a stop string."""

    def exclude_spoilt(self, logits_PV: Tensor) -> None:
        """Mark as spoilt the rows that have drafts and any position whose logits define no distribution."""
        unsound = np.flatnonzero(~logits_PV.amax(dim=-1).isfinite().cpu().numpy())
        self._spoilt_D[self._row_index_P[unsound]] = True
        self._spoilt_D &= np.bincount(self._row_index_P) > 1

    def first(self) -> Index:
        """Return the indices P of the positions that are drawn first: all positions of a row, but only the first
        position of a row that is drawn in order."""
        return np.flatnonzero((~self._in_order_P | (self._offsets_P == 0)) & ~self._spoilt_D[self._row_index_P])

    def take(self, places: Index, ids_A: Index, sound_A: Flags) -> Index:
        """Record the draws at the positions ``places``: the tokens ``ids_A``, and whether their logits define a
        distribution (``sound_A``). Return the indices into ``places`` of the draws that are kept: in each row, the
        draws up to and including the first one that differs from its draft, is not sound, or is one of the row's stop
        ids."""
        self._sound_P[places] = sound_A
        self._as_drafted_P[places] = ids_A == self._draft_P[places]
        self._continues_P[places] = continues_A = (
            self._as_drafted_P[places] & sound_A & ~self._rows.are_stops(self.rows_P[places], ids_A)
        )
        begins_A = self._in_order_P[places] | (self._offsets_P[places] == 0)
        ends_A = (~continues_A).astype(np.int64)
        ended_A: Index = np.cumsum(ends_A) - ends_A  # the number of earlier draws that end their row
        kept = np.flatnonzero(ended_A == ended_A[begins_A][np.cumsum(begins_A) - 1])
        self._kept_P[places[kept]] = True
        return kept

    def stop(self, places: Index, kept: Index, completed_A: Flags) -> Index:
        """Record which draws at the positions ``places`` complete a stop string (``completed_A``), and return the
        indices ``kept`` without the draws that follow such a draw in the same row."""
        if not completed_A.any():
            return kept
        self._completed_P[places] = completed_A
        last_D = np.full(len(self._rows_D), len(self._row_index_P))
        last_D[self._row_index_P[places[completed_A]]] = self._offsets_P[places[completed_A]]
        is_staying = self._offsets_P[places[kept]] <= last_D[self._row_index_P[places[kept]]]
        self._kept_P[places[kept[~is_staying]]] = False
        return kept[is_staying]

    def offsets(self, places: Index) -> Index:
        """Return for each of the positions ``places`` the number of earlier tokens of the same row that are recorded in
        the same call."""
        return np.where(self._in_order_P[places], 0, self._offsets_P[places])

    def next(self, places: Index) -> Index:
        """Return the positions to draw after the positions ``places``: the next position of each row that is drawn in
        order and whose draws equal its drafts so far."""
        more_A = self._in_order_P[places] & self._continues_P[places] & ~self._completed_P[places]
        return places[more_A] + 1

    def tested_drafts(self) -> tuple[Index, Index, Flags]:
        """Return three arrays for the drafted tokens that were compared with a draw: the row, the index in the draft,
        and whether the token was drawn."""
        places = np.flatnonzero(self._kept_P & (self._draft_P != _NO_DRAFT))
        return self.rows_P[places], self._offsets_P[places], self._as_drafted_P[places]

    def result(self) -> Drawn:
        """Return the outcome of the pass for each row, after all draws."""
        num_D = np.bincount(self._row_index_P[self._kept_P], minlength=len(self._rows_D))
        last_D = (self._starts_D + num_D - 1)[~self._spoilt_D]
        spoilt = np.flatnonzero(self._spoilt_D[self._row_index_P] & (self._offsets_P > 0))
        return Drawn(
            rows_D=self._rows_D[~self._spoilt_D],
            sound_D=self._sound_P[last_D],
            completed_D=self._completed_P[last_D],
            num_tokens=int(num_D.sum()),
            spoilt=(self.rows_P[spoilt], self.positions_P[spoilt] - 1),
        )


def _to_host(draw: Draw) -> tuple[Index, FloatColumn, npt.NDArray[np.bool_]]:
    """Return the ids, the logprobs and the flags ``sound_R`` of ``draw``, as arrays in host memory. From a GPU they are
    copied in one transfer, since each transfer waits for the GPU; float64 represents all three exactly."""
    if draw.ids_R.device.type == "cpu":
        return draw.ids_R.numpy(), draw.logprobs_R.numpy(), draw.sound_R.numpy()
    columns = (draw.ids_R, draw.logprobs_R, draw.sound_R)
    ids_R, logprobs_R, sound_R = torch.stack([column.double() for column in columns]).cpu().numpy()
    return ids_R.astype(np.int64), logprobs_R.astype(np.float32), sound_R.astype(np.bool_)
