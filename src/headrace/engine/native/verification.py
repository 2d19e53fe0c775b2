"""The draws of a pass, in which a sequence may have several tokens: its newest one, and drafted ones behind it.

    tokens of the pass:   newest    draft 1   draft 2   draft 3
    drawn after each:     draw 0    draw 1    draw 2    draw 3      each with the random number of its own position
    kept:                 draw 0 = draft 1, draw 1 = draft 2, draw 2 ≠ draft 3: the new tokens are draws 0, 1 and 2

A draw depends on its logits, the request's seed and its position. A draw is kept if all before it were as drafted, so
that its logits are those of the sequence's own tokens: it is the token that the sequence would have got without drafts.
What was computed beyond the last kept draw is overwritten by the next pass. Rows whose logits change with every token
(penalties, structures) draw one position after the other. A drafted token whose numbers are not finite could spoil the
positions before it, whose kernels multiply its values by 0: its row gets nothing from the pass, and no draft any more.

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
from headrace.engine.native.stops import StopsFollower

_NO_DRAFT = -1
"""Stands for the draft at a row's last position in the pass, behind which nothing was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The rows that sampled tokens in a pass: those whose context is complete, but for rows that a draft has spoilt."""

    rows_D: Index
    sound_D: Flags
    """Whether the logits of each row's newest token defined a distribution (no NaN, no +∞, not only −∞)."""
    completed_D: Flags
    """Whether the newest token of each row completed one of its stop strings."""
    num_tokens: int
    """The number of tokens that were sampled."""
    spoilt: tuple[Index, Index]
    """The rows and positions of drafted tokens whose keys and values may hold NaN."""


