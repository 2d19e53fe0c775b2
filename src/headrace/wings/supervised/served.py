"""A teacher on an engine: a server that tells what the teacher gives each token of the rows, before training begins.

    rows ──▶ a completion for each, with logprobs of the prompt ──▶ teacher_ids, teacher_logprobs ──▶ as if in the rows

The answers are kept in the run's directory, :data:`PART_ROWS` rows in a file, so that a run that goes on, or begins
again after it was killed, asks for none twice.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headrace.base.environ import secret
from headrace.base.errors import ConfigError, DataError
from headrace.wings.doctor.candidates import Entries as ServerEntries
from headrace.wings.doctor.server import ServerProbe, ServerSilent
from headrace.wings.supervised.config import ServedTeacher
from headrace.wings.supervised.reading import RowSet, SourceRows
from headrace.wings.supervised.rendering import RenderedSample, RowProblem, teacher_scores

DIRECTORY = "teacher"
"""The directory of the answers within that of the run."""
PART_ROWS = 256
"""The number of rows whose answers lie in one file."""
COMPARED_ROWS, COMPARED_TOKENS = 8, 256
"""How many rows, and how many tokens of each, are compared in the tokenizers of teacher and model."""
ATTEMPTS = 5
"""How often a request is made, at most, where the server does not answer; after 0.5 s, 1 s, 2 s, ..."""
_VOCABULARY = "serve a teacher with the vocabulary of model.path: entries are compared by their ids"

Entries = tuple[list[list[int]], list[list[float]]]
"""What a teacher gives each token of a sequence: its likeliest ids, the likeliest first, and their log-probabilities.
The first token has none."""


class TeacherServer:
    """The server of a teacher, asked by several threads at once."""

    def __init__(self, config: ServedTeacher) -> None:
        """Connect to the server. Raises :class:`~headrace.base.errors.ConfigError` for a key that is not set or a model
        that is not served, and :class:`~headrace.wings.doctor.server.ServerSilent` if there is no such server."""
        if config.api_key_env and not secret(config.api_key_env):
            raise ConfigError(
                f"teacher.api_key_env: the environment variable {config.api_key_env} is not set",
                remedy=f"export {config.api_key_env}=..., or leave teacher.api_key_env out",
            )
        key = secret(config.api_key_env) if config.api_key_env else ""
        self._probe = ServerProbe(config.base_url, token=key, model=config.model)
        self._config = config
        self._pause = threading.Event()
        try:
            self._probe.models()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        self._probe.close()

    @property
    def model(self) -> str:
        """The name of the teacher at the server."""
        return self._probe.model

    def refuse_other_vocabulary(self, tokenizer: Any, samples: Sequence[RenderedSample]) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the server makes other tokens of the texts of ``samples``
        than ``tokenizer``, or does not tell which it makes."""
        for sample in samples[:COMPARED_ROWS]:
            text = tokenizer.decode(sample.ids_T[:COMPARED_TOKENS].tolist())
            here = tokenizer.encode(text, add_special_tokens=False)
            there = self._probe.tokenize(prompt=text, add_special_tokens=False)
            if there is None:
                raise ConfigError(
                    f"teacher.base_url={self._config.base_url!r} does not answer /tokenize: whether {self.model} has "
                    "this model's vocabulary cannot be told",
                    remedy="serve it with headrace serve, vLLM or SGLang; or give the rows teacher_ids and "
                    "teacher_logprobs",
                )
            if there != here:
                place = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), -1)
                raise ConfigError(
                    f"the teacher {self.model} has another vocabulary: of {text[:60]!r} it makes {len(there)} tokens "
                    f"and model.path {len(here)}, which differ first at token {place}",
                    remedy=_VOCABULARY,
                )

    def entries(self, ids: list[int], top_k: int) -> Entries:
        """Return what the teacher gives the tokens ``ids``. Raises :class:`~headrace.base.errors.ConfigError` if the
        server tells fewer than ``top_k`` entries, and :class:`~headrace.wings.doctor.server.ServerSilent` if it does
        not answer."""
        found = self._ask(ids, top_k)
        told = [0] * len(ids) if found is None else np.bincount(found.place_E, minlength=len(ids)).tolist()
        if found is None or min(told[1:]) < top_k:
            raise ConfigError(
                f"teacher.top_k={top_k}: {self.model} at {self._config.base_url} does not tell as many entries of each "
                "token of a prompt, by their ids",
                remedy="set a smaller teacher.top_k, or let the server tell more (vLLM: --max-logprobs)",
            )
        order = np.lexsort((-found.logprob_E, found.place_E))
        starts = np.cumsum([0, *told])
        kept = [order[start : start + top_k] for start in starts[1:-1]]
        return (
            [[], *(found.id_E[part].tolist() for part in kept)],
            [[], *(found.logprob_E[part].tolist() for part in kept)],
        )

    def _ask(self, ids: list[int], top_k: int) -> ServerEntries | None:
        """Return the server's entries, which may be more or fewer than ``top_k`` a token; ``None`` if there are none. A
        server that does not answer is asked again."""
        for attempt in range(1, ATTEMPTS):
            with suppress(ServerSilent):
                return self._probe.prompt_entries([ids], top=top_k)
            self._pause.wait(0.25 * 2**attempt)
        return self._probe.prompt_entries([ids], top=top_k)


