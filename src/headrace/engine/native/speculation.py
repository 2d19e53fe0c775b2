"""Speculation: which tokens a pass computes in advance, because they are likely to be drawn.

    schedule ──▶ extend: look up drafts ─▶ choose their lengths ─▶ the same schedule, with more tokens of some rows
                                 ▲
    pass ──▶ verify (:mod:`.verification`): how many were drawn ─▶ note: how far chances can be trusted

Every draft has a *chance*: the probability with which its tokens were drawn where they were found, times how far such
figures have been right of late, for each way of finding drafts. A pass takes the drafts that make a token cheapest: the
cost of a pass is estimated from its numbers of rows and tokens, and the number of tokens that it gives from the
chances. Drafts that would cost more than they give are left out, so that poor ones switch speculation off. What was
learned of them fades, so that it is tried again.

Shape legend: D rows that decode, K tokens of a draft, W ways of finding a draft, E drafted tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.sampling import Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.blocks import BlockPool, blocks_for
from headrace.engine.native.history import CONTEXT, HistoryIndex, OwnText
from headrace.engine.native.history_store import END
from headrace.engine.native.rows import Index, Rows
from headrace.engine.native.scheduler import Schedule
from headrace.models.paged.base import BLOCK

Chances = npt.NDArray[np.float64]

PASS_COST = 16.0
"""The cost of a pass without tokens, in units of the cost of a further token of a row. Measured with models of 1M and
28M parameters on a processor, as the next one is: see docs/design/014-speculation.md."""
ROW_COST = 2.0
"""The cost of a row with one token, in the same unit: it reads its context, which further tokens share."""
DRAFT_COST = 8.0
"""What drafting costs a pass besides its tokens, in the same unit."""
_PRIOR_TOKENS = 8.0
"""The number of tokens for which the first estimate of a way of drafting counts."""
_FADE = 0.995
"""The factor by which what was learned of drafts counts less with each pass."""
_LONGEST_PAUSE = 15
"""The most passes for which nothing is looked up, after look-ups that gave nothing."""
_FIRST_TRUST = np.array([0.9, 0.5, 0.5, 0.3])
"""The first estimate of how far the chances can be trusted, for each way of finding a draft: those of the history, then
the sequence's own text."""


class Trust:
    """For each way of finding drafts: how many of the drafted tokens were drawn, by how many should have been drawn if
    their chances were right."""

    def __init__(self) -> None:
        self._expected_W = np.full(len(_FIRST_TRUST), _PRIOR_TOKENS)
        self._drawn_W = _PRIOR_TOKENS * _FIRST_TRUST
        self._prior_W = self._drawn_W.copy()

    @property
    def factors_W(self) -> Chances:
        """The factor for the chances that drafts of each way were found with."""
        factors: Chances = self._drawn_W / self._expected_W
        return factors

    def fade(self) -> None:
        """Let a pass go by, with which earlier ones count less and the first estimates more."""
        self._expected_W = _PRIOR_TOKENS + _FADE * (self._expected_W - _PRIOR_TOKENS)
        self._drawn_W = self._prior_W + _FADE * (self._drawn_W - self._prior_W)

    def note(self, ways_E: Index, chances_E: FloatColumn, drawn_E: npt.NDArray[np.bool_]) -> None:
        """Take in drafted tokens up to the first of each draft that was not drawn: how each was found, its chance
        there, and whether it was drawn."""
        size = len(self._drawn_W)
        self._expected_W += np.bincount(ways_E, weights=chances_E, minlength=size)
        self._drawn_W += np.bincount(ways_E, weights=drawn_E, minlength=size)