class TokenDrawer:
    """Draws the tokens of passes with the parameters in ``controls``, and records them in ``rows``. ``stops`` are the
    stop strings, if the engine can decode tokens; ``speculation`` drafts tokens, if there are drafts."""

    def __init__(
        self, rows: Rows, controls: Controls, stops: StopsFollower | None, speculation: Speculation | None
    ) -> None:
        self._rows, self._controls, self._stops = rows, controls, stops
        self._speculation = speculation

    def draw(self, logits_PV: Tensor, rows_D: Index, drafts_D: Index | None, stamp: int | Index) -> Drawn:
        """Sample the next tokens of ``rows_D`` from the logits of their last positions in the pass, one more than each
        has ``drafts_D`` (``None``: no row has any), and record them with their logprobs, their version ``stamp`` (one
        for all rows, or one for each), and all that requests want recorded."""
        none = np.zeros(0, np.int64)
        if not len(rows_D):
            unset = np.zeros(0, bool)
            return Drawn(rows_D=rows_D, sound_D=unset, completed_D=unset, num_tokens=0, spoilt=(none, none))
        if drafts_D is None:
            draw = self._controls.draw(logits_PV, self._rows.length_R[rows_D], rows_D)
            self._controls.append(draw.ids_R, rows_D)
            ids_D, logprobs_D, sound_D = _fetched(draw)
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
            ids_A, logprobs_A, sound_A = _fetched(draw)
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
        drawn = verified.drawn()
        if self._speculation is not None:
            self._speculation.note(*verified.tested())
            self._speculation.bar(drawn.spoilt[0])
        return drawn

    def _record(
        self, draw: Draw, columns: tuple[Index, Index, FloatColumn], stamp: int | Index, offsets_A: Index | int
    ) -> None:
        """Append the tokens of ``draw`` to their rows. ``columns`` are the rows, ids and logprobs."""
        rows_A, ids_A, logprobs_A = columns
        entropies_A = None if draw.entropies_R is None else draw.entropies_R.cpu().numpy()
        self._rows.record(rows_A, ids_A, logprobs_A, stamp, entropies_A, offsets_D=offsets_A)
        self._rows.record_kept(rows_A, draw.kept)
        self._rows.record_top(rows_A, draw.top)

    def _completed(self, rows_A: Index, ids_A: Index, kept: Index) -> Flags:
        """Return which of the tokens ``ids_A`` complete a stop string of their row. Only those at the places ``kept``
        are looked at, and of each row none after the first that does."""
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
    """What is known of a pass with drafts while its tokens are drawn. ``in_order_D`` says which of ``rows_D`` draw one
    position after the other."""

    def __init__(self, rows: Rows, rows_D: Index, drafts_D: Index, in_order_D: Flags) -> None:
        counts_D = drafts_D + 1
        self._rows, self._rows_D, self._starts_D = rows, rows_D, np.cumsum(counts_D) - counts_D
        self._of_P = np.repeat(np.arange(len(rows_D)), counts_D)
        self.rows_P = rows_D[self._of_P]
        self._offsets_P = np.arange(len(self._of_P)) - self._starts_D[self._of_P]
        self.positions_P = rows.length_R[self.rows_P] + self._offsets_P
        """The position in its sequence of the token that is drawn."""
        drafted_P = self._offsets_P < drafts_D[self._of_P]
        self._draft_P = np.full(len(self._of_P), _NO_DRAFT, np.int64)
        self._draft_P[drafted_P] = rows.ids_RC[self.rows_P[drafted_P], self.positions_P[drafted_P]]
        self._in_order_P = in_order_D[self._of_P]
        self._spoilt_D = np.zeros(len(rows_D), bool)
        self._kept_P, self._as_drafted_P, self._goes_on_P, self._sound_P, self._completed_P = (
            np.zeros(len(self._of_P), bool) for _ in range(5)
        )

    def exclude_spoilt(self, logits_PV: Tensor) -> None:
        """Exclude the rows with a draft in which any position has logits that define no distribution."""
        unsound = np.flatnonzero(~logits_PV.amax(dim=-1).isfinite().cpu().numpy())
        self._spoilt_D[self._of_P[unsound]] = True
        self._spoilt_D &= np.bincount(self._of_P) > 1

    def first(self) -> Index:
        """Return the positions that are drawn first: all, but of a row that draws in order only one."""
        return np.flatnonzero((~self._in_order_P | (self._offsets_P == 0)) & ~self._spoilt_D[self._of_P])

    def take(self, at: Index, ids_A: Index, sound_A: Flags) -> Index:
        """Take in the draws at the positions ``at``, and return the places among them that are kept: of each row, up to
        the first draw that is not as drafted, not sound, or one of its stop ids."""
        self._sound_P[at] = sound_A
        self._as_drafted_P[at] = ids_A == self._draft_P[at]
        self._goes_on_P[at] = goes_on_A = (
            self._as_drafted_P[at] & sound_A & ~self._rows.are_stops(self.rows_P[at], ids_A)
        )
        begins_A = self._in_order_P[at] | (self._offsets_P[at] == 0)
        ends_A = (~goes_on_A).astype(np.int64)
        ended_A: Index = np.cumsum(ends_A) - ends_A  # how many draws before each end their row's
        kept = np.flatnonzero(ended_A == ended_A[begins_A][np.cumsum(begins_A) - 1])
        self._kept_P[at[kept]] = True
        return kept

    def stop(self, at: Index, kept: Index, completed_A: Flags) -> Index:
        """Take in which draws complete a stop string, and return the places of ``kept`` without those that follow
        them in the same row."""
        if not completed_A.any():
            return kept
        self._completed_P[at] = completed_A
        last_D = np.full(len(self._rows_D), len(self._of_P))
        last_D[self._of_P[at[completed_A]]] = self._offsets_P[at[completed_A]]
        stays = self._offsets_P[at[kept]] <= last_D[self._of_P[at[kept]]]
        self._kept_P[at[kept[~stays]]] = False
        return kept[stays]

    def offsets(self, places: Index) -> Index:
        """Return the number of tokens of the same row that are recorded with each of these positions, and before
        it."""
        return np.where(self._in_order_P[places], 0, self._offsets_P[places])

    def next(self, at: Index) -> Index:
        """Return the positions to be drawn after those of ``at``: in rows that draw in order, the next one while the
        draws are as drafted."""
        more_A = self._in_order_P[at] & self._goes_on_P[at] & ~self._completed_P[at]
        return at[more_A] + 1

    def tested(self) -> tuple[Index, Index, Flags]:
        """Return of each drafted token that a draw was compared with: its row, its number in the draft, and whether it
        was drawn."""
        places = np.flatnonzero(self._kept_P & (self._draft_P != _NO_DRAFT))
        return self.rows_P[places], self._offsets_P[places], self._as_drafted_P[places]

    def drawn(self) -> Drawn:
        """Return the outcome for each row, after all draws."""
        num_D = np.bincount(self._of_P[self._kept_P], minlength=len(self._rows_D))
        last_D = (self._starts_D + num_D - 1)[~self._spoilt_D]
        spoilt = np.flatnonzero(self._spoilt_D[self._of_P] & (self._offsets_P > 0))
        return Drawn(
            rows_D=self._rows_D[~self._spoilt_D],
            sound_D=self._sound_P[last_D],
            completed_D=self._completed_P[last_D],
            num_tokens=int(num_D.sum()),
            spoilt=(self.rows_P[spoilt], self.positions_P[spoilt] - 1),
        )


def _fetched(draw: Draw) -> tuple[Index, FloatColumn, npt.NDArray[np.bool_]]:
    """Return the ids, the logprobs and whether the logits were sound (finite) of each row, as arrays in host memory.
    From a GPU they come as one transfer, since each transfer waits for the GPU; float64 holds all three exactly."""
    if draw.ids_R.device.type == "cpu":
        return draw.ids_R.numpy(), draw.logprobs_R.numpy(), draw.sound_R.numpy()
    columns = (draw.ids_R, draw.logprobs_R, draw.sound_R)
    ids_R, logprobs_R, sound_R = torch.stack([column.double() for column in columns]).cpu().numpy()
    return ids_R.astype(np.int64), logprobs_R.astype(np.float32), sound_R.astype(np.bool_)
