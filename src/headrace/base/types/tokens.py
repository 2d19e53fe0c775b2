"""Spans of tokens with the columns that were recorded for them.

Shape legend: T tokens of one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.versions import FROZEN, NOT_SAMPLED, oldest

__all__ = ["NO_TOKENS", "FloatColumn", "IntColumn", "Tokens", "find_version_range"]

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A contiguous span of tokens with all columns that were recorded for them. All columns have the same length, which
    is checked when a span is created or decoded.

    >>> span = Tokens.observed([5, 6]) + Tokens(ids_T=[7], logprobs_T=[-0.5], versions_T=[3])
    >>> len(span), span.sampled_T.tolist(), span.versions_T.tolist()
    (3, [False, False, True], [-1, -1, 3])
    """

    ids_T: IntColumn
    """The vocabulary ids, exactly as sampled or as received; int32."""
    logprobs_T: FloatColumn
    """log μ: the log-probability of each token under the distribution from which it was sampled; 0 for a token that was
    not sampled. A value that is not finite is kept; the loss drops and counts such a token."""
    versions_T: IntColumn
    """The version of the weights that sampled each token: ``NOT_SAMPLED`` if no policy did, ``FROZEN`` for weights that
    are not trained, a number below ``NOT_SAMPLED`` for a :func:`~headrace.base.types.versions.mixed_version`."""
    kept: KeptSets | None = None
    """The kept-set that each token was drawn from; ``None`` if none was recorded."""
    routing: Routing | None = None
    """The experts that computed each token as an input; ``None`` if none were recorded."""
    entropies_T: FloatColumn | None = None
    """The entropy of the distribution from which each token was drawn, in nats, after the temperature and before
    truncation; 0 for a token without a record. ``None`` if no token has a record."""
    teacher_scores: TeacherScores | None = msgspec.field(default=None, name="taught")  # its name in stored runs
    """A teacher's scores of the tokens; ``None`` if no teacher scored any."""

    def __post_init__(self) -> None:
        """Convert the columns to their dtypes. Raises ``ValueError`` if a column does not match the tokens: it has a
        wrong length, or a kept-set does not contain the sampled token."""
        for name, given, dtype in (
            ("ids_T", self.ids_T, _INT),
            ("logprobs_T", self.logprobs_T, _FLOAT),
            ("versions_T", self.versions_T, _INT),
            ("entropies_T", self.entropies_T, _FLOAT),
        ):
            if given is None:
                continue
            column: Any = given
            # nearly all columns come from an engine with the right dtype, and are not copied
            if type(given) is not np.ndarray or given.dtype != dtype or not given.flags.c_contiguous:
                column = np.ascontiguousarray(given, dtype)
                msgspec.structs.force_setattr(self, name, column)
            if column.ndim != 1 or len(column) != len(self.ids_T):
                raise ValueError(f"{name} has shape {column.shape}, but ids_T has {len(self.ids_T)} tokens")
        problem = (
            (self.kept and self.kept.problem(self.ids_T))
            or (self.routing and self.routing.problem(len(self)))
            or (self.teacher_scores and self.teacher_scores.problem(len(self)))
        )
        if problem:
            raise ValueError(problem)

    @classmethod
    def observed(cls, ids: Sequence[int] | IntColumn) -> Tokens:
        """Return the span of ``ids``, tokens that no policy has sampled, such as a prompt."""
        ids_T = np.asarray(ids, np.int32)
        if len(ids_T) > len(_NO_VERSIONS):
            return cls(
                ids_T=ids_T,
                logprobs_T=np.zeros(len(ids_T), np.float32),
                versions_T=np.full(len(ids_T), NOT_SAMPLED, np.int32),
            )
        # every episode begins with a prompt: short prompts share their constant columns
        return cls(ids_T=ids_T, logprobs_T=_NO_LOGPROBS[: len(ids_T)], versions_T=_NO_VERSIONS[: len(ids_T)])

    @classmethod
    def concat(cls, parts: Sequence[Tokens]) -> Tokens:
        """Return the tokens of all ``parts`` in order, with all their columns."""
        if not parts:
            return NO_TOKENS
        if len(parts) == 1:
            return parts[0]
        return cls(
            ids_T=np.concatenate([part.ids_T for part in parts]),
            logprobs_T=np.concatenate([part.logprobs_T for part in parts]),
            versions_T=np.concatenate([part.versions_T for part in parts]),
            kept=_concat_kept(parts),
            routing=_concat_routing(parts),
            entropies_T=_concat_entropies(parts),
            teacher_scores=_concat_teacher_scores(parts),
        )

    @property
    def sampled_T(self) -> npt.NDArray[np.bool_]:
        """Return, for each token, whether it was sampled: by a policy of the run or by an agent with frozen weights."""
        sampled_T: npt.NDArray[np.bool_] = self.versions_T != NOT_SAMPLED
        return sampled_T

    @property
    def any_sampled(self) -> bool:
        """Return whether any of the tokens was sampled."""
        if self.versions_T.base is _NO_VERSIONS:  # a short prompt
            return False
        return bool(len(self.ids_T)) and (int(self.versions_T[-1]) != NOT_SAMPLED or bool(self.sampled_T.any()))

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that were sampled, by a policy of the run or by an agent with frozen weights."""
        return int(np.count_nonzero(self.versions_T != NOT_SAMPLED))

    def __len__(self) -> int:
        """Return the number of tokens T."""
        return len(self.ids_T)

    def __getitem__(self, span: slice) -> Tokens:
        """Return the tokens in the slice ``span``, with all their columns."""
        return Tokens(
            ids_T=self.ids_T[span],
            logprobs_T=self.logprobs_T[span],
            versions_T=self.versions_T[span],
            kept=None if self.kept is None else self.kept[span],
            routing=None if self.routing is None else self.routing[span],
            entropies_T=None if self.entropies_T is None else self.entropies_T[span],
            teacher_scores=None if self.teacher_scores is None else self.teacher_scores[span],
        )

    def __add__(self, other: Tokens) -> Tokens:
        """Return these tokens followed by the tokens of ``other``."""
        return Tokens.concat([self, other])


class ViewedTokens(Tokens, frozen=True, kw_only=True):
    """Tokens whose columns are views of a file, with the count that is asked for most often: no page of the file is
    read into memory for it."""

    known_sampled: int
    """The number of tokens that were sampled."""

    @property
    def any_sampled(self) -> bool:
        """Return whether any of the tokens was sampled."""
        return self.known_sampled > 0

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that were sampled."""
        return self.known_sampled


