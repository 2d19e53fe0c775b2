"""Speculative decoding: the choice of drafted tokens that a pass computes in advance, because they are likely to be
drawn.

    schedule ──▶ extend: look up drafts, and let the model's head draft for other rows (:mod:`.heads`)
                                 ▲    ─▶ choose their lengths ─▶ the same schedule, with more tokens of some rows
    pass ──▶ verify (:mod:`.verification`): how many were drawn ─▶ note: update the trust in chances

A draft is found in one of several *ways*: by the look-ups in earlier answers
(:data:`~headrace.engine.native.history.LOOK_UPS`), or in the sequence's own text. Each drafted token has a *chance*:
the probability with which it was drawn where it was found, times the *trust* in this way, which is the recent ratio of
accepted tokens to expected ones. A pass includes the drafts that minimise the estimated cost per token: the cost of a
pass is estimated from its numbers of rows and tokens, and the number of resulting tokens from the chances. Drafts that
would cost more than they save are left out, so bad drafts switch speculation off. The trust returns slowly to its first
estimate, so that speculation is tried again.

A row takes its draft from history where the first token there is at least as likely to be drawn as first tokens of the
head's drafts have been of late, and otherwise from the head, if there is one. A token of the head has a chance of 1:
how far it can be trusted is known for each class of its probability under the head.

Shape legend: D rows that decode, K tokens of a draft, W ways of finding a draft, E drafted tokens, A rows that the
head drafts for.
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
from headrace.engine.native.blocks import BlockPool, count_blocks
from headrace.engine.native.heads import DraftPrices, HeadDrafter
from headrace.engine.native.history import CONTEXT, HistoryIndex, OwnText
from headrace.engine.native.history_store import END
from headrace.engine.native.rows import Index, Rows
from headrace.engine.native.scheduler import Schedule
from headrace.models.paged.base import BLOCK

Chances = npt.NDArray[np.float64]

PASS_COST = 16.0
"""The cost of a pass without tokens; the unit is the cost of a further token of a row. This and ``ROW_COST`` were
measured with models of 1M and 28M parameters on a processor: see docs/design/014-speculation.md."""
ROW_COST = 2.0
"""The cost of a row with one token, in the same unit. It includes the reading of the row's context, which further
tokens of the row share."""
DRAFT_COST = 8.0
"""The additional cost of a pass with drafts, besides their tokens, in the same unit."""
_PRIOR_TOKENS = 8.0
"""The weight of the first estimate of trust, as a number of tokens."""
_FADE = 0.995
"""The factor by which the weight of earlier observations decreases with each pass."""
_LONGEST_PAUSE = 15
"""The most passes without look-ups, after look-ups that found no useful draft."""
HEAD_COST = 1.2
"""The cost of a step of a prediction head by that of a pass of the model, for each weight that they read."""
_FIRST_TRUST = np.array([0.9, 0.5, 0.5, 0.3, 0.3, 0.6, 0.9, 0.7, 0.5])
"""The first estimate of the trust for each way of finding a draft: the look-ups in the history, the sequence's own
text, the head's tokens by their class, the first tokens of the head's drafts, and the tokens after the first."""
_HEAD, _HEAD_FIRST, _HEAD_LATER = 4, 7, 8
"""The way of the head's tokens of the lowest class, that of the first tokens of its drafts, and that of the others."""


