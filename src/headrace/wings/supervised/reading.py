"""The rows of a run: they are read from their sources, rendered as samples (sequences of tokens with a loss mask), and
checked against the limits of the model. A row that cannot be trained is refused, or left out if the settings allow it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import DataError
from headrace.rollout.environments.data import Row, as_rows, load_rows
from headrace.run.observe.words import plural
from headrace.wings.supervised.config import RowsConfig
from headrace.wings.supervised.rendering import RenderedSample, RowProblem

Render = Callable[[Mapping[str, Any]], tuple[RenderedSample, ...]]
"""A function that renders a row as its samples: one, or two for a pair. It raises :class:`RowProblem`."""
PYTHON = "data"
"""The name, in messages, of the source of rows that were passed in Python."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is not trained because it is invalid; also a line of ``left_out.jsonl``."""

    source: str
    """The path of the file, or ``data`` for rows that were passed in Python."""
    row: int
    """The number of the row in its source, from 1."""
    reason: str
    """The reason in one word, by which rows are counted, such as ``too_long``."""
    problem: str
    """A description of the problem in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The rows of one source (a file, or rows passed in Python) to train on, in the order of the source."""

    name: str
    """The path of the file, or ``data`` for rows that were passed in Python."""
    weight: float | None
    """The share of this source among the trained rows, relative to the weights of the other sources; ``None``: every
    row is trained once per epoch."""
    rows: list[tuple[RenderedSample, ...]]
    """The samples of each row: one, or two for a pair."""
    numbers: list[int]
    """The number of each row in the source, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """The limits for each row, in tokens."""

    length: int
    """The largest number of tokens of one sample."""
    row_length: int
    """The largest total number of tokens of a row's samples, because they are computed in one pass."""
    length_origin: str
    """The origin of ``length`` in words for messages, such as the name of a setting."""
    vocab_size: int
    """The number of token ids of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """The rows of a run for one purpose (training or evaluation), and the rows that were left out."""

    sources: list[SourceRows]
    left_out: list[LeftOut]
    """The rows that were left out."""
    num_cut: int
    """The number of rows that were truncated."""

    @property
    def rows(self) -> list[tuple[RenderedSample, ...]]:
        """Return the samples of every row, one source after the other: one sample per row, or two for a pair."""
        return [row for source in self.sources for row in source.rows]

    def place(self, row: int) -> str:
        """Return a row's source and its number there, as text for messages. ``row`` is its index in :attr:`rows`.
        Raises ``IndexError`` if there is no such row."""
        for source in self.sources:
            if row < len(source.rows):
                return f"{source.name}, row {source.numbers[row]}"
            row -= len(source.rows)
        raise IndexError(row)

    def fingerprint(self) -> str:
        """Return a hash of all tokens, masks, sides and teacher's scores in order, with which a resumed run checks that
        its rows are unchanged."""
        digest = hashlib.blake2b(digest_size=8)
        for sample in (sample for row in self.rows for sample in row):
            digest.update(sample.ids_T.tobytes() + sample.mask_T.tobytes() + bytes([sample.side % 256, 255]))
            if sample.teacher_scores is not None:
                digest.update(sample.teacher_scores.ids_TK.tobytes() + sample.teacher_scores.logs_TK.tobytes())
        return digest.hexdigest()

    def words(self) -> str:
        """Return the numbers of rows that were left out or truncated, with the reasons, in words for a message; empty
        if there are none."""
        parts = []
        if self.left_out:
            parts.append(f"{plural(len(self.left_out), 'row')} left out ({_reason_counts(self.left_out)})")
        if self.num_cut:
            parts.append(f"{plural(self.num_cut, 'row')} cut off at their limit")
        return ", ".join(parts)


def read_rows(
    files: Sequence[tuple[str, float | None]],
    data: Iterable[Mapping[str, Any]] | None,
    config: RowsConfig,
    render: Render,
    *,
    limits: RowLimits,
) -> RowSet:
    """Read the rows of ``files`` (each a path and a weight), or of ``data`` if it is given, and render each as samples
    with ``render``. Rows beyond ``limits`` are refused, left out or truncated, as ``config`` specifies.

    Raises :class:`~headrace.base.errors.DataError` for rows that cannot be trained, unless ``config`` leaves them out,
    and for a source without any other rows. The error names the first such row and counts the others.
    """
    sources_of_rows = [(PYTHON, None, as_rows(data))] if data is not None else [
        (path, weight, load_rows(Path(path))) for path, weight in files
    ]  # fmt: skip
    sources, left_out, num_cut = [], list[LeftOut](), 0
    first: RowProblem | None = None
    for name, weight, rows in sources_of_rows:
        source = SourceRows(name=name, weight=weight, rows=[], numbers=[])
        for number, row in enumerate(rows, start=1):
            try:
                samples, cut = _fit_to_limits(render(_rename_columns(row, config)), config, limits)
            except RowProblem as problem:
                first = first or problem
                left_out.append(LeftOut(source=name, row=number, reason=problem.reason, problem=problem.problem))
                continue
            num_cut += cut
            source.rows.append(samples)
            source.numbers.append(number)
        sources.append(source)
    found = RowSet(sources=sources, left_out=left_out, num_cut=num_cut)
    _refuse_bad_rows(found, first, config)
    return found


def _refuse_bad_rows(rows: RowSet, first: RowProblem | None, config: RowsConfig) -> None:
    """Raise :class:`~headrace.base.errors.DataError` if a row was left out that the settings do not allow to leave out,
    or if a source has no rows left. ``first`` is the problem of the first row that was left out; ``None`` if there was
    none. ``rows`` are the rows that were read, and ``config`` says which may be left out."""
    hard = [row for row in rows.left_out if not _may_be_left_out(row, config)]
    empty = next((source for source in rows.sources if not source.rows), None)
    if first is None or (not hard and empty is None):
        return
    one = (hard or rows.left_out)[0]
    others = f"; {plural(len(rows.left_out), 'row')} in all cannot be trained ({_reason_counts(rows.left_out)})"
    words = f"{one.source}, row {one.row}: {one.problem}{others if len(rows.left_out) > 1 else ''}"
    if empty is not None and not hard:
        raise DataError(f"{empty.name} has no row left to train: {words}", remedy=first.remedy)
    leave = "data.long_rows = 'skip'" if one.reason == "too_long" else "data.bad_rows = 'skip'"
    raise DataError(words, remedy=f"{first.remedy}; or set {leave} to leave such rows out, listed and counted")


def _may_be_left_out(row: LeftOut, config: RowsConfig) -> bool:
    """Return whether the settings allow to leave out this row: ``data.long_rows`` for a row that is too long,
    ``data.bad_rows`` for any other problem."""
    return (config.long_rows if row.reason == "too_long" else config.bad_rows) == "skip"


def _reason_counts(rows: Iterable[LeftOut]) -> str:
    """Return the number of left-out rows for each reason, as text, such as ``too_long 3, no_text 1``."""
    return ", ".join(f"{reason} {count:,}" for reason, count in Counter(row.reason for row in rows).most_common())


def _rename_columns(row: Row, config: RowsConfig) -> Row:
    """Return a row whose columns are renamed by ``data.columns``."""
    renamed = {name: row[column] for name, column in config.columns.items() if column in row}
    return {**row, **renamed}


def _fit_to_limits(
    samples: tuple[RenderedSample, ...], config: RowsConfig, limits: RowLimits
) -> tuple[tuple[RenderedSample, ...], bool]:
    """Return the samples of a row within the limits, and whether they were truncated, which the settings must allow.
    Raises :class:`RowProblem` for a row that is too long, and for token ids that the model does not have. ``config``
    are the settings."""
    teacher_ids = [sample.teacher_scores.ids_TK for sample in samples if sample.teacher_scores is not None]
    largest = max(int(ids.max()) for ids in (*teacher_ids, *(sample.ids_T for sample in samples)))
    if largest >= limits.vocab_size:
        raise RowProblem(
            "unknown_token",
            f"it has the token id {largest}, and the model knows 0 to {limits.vocab_size - 1}",
            remedy="tokenise the rows with this model's tokenizer; a teacher must have the same vocabulary",
        )
    most = min(limits.length, limits.row_length // len(samples)) if config.long_rows == "cut" else limits.length
    longest = max(len(sample.ids_T) for sample in samples)
    whole = sum(len(sample.ids_T) for sample in samples)
    if longest <= most and whole <= limits.row_length:
        return samples, False
    if config.long_rows == "cut":
        cut = tuple(_truncate(sample, most) for sample in samples)
        if len(cut) == 2 and np.array_equal(cut[0].ids_T, cut[1].ids_T):
            raise RowProblem(
                "same_answers",
                f"chosen and rejected are the same in their first {most:,} tokens, to which they are cut",
                remedy="allow longer rows, or remove the row",
            )
        return cut, True
    if longest > limits.length:
        raise RowProblem(
            "too_long",
            f"it has {longest:,} tokens, more than {limits.length_origin}",
            remedy="set data.long_rows = 'cut', or allow longer rows",
        )
    raise RowProblem(
        "too_long",
        f"its two answers have {whole:,} tokens together, and one pass of the learner holds "
        f"learner.tokens_per_microbatch={limits.row_length}",
        remedy=f"set learner.tokens_per_microbatch >= {whole}",
    )


def _truncate(sample: RenderedSample, max_tokens: int) -> RenderedSample:
    """Return a sample truncated to its first ``max_tokens`` tokens. Raises :class:`RowProblem` if none of them carries
    loss."""
    mask_T = sample.mask_T[:max_tokens]
    if not mask_T.any():
        raise RowProblem(
            "no_loss_tokens",
            f"it has {len(sample.ids_T):,} tokens, and none of the first {max_tokens:,} carries loss",
            remedy="allow longer rows, or remove the row",
        )
    scores = None if sample.teacher_scores is None else sample.teacher_scores[:max_tokens]
    return replace(sample, ids_T=sample.ids_T[:max_tokens], mask_T=mask_T, teacher_scores=scores)