_NO_LOGPROBS, _NO_VERSIONS = np.zeros(4096, np.float32), np.full(4096, NOT_SAMPLED, np.int32)
"""The constant columns of prompts of up to 4096 tokens, read-only."""
for _column in (_NO_LOGPROBS, _NO_VERSIONS):
    _column.flags.writeable = False
NO_TOKENS = Tokens.observed([])
"""The empty span."""


def find_version_range(spans: Sequence[Tokens]) -> tuple[int, int] | None:
    """Return the oldest and newest version of the policy that sampled a token of ``spans``; ``None`` if the policy
    sampled none of them.

    >>> find_version_range([Tokens(ids_T=[7, 8], logprobs_T=[-0.5, -0.5], versions_T=[3, 4]), Tokens.observed([5])])
    (3, 4)
    """
    found = [least_and_most for span in spans if (least_and_most := _find_range(span.versions_T))]
    return (min(least for least, _ in found), max(most for _, most in found)) if found else None


def _find_range(versions_T: IntColumn) -> tuple[int, int] | None:
    """Return the oldest and newest version of the policy among ``versions_T``; ``None`` if the policy sampled none of
    these tokens. In the common cases, where all or none of the tokens are sampled, this takes two reductions."""
    if not len(versions_T):
        return None
    least, most = int(np.minimum.reduce(versions_T)), int(np.maximum.reduce(versions_T))
    if least == most == NOT_SAMPLED:
        return None
    if least < 0 or most == FROZEN:
        sampled = oldest(versions_T[(versions_T != NOT_SAMPLED) & (versions_T != FROZEN)])
        return (int(sampled.min()), int(sampled.max())) if len(sampled) else None
    return least, most


def _concat_kept(parts: Sequence[Tokens]) -> KeptSets | None:
    """Return the kept-sets of consecutive parts, empty for a part without kept-sets; ``None`` if no part has any."""
    if all(part.kept is None for part in parts):
        return None
    return KeptSets.concat([KeptSets.none(len(part)) if part.kept is None else part.kept for part in parts])


def _concat_entropies(parts: Sequence[Tokens]) -> FloatColumn | None:
    """Return the entropies of consecutive parts, with 0 for a part without entropies; ``None`` if no part has them."""
    if all(part.entropies_T is None for part in parts):
        return None
    known = [np.zeros(len(part), np.float32) if part.entropies_T is None else part.entropies_T for part in parts]
    return np.concatenate(known)


def _concat_teacher_scores(parts: Sequence[Tokens]) -> TeacherScores | None:
    """Return the teacher's scores of consecutive parts, with no scores for a part that has none; ``None`` if no part
    has scores."""
    if all(part.teacher_scores is None for part in parts):
        return None
    return TeacherScores.concat(
        [TeacherScores.none(len(part), 0) if part.teacher_scores is None else part.teacher_scores for part in parts]
    )


def _concat_routing(parts: Sequence[Tokens]) -> Routing | None:
    """Return the routing of consecutive parts, unknown for a part without routing; ``None`` if no part has routing."""
    experts = next((part.routing.experts_RLK for part in parts if part.routing is not None), None)
    if experts is None:
        return None
    _, num_layers, top_k = experts.shape
    return Routing.concat(
        [
            part.routing
            if part.routing is not None
            else Routing.unknown(len(part), num_layers=num_layers, top_k=top_k, dtype=experts.dtype)
            for part in parts
        ]
    )