def check_teacher(config: ServedTeacher, tokenizer: Any, rows: RowSet, vocab_size: int) -> None:
    """Refuse, before a run starts, a teacher that cannot say what the loss reads: one row is scored."""
    server = TeacherServer(config)
    try:
        samples = [row[0] for row in rows.rows]
        server.refuse_other_vocabulary(tokenizer, samples)
        shortest = min(samples, key=lambda sample: len(sample.ids_T))
        _fitted(shortest, server.entries(shortest.ids_T.tolist(), config.top_k), "the shortest row", vocab_size)
    finally:
        server.close()


def with_teacher(
    config: ServedTeacher, rows: RowSet, run_dir: Path, vocab_size: int, say: Callable[[str], None]
) -> RowSet:
    """Return ``rows`` with what the teacher gives each of their tokens. ``say`` is told how far it is.

    Raises :class:`~headrace.base.errors.DataError` for a row of which the teacher says what no distribution is, and
    what :class:`TeacherServer` raises."""
    samples = [row[0] for row in rows.rows]
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    digest = hashlib.blake2b(f"{rows.fingerprint()} {config.model} {config.top_k}".encode(), digest_size=8).hexdigest()
    places = [range(start, min(start + PART_ROWS, len(samples))) for start in range(0, len(samples), PART_ROWS)]
    missing = [part for part in places if _read(directory, digest, part) is None]
    if missing:
        server = TeacherServer(config)
        try:
            with ThreadPoolExecutor(config.concurrency) as threads:
                for part in missing:
                    say(f"asking the teacher {server.model}: {part.start:,} of {len(samples):,} rows")
                    told = threads.map(lambda at: server.entries(samples[at].ids_T.tolist(), config.top_k), part)
                    _write(directory, digest, part, list(told))
        finally:
            server.close()
    found = (entries for part in places for entries in _read(directory, digest, part) or ())
    scored = (
        _fitted(sample, entries, rows.place(place), vocab_size)
        for place, (sample, entries) in enumerate(zip(samples, found, strict=True))
    )
    return replace(rows, sources=[_with_rows(source, scored) for source in rows.sources])


def _with_rows(source: SourceRows, scored: Iterator[RenderedSample]) -> SourceRows:
    """Return a source with the next of the scored samples in place of its own."""
    return replace(source, rows=[(next(scored),) for _ in source.rows])


def _fitted(sample: RenderedSample, entries: Entries, name: str, vocab_size: int) -> RenderedSample:
    """Return a sample with the teacher's ``entries``, checked as those of a row are."""
    ids, logs = entries
    largest = max(max(each, default=0) for each in ids)
    if largest >= vocab_size:
        raise DataError(
            f"{name}: the teacher has an entry with the id {largest}, and the model knows 0 to {vocab_size - 1}",
            remedy=_VOCABULARY,
        )
    try:
        return replace(sample, teacher_scores=teacher_scores({"teacher_ids": ids, "teacher_logprobs": logs}, sample))
    except RowProblem as problem:
        raise DataError(
            f"{name}: what the teacher says of it cannot be used: {problem.problem}",
            remedy="look at the server: headrace doctor URL",
        ) from None


def _file(directory: Path, digest: str, part: range) -> Path:
    return directory / f"{digest}-{part.start:08}.safetensors"


def _write(directory: Path, digest: str, part: range, entries: Sequence[Entries]) -> None:
    """Write the entries of some rows: those of all tokens but the first of each row, one after the other."""
    file = _file(directory, digest, part)
    tensors = {
        "ids": np.array([ids for row, _ in entries for ids in row[1:]], np.int64),
        "logprobs": np.array([logs for _, row in entries for logs in row[1:]], np.float64),
        "lengths": np.array([len(row) for row, _ in entries], np.int64),
    }
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    unfinished.rename(file)


def _read(directory: Path, digest: str, part: range) -> list[Entries] | None:
    """Return the entries of some rows; ``None`` if they are not there."""
    try:
        tensors = load_file(_file(directory, digest, part))
    except (OSError, SafetensorError):
        return None
    ends = np.cumsum(tensors["lengths"] - 1)
    return [
        ([[], *tensors["ids"][start:end].tolist()], [[], *tensors["logprobs"][start:end].tolist()])
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
