"""The sampling parameters of the running sequences, stored as arrays with one row per sequence, and the sampling with
them.

The logits of each row are changed in this order: ``logit_bias`` is added; then the repetition penalty (tokens of prompt
or answer) is applied, then the frequency and presence penalties (tokens of the answer); then the mask of a structure
(:mod:`.masks`); then division by the temperature; then truncation by ``top_k``, ``top_p`` and ``min_p`` (see
:func:`~headrace.engine.native.sampler.find_support`). The tokens that remain are renormalised and sampled. The recorded
logprob is computed from this last distribution. Greedy rows (temperature 0) choose the most likely token after bias and
penalties, the lowest id among equals. This token is certain, so its logprob is 0 and its kept-set contains only itself.

A batch whose rows set only a temperature is sampled on a faster path.

Shape legend: R rows, V vocabulary, D rows that draw in this step, U ids whose logits a row changes, A rows that change
logits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.types.columns import IntColumn
from headrace.base.types.recorded import KeptSets
from headrace.base.types.sampling import Sampling
from headrace.engine.native.masks import Masks
from headrace.engine.native.sampler import (
    Draw,
    LogSoftmax,
    TruncationLimits,
    entropies,
    find_support,
    likeliest,
    sample,
    sample_from,
    splitmix,
    uniforms,
)

Index = npt.NDArray[np.int64]
_FEWEST_COLUMNS = 64


class Controls:
    """The sampling parameters of all rows, and the sampling with them. Rows ``0 .. count - 1`` are in use; :meth:`add`
    and :meth:`move` are called as sequences enter and leave the batch. ``log_softmax`` computes the logprobs, if it is
    passed: the learner's function, so that both get the same bits. ``masks`` are the masks of structured answers;
    ``None``: there are none."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        log_softmax: LogSoftmax | None = None,
        masks: Masks | None = None,
    ) -> None:
        """Allocate the arrays for ``num_rows`` rows; the tensors of :class:`Changes` are on ``device``. The other
        arguments are described at the class."""
        self._device = device
        self._log_softmax = log_softmax
        self._count = 0
        """The number of rows in use."""
        self._temperatures_R = np.ones(num_rows, np.float32)
        """The temperatures with which rows are sampled; 1 for a greedy row that records its kept-set."""
        self._seeds_R = np.zeros(num_rows, np.uint64)
        """The seeds of the requests, modulo 2**64."""
        self._top_k_R = np.zeros(num_rows, np.int64)
        """The number of likeliest tokens that each row keeps; 0: no limit."""
        self._top_p_R = np.ones(num_rows, np.float64)
        self._min_p_R = np.zeros(num_rows, np.float64)
        self._truncated_R = np.zeros(num_rows, bool)
        """Whether each row is sampled from a kept-set: by top-k, top-p or min-p, or greedily with a record."""
        self._records_kept_R = np.zeros(num_rows, bool)
        """Whether each row records its kept-sets."""
        self._records_entropy_R = np.zeros(num_rows, bool)
        """Whether each row records the entropy at its tokens."""
        self._num_top_R = np.zeros(num_rows, np.int64)
        """How many likeliest entries each row records."""
        self._requested_temperatures_R = np.ones(num_rows, np.float32)
        """The temperatures of the requests, which the entropy uses."""
        self._changes = Changes(num_rows, device)
        self._masks = masks
        self._only_temperatures = True
        """Whether the rows in use set nothing but a temperature and a seed."""

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up ``row``, the first unused one, for a sequence that joins the batch, with the parameters ``sampling``
        and the prompt ``prompt_ids_T``. ``answer_ids_T`` are the tokens that the sequence has sampled already, if it is
        a fork or was preempted."""
        greedy = sampling.temperature == 0
        certain = greedy and sampling.record_kept
        self._seeds_R[row] = sampling.seed % 2**64
        # a greedy row that records its kept-set is sampled as a truncated row with a single survivor
        self._temperatures_R[row] = 1.0 if certain else sampling.temperature
        self._top_k_R[row] = 1 if certain else sampling.top_k
        # top_k = 1 keeps all tokens as likely as the first; top_p = 0 then keeps one of them, with the lowest id
        self._top_p_R[row] = float(not certain) if greedy else sampling.top_p
        self._min_p_R[row] = 0.0 if greedy else sampling.min_p
        truncated = self._truncated_R[row] = certain or (sampling.truncated and not greedy)
        self._records_kept_R[row] = sampling.record_kept and truncated
        self._records_entropy_R[row] = sampling.record_entropy
        self._num_top_R[row] = sampling.record_top
        self._requested_temperatures_R[row] = sampling.temperature
        changes = self._changes.add(row, sampling, prompt_ids_T, answer_ids_T)
        if self._masks is not None:
            self._masks.add(row, sampling, answer_ids_T)
        self._count = row + 1
        sets_more = truncated or sampling.record_entropy or sampling.record_top or changes
        if sets_more or (self._masks is not None and self._masks.any()):
            self._only_temperatures = False

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Move the rows ``sources`` to the indices ``targets``, after other rows have left; ``count`` rows are in use
        now."""
        for column in (
            self._temperatures_R, self._seeds_R, self._top_k_R, self._top_p_R, self._min_p_R, self._truncated_R,
            self._records_kept_R, self._records_entropy_R, self._num_top_R, self._requested_temperatures_R,
        ):  # fmt: skip
            column[targets] = column[sources]
        self._changes.move(sources, targets)
        if self._masks is not None:
            self._masks.move(sources, targets, count)
        self._resize(count)

    def draw(self, logits_DV: Tensor, positions_D: Index, rows_D: Index | None = None) -> Draw:
        """Sample one token for each of ``rows_D`` (``None``: all rows in use, in order) from the logits ``logits_DV``.
        ``positions_D`` are the positions of the new tokens in their sequences; position and seed of the request
        determine the random number. The caller must call :meth:`append` afterwards."""
        rows = np.arange(self._count) if rows_D is None else rows_D
        uniforms_D = self._tensor(uniforms(splitmix(self._seeds_R[rows]), positions_D))
        temperatures_D = self._tensor(self._temperatures_R[rows])
        if self._only_temperatures:
            return sample(logits_DV, temperatures_D, uniforms_D, self._log_softmax)
        changed_DV = self._changes.apply(logits_DV, rows)
        if self._masks is not None:
            changed_DV = self._masks.apply(changed_DV, rows)
        draw = self._draw(changed_DV, temperatures_D, uniforms_D, rows)
        if num_top := int(self._num_top_R[rows].max(initial=0)):
            draw = dataclasses.replace(draw, top=likeliest(logits_DV, draw.ids_R, num_top))
        if not self._records_entropy_R[rows].any():
            return draw
        requested_D = self._tensor(self._requested_temperatures_R[rows])
        return dataclasses.replace(draw, entropies_R=entropies(changed_DV, requested_D))

    def _draw(self, logits_DV: Tensor, temperatures_D: Tensor, uniforms_D: Tensor, rows: Index) -> Draw:
        """Sample one token for each of ``rows`` at its temperature in ``temperatures_D``, from its logits after bias,
        penalties and mask. ``uniforms_D`` are random numbers in [0, 1). Rows with and without truncation are sampled
        separately, and their results are merged in order."""
        truncated_at = np.flatnonzero(self._truncated_R[rows])
        if not len(truncated_at):
            return sample(logits_DV, temperatures_D, uniforms_D, self._log_softmax)
        if len(truncated_at) == len(rows):
            return self._draw_truncated(logits_DV, temperatures_D, uniforms_D, rows)
        places = self._tensor(truncated_at)
        truncated = self._draw_truncated(
            logits_DV[places], temperatures_D[places], uniforms_D[places], rows[truncated_at]
        )
        untruncated_at = np.flatnonzero(~self._truncated_R[rows])
        others_at = self._tensor(untruncated_at)
        others = sample(logits_DV[others_at], temperatures_D[others_at], uniforms_D[others_at], self._log_softmax)
        return _interleave(truncated, others, np.concatenate([truncated_at, untruncated_at]))

    def depends_on_answer(self, rows_D: Index) -> npt.NDArray[np.bool_]:
        """Return for each of ``rows_D`` whether its logits depend on its sampled tokens, through a penalty or a mask.
        :meth:`append` must then be called between two draws."""
        grows: npt.NDArray[np.bool_] = self._changes.grows(rows_D)
        return grows if self._masks is None else grows | self._masks.has(rows_D)

    def append(self, ids_D: Tensor, rows_D: Index | None = None) -> None:
        """Record ``ids_D``, the tokens just sampled for ``rows_D`` (``None``: all rows in use), so that penalties and
        masks of the next draw include them."""
        if self._only_temperatures:
            return
        rows = np.arange(self._count) if rows_D is None else rows_D
        self._changes.append(ids_D, rows)
        if self._masks is not None:
            self._masks.append(ids_D, rows)

    def _draw_truncated(self, logits_DV: Tensor, temperatures_D: Tensor, uniforms_D: Tensor, rows: Index) -> Draw:
        """Sample one token for each of ``rows`` from its logits ``logits_DV`` at its temperature in ``temperatures_D``,
        under top-k, top-p and min-p, and record the kept-sets (the ids that survive the truncation) of the rows that
        request them. ``uniforms_D`` are uniform numbers in [0, 1)."""
        scaled_DV = logits_DV.float() / temperatures_D[:, None]
        limits = TruncationLimits(
            top_k_R=self._tensor(self._top_k_R[rows]),
            top_p_R=self._tensor(self._top_p_R[rows]),
            min_p_R=self._tensor(self._min_p_R[rows]),
        )
        support = find_support(scaled_DV, limits)
        draw = sample_from(scaled_DV, support, uniforms_D, self._log_softmax)
        recorded_D = self._records_kept_R[rows]
        if not recorded_D.any():
            return draw
        recorded_D &= draw.sound_R.cpu().numpy()
        sizes_D = np.where(recorded_D, support.sizes_R.cpu().numpy(), 0).astype(np.int32)
        ids_DK = support.ids_RK.cpu().numpy()
        kept = KeptSets(
            ids_E=ids_DK[np.arange(ids_DK.shape[1]) < sizes_D[:, None]].astype(np.int32), sizes_T=sizes_D
        )  # fmt: skip
        return dataclasses.replace(draw, kept=kept)

    def _resize(self, count: int) -> None:
        """Set the number of rows in use, and record whether all of them set only a temperature, so that :meth:`draw`
        can use its faster path."""
        self._count = count
        self._only_temperatures = not (
            self._truncated_R[:count].any()
            or self._records_entropy_R[:count].any()
            or self._num_top_R[:count].any()
            or self._changes.any(count)
            or (self._masks is not None and self._masks.any())
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return the array as a tensor on the engine's device."""
        return torch.from_numpy(array).to(self._device)


class Changes:
    """The changes that bias and penalties make to the logits of each row. A row uses one column for each token id whose
    logit it changes: the ids of the bias and, if it has penalties, the distinct ids of prompt and answer. Sampled
    tokens add columns."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """Allocate the changes of ``num_rows`` rows on ``device``; none of them changes a logit yet."""
        self._changing_R = np.zeros(num_rows, bool)
        """Whether bias or penalties change a logit of each row."""
        self._growing_R = np.zeros(num_rows, bool)
        """Whether each row has penalties, so that each of its sampled tokens may need a new column."""
        self._max_used_R = np.zeros(num_rows, np.int64)
        """An upper bound of the columns that each row uses, which can be read without synchronising with the device."""
        self._used_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The number of columns that each row uses."""
        self._repetition_R = torch.ones(num_rows, device=device)
        """The penalties of each row, as its request sets them."""
        self._presence_R = torch.zeros(num_rows, device=device)
        self._frequency_R = torch.zeros(num_rows, device=device)
        self._ids_RU = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        """The token id of each column of each row."""
        self._bias_RU = torch.zeros(num_rows, 0, device=device)
        """The number that is added to the logit of each id."""
        self._present_RU = torch.zeros(num_rows, 0, dtype=torch.bool, device=device)
        """Whether each id is in the prompt or the answer."""
        self._counts_RU = torch.zeros(num_rows, 0, device=device)
        """How often each id is in the answer."""

    def any(self, count: int) -> bool:
        """Return whether bias or penalties change a logit of any of the first ``count`` rows."""
        return bool(self._changing_R[:count].any())

    def grows(self, rows: Index) -> npt.NDArray[np.bool_]:
        """Return for each of ``rows`` whether it has penalties, so that its changes depend on its sampled tokens."""
        growing: npt.NDArray[np.bool_] = self._growing_R[rows]
        return growing

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> bool:
        """Set up ``row`` for a sequence with the parameters ``sampling``: its bias, its penalties, and the tokens of
        its prompt and of its answer so far to which the penalties apply. Return whether they change a logit."""
        penalised = _penalised(sampling)
        self._growing_R[row] = penalised
        changes = self._changing_R[row] = penalised or bool(sampling.logit_bias)
        if not changes:
            return False
        self._repetition_R[row] = sampling.repetition_penalty
        self._presence_R[row] = sampling.presence_penalty
        self._frequency_R[row] = sampling.frequency_penalty
        given_ids = (prompt_ids_T, answer_ids_T) if penalised else ()
        penalised_ids = np.concatenate([np.zeros(0, np.int64), *given_ids])
        ids_U = np.union1d(penalised_ids, np.fromiter(sampling.logit_bias, np.int64)).astype(np.int64)
        counts_U = np.zeros(len(ids_U), np.float32)
        if penalised:
            np.add.at(counts_U, np.searchsorted(ids_U, answer_ids_T), 1)
        bias_U = np.array([sampling.logit_bias.get(token, 0.0) for token in ids_U.tolist()], np.float32)
        self._widen(len(ids_U))
        used = len(ids_U)
        self._ids_RU[row, :used] = torch.from_numpy(ids_U)
        self._bias_RU[row, :used] = torch.from_numpy(bias_U)
        self._present_RU[row, :used] = torch.from_numpy(np.isin(ids_U, penalised_ids))
        self._counts_RU[row, :used] = torch.from_numpy(counts_U)
        self._used_R[row] = self._max_used_R[row] = used
        return True

    def move(self, sources: Index, targets: Index) -> None:
        """Copy the changes of the rows ``sources`` to the rows ``targets``, after rows have left the batch."""
        if not self._changing_R[np.concatenate([sources, targets])].any():
            return
        self._changing_R[targets] = self._changing_R[sources]
        self._growing_R[targets] = self._growing_R[sources]
        self._max_used_R[targets] = self._max_used_R[sources]
        source, target = self._index(sources), self._index(targets)
        for column in (
            self._used_R, self._repetition_R, self._presence_R, self._frequency_R, self._ids_RU, self._bias_RU,
            self._present_RU, self._counts_RU,
        ):  # fmt: skip
            column[target] = column[source]

    def apply(self, logits_DV: Tensor, rows: Index) -> Tensor:
        """Return the logits ``logits_DV`` of ``rows`` after bias and penalties: a float32 copy, or ``logits_DV`` itself
        if none of the rows has a bias or penalty. ``logits_DV`` is never changed."""
        places = np.flatnonzero(self._changing_R[rows])
        if not len(places):
            return logits_DV
        at, rows_A = self._index(places), self._index(rows[places])
        ids_AU = self._ids_RU[rows_A]
        counts_AU, present_AU = self._counts_RU[rows_A], self._present_RU[rows_A]
        changed_DV = logits_DV.float() if logits_DV.dtype != torch.float32 else logits_DV.clone()
        values_AU = changed_DV[at[:, None], ids_AU] + self._bias_RU[rows_A]
        penalty_A1 = self._repetition_R[rows_A, None]
        repeated_AU = torch.where(values_AU > 0, values_AU / penalty_A1, values_AU * penalty_A1)
        values_AU = torch.where(present_AU, repeated_AU, values_AU)
        values_AU -= counts_AU * self._frequency_R[rows_A, None]
        values_AU -= (counts_AU > 0) * self._presence_R[rows_A, None]
        # an unused column writes the same value to the same place as the first column
        unused_AU = self._columns() >= self._used_R[rows_A, None]
        ids_AU = torch.where(unused_AU, ids_AU[:, :1], ids_AU)
        values_AU = torch.where(unused_AU, values_AU[:, :1], values_AU)
        changed_DV[at[:, None], ids_AU] = values_AU
        return changed_DV

    def append(self, ids_D: Tensor, rows: Index) -> None:
        """Count ``ids_D``, the tokens just sampled for ``rows``, in the rows that have penalties."""
        places = np.flatnonzero(self._growing_R[rows])
        if not len(places):
            return
        if int(self._max_used_R[rows[places]].max()) == self._ids_RU.shape[1]:
            self._widen(self._ids_RU.shape[1] + 1)
        self._max_used_R[rows[places]] += 1
        rows_A, new_A = self._index(rows[places]), ids_D[self._index(places)]
        used_A = self._used_R[rows_A]
        columns = self._columns()
        same_AU = (self._ids_RU[rows_A] == new_A[:, None]) & (columns < used_A[:, None])
        known_A = same_AU.any(dim=1)
        column_A = torch.where(known_A, same_AU.int().argmax(dim=1), used_A)
        self._ids_RU[rows_A, column_A] = new_A
        self._present_RU[rows_A, column_A] = True
        # not a product: an earlier sequence may have left an infinite value there, and inf * 0 is NaN
        self._bias_RU[rows_A, column_A] = torch.where(known_A, self._bias_RU[rows_A, column_A], 0.0)
        self._counts_RU[rows_A, column_A] = torch.where(known_A, self._counts_RU[rows_A, column_A], 0.0) + 1
        self._used_R[rows_A] = used_A + ~known_A

    @torch.inference_mode(False)  # tensors made in inference mode could not be written to outside of a pass
    def _widen(self, width: int) -> None:
        """Widen the arrays to at least ``width`` columns."""
        missing = width - self._ids_RU.shape[1]
        if missing <= 0:
            return
        more = (0, max(missing, _FEWEST_COLUMNS, self._ids_RU.shape[1]))
        pad = torch.nn.functional.pad
        self._ids_RU, self._bias_RU = pad(self._ids_RU, more), pad(self._bias_RU, more)
        self._present_RU, self._counts_RU = pad(self._present_RU, more), pad(self._counts_RU, more)

    def _columns(self) -> Tensor:
        """Return the indices of the columns, for comparison with the number of columns that each row uses."""
        return torch.arange(self._ids_RU.shape[1], device=self._ids_RU.device)

    def _index(self, places: Index) -> Tensor:
        """Return the indices ``places`` as a tensor on the device of the changes."""
        return torch.from_numpy(places).to(self._ids_RU.device)


def _penalised(sampling: Sampling) -> bool:
    """Return whether the request sets a repetition, presence or frequency penalty."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _interleave(first: Draw, second: Draw, places_D: Index) -> Draw:
    """Merge two draws into one, in the order of the batch. ``places_D`` are the indices in the batch of the rows of
    ``first``, followed by those of the rows of ``second``, which has no kept-sets."""
    order = np.argsort(places_D)
    back = torch.from_numpy(order).to(first.ids_R.device)
    kept = first.kept
    if kept is not None:
        kept = KeptSets.concat([kept, KeptSets.none(len(second.ids_R))]).take(order)
    return Draw(
        ids_R=torch.cat([first.ids_R, second.ids_R])[back],
        logprobs_R=torch.cat([first.logprobs_R, second.logprobs_R])[back],
        sound_R=torch.cat([first.sound_R, second.sound_R])[back],
        kept=kept,
    )
