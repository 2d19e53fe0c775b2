"""The rows of a run: read from their sources, rendered, checked against what the model can hold, and counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import DataError
from headrace.rollout.environments.data import Row, as_rows, load_rows
from headrace.run.observe.words import plural
from headrace.wings.supervised.config import RowsConfig
from headrace.wings.supervised.rendering import RenderedSample, RowProblem

Render = Callable[[Mapping[str, Any]], tuple[RenderedSample, ...]]
"""Renders a row as its samples: one, or the two of a pair. It raises :class:`RowProblem`."""
PYTHON = "data"
"""The name of rows that were passed in Python."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is not trained: a line of ``left_out.jsonl``."""

    source: str
    row: int
    """The number of the row in its source, from 1."""
    reason: str
    problem: str
    """The reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The rows of one source that are trained, in the order of the source."""

    name: str
    weight: float | None
    """The share of the source; ``None``: every row once per epoch."""
    rows: list[tuple[RenderedSample, ...]]
    numbers: list[int]
    """The number of each row in the source, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """The limits that a row must keep."""

    length: int
    """The most tokens of one sample."""
    together: int
    """The most tokens of all samples of a row, which are computed in one pass."""
    why: str
    """The setting or fact that ``length`` comes from."""
    vocab_size: int
    """The number of token ids that the model knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """All rows of one purpose: to train on, or held out."""

    sources: list[SourceRows]
    left_out: list[LeftOut]
    num_cut: int
    """The number of rows that were cut off at their limit."""

    @property
    def rows(self) -> list[tuple[RenderedSample, ...]]:
        """Return the rows of all sources, one source after the other."""
        return [row for source in self.sources for row in source.rows]

    def place(self, row: int) -> str:
        """Return the source and the number of a row of :attr:`rows`, for people."""
        for source in self.sources:
            if row < len(source.rows):
                return f"{source.name}, row {source.numbers[row]}"
            row -= len(source.rows)
        raise IndexError(row)

    def fingerprint(self) -> str:
        """Return a hash of all tokens and masks, in their order."""
        digest = hashlib.blake2b(digest_size=8)
        for sample in (sample for row in self.rows for sample in row):
            digest.update(sample.ids_T.tobytes() + sample.mask_T.tobytes() + bytes([sample.side % 256, 255]))
            if sample.teacher_scores is not None:
                digest.update(sample.teacher_scores.ids_TK.tobytes() + sample.teacher_scores.logs_TK.tobytes())
        return digest.hexdigest()

    def words(self) -> str:
        """Return what was left out and cut off, in words; empty where nothing was."""
        parts = []
        if self.left_out:
            parts.append(f"{plural(len(self.left_out), 'row')} left out ({_counted(self.left_out)})")
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
    """Read and render the rows of ``files`` (each a path and a weight), or ``data`` in their place.

    Raises :class:`~headrace.base.errors.DataError` that names the first row that cannot be trained and counts the
    others, unless ``data.bad_rows`` leaves them out; and where a source has no row left.
    """
    given = [(PYTHON, None, as_rows(data))] if data is not None else [
        (path, weight, load_rows(Path(path))) for path, weight in files
    ]  # fmt: skip
    sources, left_out, num_cut = [], list[LeftOut](), 0
    first: RowProblem | None = None
    for name, weight, rows in given:
        source = SourceRows(name=name, weight=weight, rows=[], numbers=[])
        for number, row in enumerate(rows, start=1):
            try:
                samples, cut = _fitted(render(_renamed(row, config)), config, limits)
            except RowProblem as problem:
                first = first or problem
                left_out.append(LeftOut(source=name, row=number, reason=problem.reason, problem=problem.problem))
                continue
            num_cut += cut
            source.rows.append(samples)
            source.numbers.append(number)
        sources.append(source)
    found = RowSet(sources=sources, left_out=left_out, num_cut=num_cut)
    _refuse(found, first, config)
    return found


def _refuse(found: RowSet, first: RowProblem | None, config: RowsConfig) -> None:
    """Raise the error of rows that cannot be trained, unless they may be left out and others remain."""
    hard = [row for row in found.left_out if not _may_leave(row, config)]
    empty = next((source for source in found.sources if not source.rows), None)
    if first is None or (not hard and empty is None):
        return
    one = (hard or found.left_out)[0]
    others = f"; {plural(len(found.left_out), 'row')} in all cannot be trained ({_counted(found.left_out)})"
    words = f"{one.source}, row {one.row}: {one.problem}{others if len(found.left_out) > 1 else ''}"
    if empty is not None and not hard:
        raise DataError(f"{empty.name} has no row left to train: {words}", remedy=first.remedy)
    leave = "data.long_rows = 'skip'" if one.reason == "too_long" else "data.bad_rows = 'skip'"
    raise DataError(words, remedy=f"{first.remedy}; or set {leave} to leave such rows out, listed and counted")


def _may_leave(row: LeftOut, config: RowsConfig) -> bool:
    return (config.long_rows if row.reason == "too_long" else config.bad_rows) == "skip"


def _counted(rows: Iterable[LeftOut]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in Counter(row.reason for row in rows).most_common())


def _renamed(row: Row, config: RowsConfig) -> Row:
    given = {name: row[column] for name, column in config.columns.items() if column in row}
    return {**row, **given}


def _fitted(
    samples: tuple[RenderedSample, ...], config: RowsConfig, limits: RowLimits
) -> tuple[tuple[RenderedSample, ...], bool]:
    """Return the samples of a row within the limits, and whether some were cut off."""
    said = [sample.teacher_scores.ids_TK for sample in samples if sample.teacher_scores is not None]
    largest = max(int(ids.max()) for ids in (*said, *(sample.ids_T for sample in samples)))
    if largest >= limits.vocab_size:
        raise RowProblem(
            "unknown_token",
            f"it has the token id {largest}, and the model knows 0 to {limits.vocab_size - 1}",
            remedy="tokenise the rows with this model's tokenizer; a teacher must have the same vocabulary",
        )
    most = min(limits.length, limits.together // len(samples)) if config.long_rows == "cut" else limits.length
    longest = max(len(sample.ids_T) for sample in samples)
    whole = sum(len(sample.ids_T) for sample in samples)
    if longest <= most and whole <= limits.together:
        return samples, False
    if config.long_rows == "cut":
        return tuple(_cut(sample, most) for sample in samples), True
    if longest > limits.length:
        raise RowProblem(
            "too_long",
            f"it has {longest:,} tokens, more than {limits.why}",
            remedy="set data.long_rows = 'cut', or allow longer rows",
        )
    raise RowProblem(
        "too_long",
        f"its two answers have {whole:,} tokens together, and one pass of the learner holds "
        f"learner.tokens_per_microbatch={limits.together}",
        remedy=f"set learner.tokens_per_microbatch >= {whole}",
    )


def _cut(sample: RenderedSample, most: int) -> RenderedSample:
    """Return the first ``most`` tokens of a sample. Raises :class:`RowProblem` if none of them carries loss."""
    mask_T = sample.mask_T[:most]
    if not mask_T.any():
        raise RowProblem(
            "no_loss_tokens",
            f"it has {len(sample.ids_T):,} tokens, and none of the first {most:,} carries loss",
            remedy="allow longer rows, or remove the row",
        )
    scores = None if sample.teacher_scores is None else sample.teacher_scores[:most]
    return replace(sample, ids_T=sample.ids_T[:most], mask_T=mask_T, teacher_scores=scores)