class Trust:
    """The trust in the chances of drafts, for each way of finding them: the number of drafted tokens that were drawn,
    divided by the number that would have been drawn if the chances were exact."""

    def __init__(self) -> None:
        """Start with the first estimates for each way W of finding a draft."""
        self._expected_W = np.full(len(_FIRST_TRUST), _PRIOR_TOKENS)
        """The number of drafted tokens that would have been drawn if the chances were exact, of which older ones count
        less."""
        self._drawn_W = _PRIOR_TOKENS * _FIRST_TRUST
        """The number of drafted tokens that were drawn, weighted in the same way."""
        self._prior_W = self._drawn_W.copy()
        """The value of ``_drawn_W`` to which it returns without new observations."""

    @property
    def factors_W(self) -> Chances:
        """The factor by which the chances of drafts of each way are multiplied."""
        factors: Chances = self._drawn_W / self._expected_W
        return factors

    def fade(self) -> None:
        """Decrease the weight of earlier passes, and increase the weight of the first estimates; called once a pass."""
        self._expected_W = _PRIOR_TOKENS + _FADE * (self._expected_W - _PRIOR_TOKENS)
        self._drawn_W = self._prior_W + _FADE * (self._drawn_W - self._prior_W)

    def note(self, ways_E: Index, chances_E: FloatColumn, drawn_E: npt.NDArray[np.bool_]) -> None:
        """Record the outcome of drafted tokens, up to the first token of each draft that was not drawn: the way in
        which each was found (``ways_E``), the probability with which it was expected (``chances_E``), and whether it
        was drawn (``drawn_E``). A token may be given several times, with different ways."""
        size = len(self._drawn_W)
        self._expected_W += np.bincount(ways_E, weights=chances_E, minlength=size)
        self._drawn_W += np.bincount(ways_E, weights=drawn_E, minlength=size)


