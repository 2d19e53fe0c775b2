"""Drafts from the model's own prediction head (:mod:`headrace.models.heads`). The head has a layer of its own in the
cache.

    pass ──▶ draw ──▶ advance: the head computes each token of the pass whose successor is known, with keys and values
                        │        beside those of the model, in the same blocks
                        ▼
    the head's state after the newest token ──▶ draft: logits, a token drawn from them with the random number of its
                        ▲                                position, and the head again, with that token
                        └──────────────────────────────────┘

The cache entry of the head at a position is computed from the model's state at this position and the embedding of the
next token. A wrong entry costs time but never changes an answer, because drafts only decide which tokens a pass
computes in advance. For this reason, entries of drafted tokens may stay until the pass has drawn the true tokens. A
sequence gets no drafts from the head if it lacks entries because the head rested when they should have been computed.

Shape legend: N tokens of a pass, R rows of a pass, D rows that decode, K tokens of a draft, A rows that get drafts,
B blocks of the longest table, P blocks of the pool, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.types.columns import IntColumn
from headrace.base.types.sampling import Sampling
from headrace.engine.native.adapters import EngineAdapters, PassRows
from headrace.engine.native.controls import Controls
from headrace.engine.native.rows import Flags, Index, Rows
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, PagedCache
from headrace.models.paged.plan import PagedPlan
from headrace.models.predicting import PredictionHead
from headrace.models.text_part import trunk_name

Chances = npt.NDArray[np.float64]
CONFIDENCES = (0.5, 0.9)
"""The probabilities under the head that divide drafted tokens into classes. The fraction of accepted tokens is measured
for each class."""
REST, LONGEST_REST = 100, 1600
"""The number of passes in which the head computes nothing after its drafts did not save time: the first number, and the
largest number. The number doubles each time until a draft is accepted."""
_MOST_UNPAID = 3
"""The number of consecutive passes without an accepted draft of the head after which it rests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrices:
    """The figures from which the head decides how many tokens it drafts. The unit of costs is the cost of a further
    token of a row."""

    token: float
    """The cost of a token in the current pass without drafts from the head."""
    step: float
    """The cost of a step of the head, without the cost of its rows."""
    row: float
    """The cost of each row in a step of the head."""
    first: float
    """The fraction of first tokens of the head's recent drafts that were accepted."""
    later: float
    """The fraction of the other tokens of recent drafts that were accepted."""
    factors_C: Chances
    """The fraction of all tokens of recent drafts that were accepted, by the class of their confidence."""

    def saved(self, reached_A: Chances, step: int) -> Chances:
        """Return, for each row, the cost that the next token of its draft is expected to save, minus the cost of
        computing this token in the pass. The drafts have ``step`` tokens so far, which are all accepted with the
        probabilities ``reached_A``."""
        saved_A: Chances = reached_A * (self.later if step else self.first) * self.token - 1
        return saved_A

    def pays(self, reached_A: Chances, step: int) -> bool:
        """Return whether the next tokens of these drafts save more than a step of the head costs. ``reached_A`` and the
        other arguments are those of :meth:`saved`, which describes the arguments."""
        return float(self.saved(reached_A, step).sum()) > self.step + self.row * len(reached_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafts:
    """The drafts of the head for several rows."""

    ids_AK: IntColumn
    """The drafted tokens."""
    classes_AK: Index
    """The class of each token by its probability under the head (:data:`CONFIDENCES`)."""
    counts_A: Index
    """The number of tokens that were drafted for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """The parts of an engine that its prediction head uses."""

    model: PreTrainedModel
    """The model to which the head belongs."""
    head: PredictionHead
    """The prediction head."""
    cache: PagedCache
    """The cache, whose last layer is the layer of the head."""
    attention: AttentionMaker
    """The function that creates the attention of a pass."""
    rows: Rows
    """The sequences of the batch."""
    controls: Controls
    """The sampling parameters of the rows, with which drafts are drawn."""
    adapters: EngineAdapters
    """The adapters that compute embedding and output layer."""


class HeadDrafter:
    """The drafter that uses an engine's prediction head. It stores the head's state after the newest token of each row,
    and the number of the head's entries in each block of the cache. The rows notify it of sequences that join and leave
    (:class:`headrace.engine.native.rows.Follower`)."""

    def __init__(self, parts: HeadParts) -> None:
        """Create a drafter that uses ``parts``, without a state for any row. From now on it reads the hidden states of
        every pass of the model."""
        self._parts, self._rows = parts, parts.rows
        model = parts.model
        self._device = model.device
        self._layer = len(parts.cache.shapes) - 1
        """The index of the head's layer in the cache: the last one."""
        self._written_P = np.zeros(parts.cache.num_blocks, np.int64)
        """The number of places of each block, from its beginning, that have an entry of the head."""
        size = int(model.get_input_embeddings().weight.shape[1])
        self._state_RH = torch.zeros(parts.rows.num_rows, size, dtype=model.dtype, device=self._device)
        """The head's state after the newest token of each row."""
        self._length_R = np.zeros(parts.rows.num_rows, np.int64)
        """The length that each row had when its state in ``_state_RH`` was computed, after the newest token; 0 if the
        row has no state."""
        self._hidden_NH: Tensor | None = None
        """The hidden states of the model's latest pass, one for each of its tokens; ``None`` before the first."""
        self._rest, self._next_rest, self._unpaid = 0, REST, 0
        """The number of further passes in which the head computes nothing, the same number for the next rest, and the
        number of consecutive passes in which none of its drafts was accepted."""
        trunk: Any = getattr(model, trunk_name(model))
        trunk.register_forward_hook(self._keep_hidden)
        vocabulary = model.get_output_embeddings().weight.numel()
        self.num_weights = parts.head.num_weights
        """The number of the head's own weights."""
        self.share = (self.num_weights + vocabulary) / max(1, sum(each.numel() for each in model.parameters()))
        """The number of weights that a step of the head reads, as a fraction of the number that a pass of the model
        reads."""

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Forget the state of ``row``, because another sequence begins there; the other arguments are not used."""
        self._length_R[row] = 0

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Move the states of the rows ``sources`` to the rows ``targets``, after sequences have left; ``count`` is not
        used."""
        self._length_R[targets] = self._length_R[sources]
        if len(sources):
            self._state_RH[self._tensor(targets)] = self._state_RH[self._tensor(sources)]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Record that the blocks ``sources`` of the cache are copied to the blocks ``targets``."""
        self._written_P[list(targets)] = self._written_P[list(sources)]

    def rest(self) -> None:
        """Compute nothing in the next passes."""
        self._rest, self._next_rest, self._unpaid = self._next_rest, min(2 * self._next_rest, LONGEST_REST), 0

    def settle(self, *, taken: bool) -> None:
        """Record whether any draft of the head was accepted (``taken``) in a pass for which the head has drafted. After
        several passes without an accepted draft, the head rests."""
        if taken:
            self._next_rest, self._unpaid = REST, 0
            return
        self._unpaid += 1
        if self._unpaid == _MOST_UNPAID:
            self.rest()

    def ready(self, rows_D: Index) -> Flags:
        """Return for each of ``rows_D`` whether the head can draft: it has a state after the newest token of the row,
        and does not rest."""
        ready_D: Flags = (self._length_R[rows_D] == self._rows.length_R[rows_D]) & (self._rest == 0)
        return ready_D

    @torch.inference_mode()
    def advance(self, rows_R: Index, plan: PagedPlan, geometry: Geometry) -> None:
        """Compute the head for the tokens of a pass whose successors are known. Call this after the pass has drawn its
        tokens. The pass computed the rows ``rows_R``, with this ``plan`` and ``geometry``."""
        hidden_NH, self._hidden_NH = self._hidden_NH, None
        assert hidden_NH is not None, "a pass of the model is over"
        starts_R, counts_R = geometry.starts_R, geometry.counts_R
        whole_R = self._whole(geometry)
        num_R = np.minimum(counts_R, self._rows.length_R[rows_R] - 1 - starts_R)
        num_R = np.where(whole_R, num_R, 0) if self._rest == 0 else np.zeros_like(counts_R)
        self._rest = max(0, self._rest - 1)
        self._mark(geometry, whole_R, num_R)
        chosen = np.flatnonzero(num_R > 0)
        if not len(chosen):
            return
        if np.array_equal(num_R, counts_R):
            own, hidden = plan.at_layer(self._layer), hidden_NH
        else:
            chosen = chosen[np.argsort(num_R[chosen] > 1, kind="stable")]
            begins_R = np.cumsum(counts_R) - counts_R
            geometry = _part(geometry, chosen, num_R[chosen])
            within_N = geometry.positions_N() - np.repeat(geometry.starts_R, geometry.counts_R)
            hidden = hidden_NH[self._tensor(np.repeat(begins_R[chosen], geometry.counts_R) + within_N)]
            own = self._plan(geometry)
        rows_A = rows_R[chosen]
        ids_N = self._rows.ids_RC[np.repeat(rows_A, geometry.counts_R), geometry.positions_N() + 1]
        states_NH = self._parts.head(self._embedding(rows_A, geometry.counts_R, ids_N), hidden, own)
        ends_A = geometry.starts_R + geometry.counts_R + 1
        done = np.flatnonzero(ends_A == self._rows.length_R[rows_A])
        self._state_RH[self._tensor(rows_A[done])] = states_NH[self._tensor(geometry.last_R()[done])]
        self._length_R[rows_A[done]] = ends_A[done]

    @torch.inference_mode()
    def draft(self, rows_A: Index, most_A: Index, prices: DraftPrices) -> HeadDrafts:
        """Draft up to ``most_A`` tokens for each of ``rows_A``, as long as a further token saves time according to
        ``prices``. The head must be ready for these rows, and they must have blocks for the tokens. The draft of a row
        whose logits depend on its answer (penalties, structures) has one token."""
        most_A = np.where(self._parts.controls.depends_on_answer(rows_A), np.minimum(most_A, 1), most_A)
        width, count = int(most_A.max(initial=0)), len(rows_A)
        ids_AK, classes_AK = np.zeros((count, width), np.int32), np.zeros((count, width), np.int64)
        counts_A, reached_A = np.zeros(count, np.int64), np.ones(count)
        states_AH = self._state_RH[self._tensor(rows_A)]
        for step in range(width):
            worth_A = prices.saved(reached_A, step) > prices.row
            at = np.flatnonzero((counts_A == step) & (most_A > step) & worth_A)
            if not len(at) or not prices.pays(reached_A[at], step):
                break
            places = self._tensor(at)
            if step:
                states_AH[places] = self._step(rows_A[at], ids_AK[at, step - 1], states_AH[places], step)
            ids, confidences, sound = self._drawn(rows_A[at], states_AH[places], step)
            ids_AK[at, step], classes_AK[at, step] = ids, np.searchsorted(CONFIDENCES, confidences, side="right")
            counts_A[at] += sound
            reached_A[at] *= prices.factors_C[classes_AK[at, step]]
        return HeadDrafts(ids_AK=ids_AK, classes_AK=classes_AK, counts_A=counts_A)

    def _step(self, rows_A: Index, ids_A: IntColumn, states_AH: Tensor, step: int) -> Tensor:
        """Return the next states of the head after it has drafted ``step`` tokens for each of ``rows_A``. ``ids_A`` are
        the last of these tokens, and ``states_AH`` are the states from which they were drawn. The new cache entries are
        at the positions directly before the tokens ``ids_A``."""
        ones_A = np.ones(len(rows_A), np.int64)
        geometry = Geometry(
            tables_RB=self._rows.tables_RB[rows_A, : int(self._rows.num_blocks_R[rows_A].max())],
            starts_R=self._rows.length_R[rows_A] + step - 2,
            counts_R=ones_A,
            num_decode=len(rows_A),
        )
        found: Tensor = self._parts.head(self._embedding(rows_A, ones_A, ids_A), states_AH, self._plan(geometry))
        return found

    def _drawn(self, rows_A: Index, states_AH: Tensor, step: int) -> tuple[Index, Chances, Flags]:
        """Return the tokens that are drawn from the head's logits after ``states_AH``, each with the random number of
        its own position; the probability of each token; and whether the logits of each row define a distribution."""
        ones_A = np.ones(len(rows_A), np.int64)
        output: Any = self._parts.model.get_output_embeddings()
        with self._parts.adapters.on(self._pass_rows(rows_A, ones_A)):
            logits_AV = output(states_AH)
        draw = self._parts.controls.draw(logits_AV, self._rows.length_R[rows_A] + step, rows_A)
        chances: Chances = draw.logprobs_R.double().exp().cpu().numpy()
        sound: Flags = draw.sound_R.cpu().numpy() & np.isfinite(chances)
        return draw.ids_R.cpu().numpy(), np.where(sound, chances, 0.0), sound

    def _embedding(self, rows_A: Index, counts_A: Index, ids_N: IntColumn) -> Tensor:
        """Return the embeddings of ``ids_N``, which contains ``counts_A`` tokens of each of the rows ``rows_A``, one
        row after the other."""
        embedding: Any = self._parts.model.get_input_embeddings()
        with self._parts.adapters.on(self._pass_rows(rows_A, counts_A)):
            found: Tensor = embedding(self._tensor(ids_N.astype(np.int64)))
        return found

    def _pass_rows(self, rows_A: Index, counts_A: Index) -> PassRows:
        """Return the description of a pass for the adapters: row n of the pass has ``counts_A[n]`` tokens, which the
        adapter of row ``rows_A[n]`` of the batch computes, and gets the logits of its last token."""
        return PassRows(adapter_R=self._rows.adapter_R[rows_A], counts_R=counts_A, num_logits_R=np.ones_like(counts_A))

    def _whole(self, geometry: Geometry) -> Flags:
        """Return for each row of a pass whether the head has the entries before the new tokens of the row. The last of
        these entries is not required: where sequences diverge after a shared block, it belongs to the other
        sequence."""
        columns_B = BLOCK * np.arange(geometry.tables_RB.shape[1])
        needed_RB = np.clip(geometry.starts_R[:, None] - 1 - columns_B, 0, BLOCK)
        whole_R: Flags = (self._written_P[geometry.tables_RB] >= needed_RB).all(axis=1)
        return whole_R

    def _mark(self, geometry: Geometry, whole_R: Flags, num_R: Index) -> None:
        """Record which places of the blocks that a pass has written contain entries of the head: for each row of
        ``whole_R``, ``num_R`` places more than before."""
        starts_R, ends_R = geometry.starts_R, geometry.starts_R + num_R
        firsts_R, lasts_R = starts_R // BLOCK, (starts_R + geometry.counts_R - 1) // BLOCK
        counts_R = lasts_R - firsts_R + 1
        rows_N = np.repeat(np.arange(len(counts_R)), counts_R)
        columns_N = np.arange(len(rows_N)) - np.repeat(np.cumsum(counts_R) - counts_R - firsts_R, counts_R)
        blocks_N = geometry.tables_RB[rows_N, columns_N]
        found_N = np.clip(ends_R[rows_N] - BLOCK * columns_N, 0, BLOCK)
        none_N = (~whole_R | (num_R == 0))[rows_N]
        found_N[none_N] = np.minimum(found_N, self._written_P[blocks_N])[none_N]
        self._written_P[blocks_N] = found_N

    def _plan(self, geometry: Geometry) -> PagedPlan:
        """Return the plan of a pass of the head with this ``geometry``."""
        plan = PagedPlan(self._parts.cache, geometry, self._parts.attention, self._device)
        return plan.at_layer(self._layer)

    def _keep_hidden(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Store the states that the model's trunk returns until :meth:`advance` reads them. This is a forward hook."""
        self._hidden_NH = output.last_hidden_state[0]

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return the array as a tensor on the engine's device."""
        return torch.from_numpy(array).to(self._device)


def _part(geometry: Geometry, chosen: Index, counts: Index) -> Geometry:
    """Return the geometry of a pass over the rows ``chosen`` of the pass with ``geometry``, with the first ``counts``
    tokens of each row. Rows with one token come first in ``chosen``."""
    return Geometry(
        tables_RB=geometry.tables_RB[chosen],
        starts_R=geometry.starts_R[chosen],
        counts_R=counts,
        num_decode=int((counts == 1).sum()),
    )
