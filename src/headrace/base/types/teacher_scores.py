"""The scores of a teacher: the log-probabilities that it assigns to tokens of another model. ν is its distribution.

Shape legend: T tokens of one span, K entries of a teacher's distribution (its likeliest vocabulary entries).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.versions import NOT_SAMPLED


class TopScores(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities that a model assigns to T tokens of any origin, and the K likeliest vocabulary entries of
    the model at the position of each token."""

    logprobs_T: FloatColumn
    """The log-probability of each token; 0 for the first token of a sequence, which has no context."""
    ids_TK: npt.NDArray[np.int32]
    """The likeliest entries at the position of each token, the likeliest first; 0 for the first token of a sequence."""
    logs_TK: npt.NDArray[np.float32]
    """The log-probabilities of those entries, normalised over the whole vocabulary."""

    @classmethod
    def concat(cls, parts: Sequence[TopScores]) -> TopScores:
        """Return the concatenation of ``parts``, which must not be empty and must have the same number of entries K."""
        return cls(
            logprobs_T=np.concatenate([part.logprobs_T for part in parts]),
            ids_TK=np.concatenate([part.ids_TK for part in parts]),
            logs_TK=np.concatenate([part.logs_TK for part in parts]),
        )

    def __len__(self) -> int:
        """Return the number of tokens T."""
        return len(self.logprobs_T)

    def __getitem__(self, span: slice | npt.NDArray[np.int64]) -> TopScores:
        """Return the scores of the tokens in ``span``, a slice or indices."""
        return TopScores(logprobs_T=self.logprobs_T[span], ids_TK=self.ids_TK[span], logs_TK=self.logs_TK[span])


class TeacherScores(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities that a teacher assigns to the tokens of a span, with one entry for each token.

    >>> scores = TeacherScores.none(1, 2) + TeacherScores(
    ...     logprobs_T=np.array([-0.5], np.float32), versions_T=np.array([0], np.int32),
    ...     ids_TK=np.array([[7, 3]], np.int32), logs_TK=np.array([[-0.5, -1.5]], np.float32))
    >>> len(scores), scores.known_T.tolist(), scores[1:].ids_TK.tolist()
    (2, [False, True], [[7, 3]])
    """

    logprobs_T: FloatColumn
    """log ν of each token, under the temperature and the kept-set that it was sampled with; NaN for a token without
    a score."""
    versions_T: IntColumn
    """The version of the teacher's weights: a version of the run, ``FROZEN`` for weights of another model,
    ``NOT_SAMPLED`` for a token without a score."""
    ids_TK: npt.NDArray[np.int32]
    """The likeliest entries of the teacher's distribution at each position, the likeliest first. K is 0 if they were
    not requested."""
    logs_TK: npt.NDArray[np.float32]
    """The log-probabilities of those entries, under the temperature, normalised over the whole vocabulary."""

    @classmethod
    def none(cls, count: int, num_entries: int) -> TeacherScores:
        """Return the record of ``count`` tokens without scores, with ``num_entries`` entries K for each."""
        return cls(
            logprobs_T=np.full(count, np.nan, np.float32),
            versions_T=np.full(count, NOT_SAMPLED, np.int32),
            ids_TK=np.zeros((count, num_entries), np.int32),
            logs_TK=np.zeros((count, num_entries), np.float32),
        )

    @classmethod
    def concat(cls, parts: Sequence[TeacherScores]) -> TeacherScores:
        """Return the scores of the tokens of all ``parts``, in order; ``parts`` must not be empty. K becomes the
        smallest number of entries among the parts with entries. A part without entries then counts as a part without
        scores."""
        num = min((each.ids_TK.shape[1] for each in parts if each.ids_TK.shape[1]), default=0)
        alike = [each if each.ids_TK.shape[1] >= num else cls.none(len(each), num) for each in parts]
        return cls(
            logprobs_T=np.concatenate([each.logprobs_T for each in alike]),
            versions_T=np.concatenate([each.versions_T for each in alike]),
            ids_TK=np.concatenate([each.ids_TK[:, :num] for each in alike]),
            logs_TK=np.concatenate([each.logs_TK[:, :num] for each in alike]),
        )

    def scatter(self, positions: npt.NDArray[np.int64], count: int) -> TeacherScores:
        """Return a record of ``count`` tokens with these scores at the indices ``positions``, and without scores
        elsewhere."""
        whole = TeacherScores.none(count, self.ids_TK.shape[1])
        whole.logprobs_T[positions], whole.versions_T[positions] = self.logprobs_T, self.versions_T
        whole.ids_TK[positions], whole.logs_TK[positions] = self.ids_TK, self.logs_TK
        return whole

    @property
    def known_T(self) -> npt.NDArray[np.bool_]:
        """Return, for each token, whether a teacher scored it."""
        known_T: npt.NDArray[np.bool_] = ~np.isnan(self.logprobs_T)
        return known_T

    def problem(self, count: int) -> str:
        """Return why this cannot be the scores of ``count`` tokens, in words; empty if it can."""
        if not len(self.logprobs_T) == len(self.versions_T) == len(self.ids_TK) == len(self.logs_TK) == count:
            return f"a teacher's scores of {len(self.logprobs_T)} tokens for {count} tokens"
        if self.ids_TK.ndim != 2 or self.ids_TK.shape != self.logs_TK.shape:
            return f"entries of shape {self.ids_TK.shape} with log-probabilities of shape {self.logs_TK.shape}"
        return ""

    def __len__(self) -> int:
        """Return the number of tokens T, scored or not."""
        return len(self.logprobs_T)

    def __getitem__(self, span: slice | npt.NDArray[np.bool_]) -> TeacherScores:
        """Return the scores of the tokens that ``span``, a slice or a mask over the tokens, selects."""
        return TeacherScores(
            logprobs_T=self.logprobs_T[span],
            versions_T=self.versions_T[span],
            ids_TK=self.ids_TK[span],
            logs_TK=self.logs_TK[span],
        )

    def __add__(self, other: TeacherScores) -> TeacherScores:
        """Return the scores of these tokens followed by those of ``other``."""
        return TeacherScores.concat([self, other])