def cheapest(chances_DK: Chances, num_others: int) -> Index:
    """Return for each row how many of its drafted tokens a pass takes so that a token costs least. ``chances_DK`` are
    the chances that a draft is drawn up to each of its tokens, and ``num_others`` is the number of the pass's other
    tokens, of prompts.

    >>> cheapest(np.array([[0.9, 0.8, 0.01], [0.0, 0.0, 0.0]]), 0).tolist()
    [2, 0]
    >>> cheapest(np.full((64, 2), 0.3), 0).any()  # a full batch gains nothing from what is seldom drawn
    np.False_
    """
    num_rows, width = chances_DK.shape
    flat = chances_DK.ravel()
    likely = np.flatnonzero(flat > 0)
    order = likely[np.argsort(-flat[likely], kind="stable")]  # of equal chances the earlier token is first
    fixed = PASS_COST + ROW_COST * num_rows + num_others
    costs = fixed + DRAFT_COST + np.arange(len(order) + 1)
    costs[0] = fixed
    each = costs / (num_rows + np.concatenate([[0.0], np.cumsum(flat[order])]))
    lengths: Index = np.bincount(order[: int(each.argmin())] // width, minlength=num_rows)
    return lengths


class Speculation:
    """The drafts of the sequences in ``rows``, from the history and from their own text. ``pool`` has the blocks of the
    cache, and ``vocab_size`` is the number of token ids. The rows tell it which sequences join and leave
    (:class:`headrace.engine.native.rows.Follower`)."""

    def __init__(
        self, config: EngineConfig, rows: Rows, pool: BlockPool, vocab_size: int, *, file: Path | None = None
    ) -> None:
        """Make speculation with the settings of ``config`` and an empty history or, with ``file``, the one that is kept
        there. Raises ``OSError`` if the file cannot be made."""
        self._rows, self._pool, self._vocab_size = rows, pool, vocab_size
        self._num, self._max_step_tokens = config.draft_tokens, config.max_step_tokens
        self.history = HistoryIndex(config.history_tokens, file, vocab_size)
        self._trust = Trust()
        self._keys_R = np.zeros(config.max_sequences, np.uint64)
        self._barred_R = np.zeros(config.max_sequences, bool)
        self._ways_R = np.zeros(config.max_sequences, np.int64)
        self._chances_RK = np.zeros((config.max_sequences, self._num), np.float32)
        """How the draft of each row in the present pass was found, and the chances of its tokens there."""
        self._own = OwnText(rows)
        self._wait = self._pause = 0
        """For how many passes nothing is looked up now, and for how many it was not the last time."""
        self.num_drafted = self.num_accepted = 0
        """The numbers of tokens that were drafted, and that were drawn as drafted."""

    def join(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up ``row`` for a new sequence with this prompt; the other arguments are not used."""
        self._keys_R[row] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(prompt_ids_T, np.int32).tobytes())
        self._own.join(row)
        self._barred_R[row] = False
        if self.history.knows(self._keys_R[row]):
            self._wait = 0

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Move the rows ``sources`` to the places ``targets``, after rows have left."""
        self._keys_R[targets], self._barred_R[targets] = self._keys_R[sources], self._barred_R[sources]
        self._own.move(sources, targets)

    def learn(self, row: int) -> None:
        """Add the answer of ``row``, which ends, to the history."""
        rows, sequence = self._rows, self._rows.sequences[row]
        begun = sequence.request.answer_ids_T
        start = len(sequence.given_ids_T) + (0 if begun is None else len(begun))
        ids_T = rows.ids_of(row)
        if len(ids_T) > start:
            self.history.add(self._keys_R[row], ids_T[:start], ids_T[start:], rows.chances(row, start))

    def extend(self, schedule: Schedule) -> Schedule:
        """Return ``schedule`` with drafted tokens after the newest token of some of the rows that decode. These rows
        come after those that decode without a draft. The tokens are written behind those of the row, and the blocks
        that they need are allocated, if there are any."""
        rows, decoding = self._rows, schedule.rows_R[: schedule.num_decode]
        if not len(decoding):
            return schedule
        self._trust.fade()
        if self._wait > 0:
            self._wait -= 1
            return schedule
        self._own.read(decoding)
        ids_DK, chances_DK = self._best(decoding)
        within_D = np.where(self._barred_R[decoding], 0, rows.draftable(decoding))
        if schedule.joined:  # they may share a block that this pass completes, which a draft must not spoil
            within_D[rows.length_R[decoding] % BLOCK == 0] = 0
        chances_DK[np.arange(self._num) >= within_D[:, None]] = 0
        num_tokens = int(schedule.counts_R.sum())
        lengths_D = cheapest(chances_DK, num_tokens - len(decoding))
        lengths_D = self._bounded(lengths_D, self._max_step_tokens - num_tokens)
        self._reserve(decoding, lengths_D)
        if not lengths_D.any():
            self._pause = self._wait = min(2 * self._pause + 1, _LONGEST_PAUSE)
            return schedule
        self._pause = 0
        drafted_DK = np.arange(self._num) < lengths_D[:, None]
        at_D, at_K = np.nonzero(drafted_DK)
        rows.ids_RC[decoding[at_D], rows.length_R[decoding[at_D]] + at_K] = ids_DK[drafted_DK]
        self.num_drafted += len(at_D)
        return _inserted(schedule, lengths_D)

    def note(self, rows_E: Index, places_E: Index, drawn_E: npt.NDArray[np.bool_]) -> None:
        """Take in the outcome of a pass: for each drafted token that a draw was compared with, its row, its number in
        the draft, and whether it was drawn."""
        self.num_accepted += int(drawn_E.sum())
        self._trust.note(self._ways_R[rows_E], self._chances_RK[rows_E, places_E], drawn_E)

    def bar(self, rows_E: Index) -> None:
        """Draft nothing more for the sequences in ``rows_E``."""
        self._barred_R[rows_E] = True

    def _best(self, rows_D: Index) -> tuple[IntColumn, Chances]:
        """Return a draft for each of ``rows_D``: of those that were found, the one of which most tokens should be
        drawn; and the chance that it is drawn up to each of its tokens."""
        rows, places_DC = self._rows, self._rows.length_R[rows_D][:, None] - CONTEXT + np.arange(CONTEXT)
        contexts_DC = np.where(places_DC < 0, END, rows.ids_RC[rows_D[:, None], np.maximum(places_DC, 0)])
        ids_LDK, chances_LDK = self.history.find(self._keys_R[rows_D], contexts_DC, self._num)
        own_DK, repeats_D = self._own.find(rows_D, self._num)
        ids_WDK = np.concatenate([ids_LDK, own_DK[None]])
        chances_WDK = np.concatenate([chances_LDK, np.broadcast_to(repeats_D[:, None], (1, *own_DK.shape))])
        sound_WDK = (chances_WDK > 0) & (chances_WDK <= 1) & (ids_WDK >= 0) & (ids_WDK < self._vocab_size)
        if not sound_WDK[:, :, 0].any():
            return own_DK, np.zeros(own_DK.shape)
        chances_WDK[~sound_WDK] = 0
        whole_WDK = (chances_WDK * np.minimum(self._trust.factors_W, 1)[:, None, None]).cumprod(axis=2)
        way_D, all_D = whole_WDK.sum(axis=2).argmax(axis=0), np.arange(len(rows_D))
        self._ways_R[rows_D], self._chances_RK[rows_D] = way_D, chances_WDK[way_D, all_D]
        return ids_WDK[way_D, all_D], whole_WDK[way_D, all_D]

    def _bounded(self, lengths_D: Index, budget: int) -> Index:
        """Return the lengths of drafts, of which the last are shortened where all together exceed ``budget``."""
        before_D = np.cumsum(lengths_D) - lengths_D
        shortened: Index = np.clip(budget - before_D, 0, lengths_D)
        return shortened

    def _reserve(self, rows_D: Index, lengths_D: Index) -> None:
        """Allocate the blocks that the drafts need, without preempting any sequence; shorten in place those for which
        there are none."""
        rows = self._rows
        room_D = rows.num_blocks_R[rows_D] * BLOCK - rows.length_R[rows_D]
        for place in np.flatnonzero(lengths_D > room_D).tolist():
            row = int(rows_D[place])
            needed = blocks_for(int(rows.length_R[row] + lengths_D[place])) - int(rows.num_blocks_R[row])
            fresh = self._pool.allocate(needed)
            if fresh is None:
                lengths_D[place] = room_D[place]
            else:
                rows.extend(row, fresh)


def _inserted(schedule: Schedule, lengths_D: Index) -> Schedule:
    """Return ``schedule`` with ``lengths_D`` drafted tokens for each row that decodes; rows without any come first."""
    num, order_D = schedule.num_decode, np.argsort(lengths_D > 0, kind="stable")
    lengths_D = lengths_D[order_D]
    none_J = np.zeros(len(schedule.rows_R) - num, np.int64)
    return dataclasses.replace(
        schedule,
        rows_R=np.concatenate([schedule.rows_R[:num][order_D], schedule.rows_R[num:]]),
        counts_R=np.concatenate([1 + lengths_D, schedule.counts_R[num:]]),
        drafts_R=np.concatenate([lengths_D, none_J]),
        num_decode=int((lengths_D == 0).sum()),
    )


def make_speculation(
    config: EngineConfig, rows: Rows, pool: BlockPool, vocab_size: int, *, file: Path | None = None
) -> Speculation | None:
    """Return the speculation that ``config`` asks for, which ``rows`` tell of their changes; ``None`` for none. The
    other arguments are those of :class:`Speculation`. If the file cannot be made, the history is kept in memory alone,
    and a line in the log of the process says so."""
    if config.speculation == "off":
        return None
    try:
        speculation = Speculation(config, rows, pool, vocab_size, file=file)
    except OSError as error:
        sys.stderr.write(f"the history of answers is kept in memory alone, and ends with this process: {error}\n")
        speculation = Speculation(config, rows, pool, vocab_size)
    if speculation.history.store.num_damaged:
        damaged = speculation.history.store.num_damaged
        sys.stderr.write(f"{file}: {damaged} entries of the history of answers were damaged and are left out\n")
    rows.tell(speculation)
    return speculation