def cheapest(chances_DK: Chances, num_others: int) -> Index:
    """Return for each row the number of drafted tokens with which the estimated cost per resulting token is least.
    ``chances_DK`` are the chances that a draft is drawn up to and including each of its tokens; ``num_others`` is the
    number of prompt tokens in the pass.

    >>> cheapest(np.array([[0.9, 0.8, 0.01], [0.0, 0.0, 0.0]]), 0).tolist()
    [2, 0]
    >>> cheapest(np.full((64, 2), 0.3), 0).any()  # a full batch gains nothing from unlikely drafts
    np.False_
    """
    num_rows, width = chances_DK.shape
    flat = chances_DK.ravel()
    likely = np.flatnonzero(flat > 0)
    order = likely[np.argsort(-flat[likely], kind="stable")]  # of equal chances, the earlier token is first
    fixed = PASS_COST + ROW_COST * num_rows + num_others
    costs = fixed + DRAFT_COST + np.arange(len(order) + 1)
    costs[0] = fixed
    each = costs / (num_rows + np.concatenate([[0.0], np.cumsum(flat[order])]))
    lengths: Index = np.bincount(order[: int(each.argmin())] // width, minlength=num_rows)
    return lengths


class Speculation:
    """The drafting of tokens for the sequences in ``rows``, from the history of answers, from their own text and from
    the model's head, if it is used. ``pool`` allocates the blocks of the cache, and ``vocab_size`` is the number of
    token ids. The rows notify it when sequences join and move (:class:`headrace.engine.native.rows.Follower`)."""

    def __init__(
        self,
        config: EngineConfig,
        rows: Rows,
        pool: BlockPool,
        vocab_size: int,
        *,
        file: Path | None = None,
        head: HeadDrafter | None = None,
    ) -> None:
        """Create the drafter with the settings of ``config`` and an empty history in memory or, with ``file``, the
        history that is stored in this file. ``head`` drafts where the history does not. Raises ``OSError`` if the file
        cannot be created. The other arguments are described at the class."""
        self._rows, self._pool, self._vocab_size = rows, pool, vocab_size
        self._num, self._max_step_tokens = config.draft_tokens, config.max_step_tokens
        """The most tokens that a pass drafts for a row, and the most tokens of one pass."""
        self.history = HistoryIndex(config.history_tokens, file, vocab_size)
        self._trust = Trust()
        """The trust in the chances of drafts, by the way of finding them."""
        self._keys_R = np.zeros(config.max_sequences, np.uint64)
        """The hash of the prompt of each row."""
        self._barred_R = np.zeros(config.max_sequences, bool)
        """Whether no tokens are drafted for the row any more."""
        self.head = head
        """The drafts of the model's head; ``None`` without one."""
        self._ways_RK = np.zeros((config.max_sequences, self._num), np.int64)
        self._chances_RK = np.zeros((config.max_sequences, self._num), np.float32)
        """The way in which each token of the present draft of each row was found (``_ways_RK``), and its probability
        there."""
        self._own = OwnText(rows)
        """The index over each row's own text."""
        self._wait = self._pause = 0
        """The number of further passes without look-ups, and the number of such passes after the last look-ups, which
        found no useful draft."""
        """The number of passes that are still without look-ups, and the length of the last such pause."""
        self.num_drafted = self.num_accepted = 0
        """The numbers of drafted tokens and of accepted ones, which were drawn as drafted."""

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up ``row`` for a sequence with the prompt ``prompt_ids_T``; the other arguments are not used."""
        self._keys_R[row] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(prompt_ids_T, np.int32).tobytes())
        self._own.add(row)
        self._barred_R[row] = False
        if self.history.knows(self._keys_R[row]):
            self._wait = 0

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Move the rows ``sources`` to the indices ``targets``, after other rows have left; ``count`` is not used."""
        self._keys_R[targets], self._barred_R[targets] = self._keys_R[sources], self._barred_R[sources]
        self._own.move(sources, targets)

    def learn(self, row: int) -> None:
        """Add the answer of ``row`` to the history, because its sequence ends."""
        rows, sequence = self._rows, self._rows.sequences[row]
        earlier_ids_T = sequence.request.answer_ids_T
        start = len(sequence.given_ids_T) + (0 if earlier_ids_T is None else len(earlier_ids_T))
        ids_T = rows.get_ids(row)
        if len(ids_T) > start:
            self.history.add(self._keys_R[row], ids_T[:start], ids_T[start:], rows.chances(row, start))

    def extend(self, schedule: Schedule) -> Schedule:
        """Return ``schedule`` with drafted tokens after the newest token of some of the rows that decode. These rows
        are moved behind the rows that decode without a draft. The ids of the drafted tokens are written after the row's
        own tokens, and the blocks that they need are allocated; a draft for which no block is free is shortened."""
        rows, decoding = self._rows, schedule.rows_R[: schedule.num_decode]
        if not len(decoding):
            return schedule
        self._trust.fade()
        looks_up = self._wait == 0
        if not looks_up and self.head is None:
            self._wait -= 1
            return schedule
        ids_DK, chances_DK = self._from_history(decoding)
        max_lengths_D = np.where(self._barred_R[decoding], 0, rows.draftable(decoding))
        if schedule.joining:  # they may share a block that this pass completes: no draft must write NaN there
            max_lengths_D[rows.length_R[decoding] % BLOCK == 0] = 0
        max_lengths_D = np.minimum(max_lengths_D, self._num)
        chances_DK[np.arange(self._num) >= max_lengths_D[:, None]] = 0
        num_tokens = int(schedule.counts_R.sum())
        of_head_D = self._from_head(decoding, (ids_DK, chances_DK), max_lengths_D, num_tokens - len(decoding))
        lengths_D = cheapest(chances_DK, num_tokens - len(decoding))
        lengths_D = self._bounded(lengths_D, self._max_step_tokens - num_tokens)
        self._reserve(decoding, lengths_D)
        if self.head is not None and of_head_D.any():
            self.head.settle(taken=bool(lengths_D[of_head_D].any()))
        if looks_up:
            self._pause = 0 if lengths_D[~of_head_D].any() else min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._wait = self._pause
        if not lengths_D.any():
            return schedule
        drafted_DK = np.arange(self._num) < lengths_D[:, None]
        at_D, at_K = np.nonzero(drafted_DK)
        rows.ids_RC[decoding[at_D], rows.length_R[decoding[at_D]] + at_K] = ids_DK[drafted_DK]
        self.num_drafted += len(at_D)
        return _inserted(schedule, lengths_D)

    def note(self, rows_E: Index, places_E: Index, drawn_E: npt.NDArray[np.bool_]) -> None:
        """Record the outcome of a pass, for each drafted token that was compared with a draw: its row (``rows_E``), its
        index in the draft (``places_E``), and whether it was drawn (``drawn_E``)."""
        self.num_accepted += int(drawn_E.sum())
        ways_E, chances_E = self._ways_RK[rows_E, places_E], self._chances_RK[rows_E, places_E]
        self._trust.note(ways_E, chances_E, drawn_E)
        of_head_E = ways_E >= _HEAD
        orders_E = np.where(places_E == 0, _HEAD_FIRST, _HEAD_LATER)
        self._trust.note(orders_E[of_head_E], chances_E[of_head_E], drawn_E[of_head_E])

    def bar(self, rows_E: Index) -> None:
        """Stop drafting for the sequences in ``rows_E``, until their ends."""
        self._barred_R[rows_E] = True

    def _from_history(self, rows_D: Index) -> tuple[IntColumn, Chances]:
        """Return a draft for each of ``rows_D``, and the chance that it is drawn up to each of its tokens: what
        :meth:`_best_drafts` finds or, between look-ups, none."""
        if self._wait > 0:
            self._wait -= 1
            return np.zeros((len(rows_D), self._num), np.int32), np.zeros((len(rows_D), self._num))
        self._own.read(rows_D)
        return self._best_drafts(rows_D)

    def _from_head(
        self, rows_D: Index, drafts: tuple[IntColumn, Chances], max_lengths_D: Index, num_others: int
    ) -> npt.NDArray[np.bool_]:
        """Let the head draft for those of ``rows_D`` for which it is likelier to be right than the history, and write
        that into ``drafts``, the tokens and their chances. ``max_lengths_D`` is the longest draft of each row, and
        ``num_others`` the number of the pass's other tokens. Return the rows with drafts of the head."""
        of_head_D = np.zeros(len(rows_D), bool)
        if self.head is None:
            return of_head_D
        (ids_DK, chances_DK), factors_W = drafts, np.minimum(self._trust.factors_W, 1)
        at = np.flatnonzero(self.head.ready(rows_D) & (max_lengths_D > 0) & (chances_DK[:, 0] < factors_W[_HEAD_FIRST]))
        if not len(at):
            return of_head_D
        step = HEAD_COST * self.head.share
        prices = DraftPrices(
            token=(PASS_COST + ROW_COST * len(rows_D) + num_others) / len(rows_D),
            step=step * PASS_COST,
            row=step * ROW_COST,
            first=factors_W[_HEAD_FIRST],
            later=factors_W[_HEAD_LATER],
            factors_C=factors_W[_HEAD:_HEAD_FIRST],
        )
        if not prices.pays(np.ones(len(rows_D)), 0):  # not even if it drafted for all
            self.head.rest()
            return of_head_D
        most_A = max_lengths_D[at]
        self._reserve(rows_D[at], most_A)
        found = self.head.draft(rows_D[at], most_A, prices)
        for place in range(found.ids_AK.shape[1]):
            some = found.counts_A > place
            where, ways_A = at[some], _HEAD + found.classes_AK[some, place]
            ids_DK[where, place] = found.ids_AK[some, place]
            chances_DK[where, place] = factors_W[ways_A] * (chances_DK[where, place - 1] if place else 1.0)
            self._ways_RK[rows_D[where], place], self._chances_RK[rows_D[where], place] = ways_A, 1.0
        some = found.counts_A > 0
        of_head_D[at[some]] = True
        chances_DK[at[some]] *= np.arange(self._num) < found.counts_A[some][:, None]
        return of_head_D

    def _best_drafts(self, rows_D: Index) -> tuple[IntColumn, Chances]:
        """Return for each of ``rows_D`` the draft with the largest expected number of accepted tokens, among all ways
        of finding one; and the chance that the draft is accepted up to and including each of its tokens (0: no
        draft)."""
        rows, places_DC = self._rows, self._rows.length_R[rows_D][:, None] - CONTEXT + np.arange(CONTEXT)
        contexts_DC = np.where(places_DC < 0, END, rows.ids_RC[rows_D[:, None], np.maximum(places_DC, 0)])
        ids_LDK, chances_LDK = self.history.find(self._keys_R[rows_D], contexts_DC, self._num)
        own_DK, repeats_D = self._own.find(rows_D, self._num)
        ids_WDK = np.concatenate([ids_LDK, own_DK[None]])
        chances_WDK = np.concatenate([chances_LDK, np.broadcast_to(repeats_D[:, None], (1, *own_DK.shape))])
        valid_WDK = (chances_WDK > 0) & (chances_WDK <= 1) & (ids_WDK >= 0) & (ids_WDK < self._vocab_size)
        if not valid_WDK[:, :, 0].any():
            return own_DK, np.zeros(own_DK.shape)
        chances_WDK[~valid_WDK] = 0
        factors_W = np.minimum(self._trust.factors_W[:_HEAD], 1)
        whole_WDK = (chances_WDK * factors_W[:, None, None]).cumprod(axis=2)
        way_D, all_D = whole_WDK.sum(axis=2).argmax(axis=0), np.arange(len(rows_D))
        self._ways_RK[rows_D], self._chances_RK[rows_D] = way_D[:, None], chances_WDK[way_D, all_D]
        return ids_WDK[way_D, all_D], whole_WDK[way_D, all_D]

    def _bounded(self, lengths_D: Index, budget: int) -> Index:
        """Return the lengths of the drafts, with the last ones shortened so that their sum does not exceed
        ``budget``."""
        before_D = np.cumsum(lengths_D) - lengths_D
        shortened: Index = np.clip(budget - before_D, 0, lengths_D)
        return shortened

    def _reserve(self, rows_D: Index, lengths_D: Index) -> None:
        """Allocate the blocks that the drafts need, without preempting any sequence. Drafts for which no block is free
        are shortened, in place in ``lengths_D``."""
        rows = self._rows
        room_D = rows.num_blocks_R[rows_D] * BLOCK - rows.length_R[rows_D]
        for place in np.flatnonzero(lengths_D > room_D).tolist():
            row = int(rows_D[place])
            needed = count_blocks(int(rows.length_R[row] + lengths_D[place])) - int(rows.num_blocks_R[row])
            fresh = self._pool.allocate(needed)
            if fresh is None:
                lengths_D[place] = room_D[place]
            else:
                rows.extend(row, fresh)


def _inserted(schedule: Schedule, lengths_D: Index) -> Schedule:
    """Return ``schedule`` with ``lengths_D`` drafted tokens for the rows that decode; rows without drafts come
    first."""
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
    config: EngineConfig,
    rows: Rows,
    pool: BlockPool,
    vocab_size: int,
    *,
    file: Path | None = None,
    head: HeadDrafter | None = None,
) -> Speculation | None:
    """Create the drafter that ``config`` specifies, and register it as a follower of ``rows``; return ``None`` if
    speculation is off. The other arguments are the same as in :class:`Speculation`. If ``file`` cannot be created, the
    history is kept in memory, and a line is written to the log of the process."""
    if config.speculation == "off":
        return None
    try:
        speculation = Speculation(config, rows, pool, vocab_size, file=file, head=head)
    except OSError as error:
        sys.stderr.write(f"the history of answers is kept in memory alone, and ends with this process: {error}\n")
        speculation = Speculation(config, rows, pool, vocab_size, head=head)
    if speculation.history.store.num_damaged:
        damaged = speculation.history.store.num_damaged
        sys.stderr.write(f"{file}: {damaged} entries of the history of answers were damaged and are left out\n")
    rows.add_follower(speculation)
    return speculation
