"""What a teacher says of tokens that somebody else has sampled.

Shape legend: T tokens of one span, K entries of a teacher's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.versions import NOT_SAMPLED


class TopScores(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says of tokens that are given, and what it would rather have said."""

    logprobs_T: FloatColumn
    """Of each token; the first one's is 0."""
    ids_TK: npt.NDArray[np.int32]
    """The likeliest entries in the place of each token, the likeliest first; 0 in that of the first."""
    logs_TK: npt.NDArray[np.float32]
    """Their log-probabilities within the whole vocabulary."""


class Taught(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to learn from a teacher that is somewhere else: aligned with the tokens that it is about.

    >>> taught = Taught.none(1, 2) + Taught(
    ...     logprobs_T=np.array([-0.5], np.float32), versions_T=np.array([0], np.int32),
    ...     ids_TK=np.array([[7, 3]], np.int32), logs_TK=np.array([[-0.5, -1.5]], np.float32))
    >>> len(taught), taught.known_T.tolist(), taught[1:].ids_TK.tolist()
    (2, [False, True], [[7, 3]])
    """

    logprobs_T: FloatColumn
    """log ν of each token, under the temperature and the kept-set that it was sampled with; NaN where no teacher was
    asked."""
    versions_T: IntColumn
    """The teacher's weights: a version of the run, ``FROZEN`` where they are none of the run's, ``NOT_SAMPLED`` where
    no teacher was asked."""
    ids_TK: npt.NDArray[np.int32]
    """The likeliest entries of the teacher's distribution that the token was drawn from, the likeliest first. K is 0
    where nobody wanted them."""
    logs_TK: npt.NDArray[np.float32]
    """Their log-probabilities, under the temperature, within the whole vocabulary."""

    @classmethod
    def none(cls, count: int, num_entries: int) -> Taught:
        """``count`` tokens of which no teacher was asked."""
        return cls(
            logprobs_T=np.full(count, np.nan, np.float32),
            versions_T=np.full(count, NOT_SAMPLED, np.int32),
            ids_TK=np.zeros((count, num_entries), np.int32),
            logs_TK=np.zeros((count, num_entries), np.float32),
        )

    @classmethod
    def concat(cls, parts: Sequence[Taught]) -> Taught:
        """The tokens of the parts, one after the other; at least one part. Of as many entries as all of those have that
        have some; a part without any is one that no teacher was asked of then."""
        num = min((each.ids_TK.shape[1] for each in parts if each.ids_TK.shape[1]), default=0)
        alike = [each if each.ids_TK.shape[1] >= num else cls.none(len(each), num) for each in parts]
        return cls(
            logprobs_T=np.concatenate([each.logprobs_T for each in alike]),
            versions_T=np.concatenate([each.versions_T for each in alike]),
            ids_TK=np.concatenate([each.ids_TK[:, :num] for each in alike]),
            logs_TK=np.concatenate([each.logs_TK[:, :num] for each in alike]),
        )

    def spread(self, places: npt.NDArray[np.int64], count: int) -> Taught:
        """The same as of ``count`` tokens: these lie at ``places``, and no teacher was asked of the others."""
        whole = Taught.none(count, self.ids_TK.shape[1])
        whole.logprobs_T[places], whole.versions_T[places] = self.logprobs_T, self.versions_T
        whole.ids_TK[places], whole.logs_TK[places] = self.ids_TK, self.logs_TK
        return whole

    @property
    def known_T(self) -> npt.NDArray[np.bool_]:
        """The tokens that a teacher was asked of."""
        known_T: npt.NDArray[np.bool_] = ~np.isnan(self.logprobs_T)
        return known_T

    def problem(self, count: int) -> str:
        """Why this cannot be what a teacher says of ``count`` tokens, in words; empty if it can."""
        if not len(self.logprobs_T) == len(self.versions_T) == len(self.ids_TK) == len(self.logs_TK) == count:
            return f"a teacher's words of {len(self.logprobs_T)} tokens for {count} tokens"
        if self.ids_TK.ndim != 2 or self.ids_TK.shape != self.logs_TK.shape:
            return f"entries of shape {self.ids_TK.shape} with log-probabilities of shape {self.logs_TK.shape}"
        return ""

    def __len__(self) -> int:
        return len(self.logprobs_T)

    def __getitem__(self, span: slice | npt.NDArray[np.bool_]) -> Taught:
        return Taught(
            logprobs_T=self.logprobs_T[span],
            versions_T=self.versions_T[span],
            ids_TK=self.ids_TK[span],
            logs_TK=self.logs_TK[span],
        )

    def __add__(self, other: Taught) -> Taught:
        return Taught.concat([self, other])
