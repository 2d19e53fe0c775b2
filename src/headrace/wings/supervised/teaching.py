"""The scoring of rows by a teacher before the first step of ``headrace distill``. A score is the teacher's
log-probability of a token, with the K likeliest entries of its distribution at that position.

    rows ──▶ the teacher: an engine of this process, or a server ──▶ RUN/teacher/00000.safetensors, ... ──▶ the samples

Each file contains the scores of :data:`ROWS_PER_FILE` rows, and is written atomically. A resumed run reads the existing
files and scores only the other rows, so that its scores are bit-identical.

Shape legend: T tokens of one sample, M tokens with loss in several samples, K entries of the teacher's distribution.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headrace.base.clock import RealClock, TimeLimit
from headrace.base.environ import secret
from headrace.base.errors import ConfigError, DataError, HeadraceError, RequestError, RunError
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.teacher_scores import TeacherScores, TopScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN, INITIAL
from headrace.engine.config import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.swaps import LoadedWeights
from headrace.engine.remote import RemoteEndpoint, RemoteEngine, connect
from headrace.learner.auxiliary.config import OtherModel
from headrace.learner.disk import verify_model
from headrace.models import context_length, load_model
from headrace.models.devices import use_device
from headrace.models.hub import change_models, pinned_path
from headrace.models.load import refuse_other_vocabulary
from headrace.models.settings import read_config
from headrace.run.observe.words import plural
from headrace.run.session.own_engines import resolve_teacher_model
from headrace.wings.supervised.config import DistillConfig, ServerTeacher
from headrace.wings.supervised.reading import RowSet
from headrace.wings.supervised.rendering import RenderedSample

T = TypeVar("T")
DIRECTORY = "teacher"
"""The directory of the scores, in the run directory."""
ROWS_PER_FILE = 256
LABEL = "of"
"""The key, in a file's metadata, of the hash of its rows and its teacher."""
TOKENS_PER_CHECK = 1000
"""The number of tokens whose texts are compared by one request."""
SETTING = "learner.teachers[0]"

Row = tuple[RenderedSample, ...]
ScoreRows = Callable[[Sequence[RenderedSample]], list[TopScores]]
"""A function that returns the teacher's scores of samples, in their order."""


# -- before the run ---------------------------------------------------------------------------------------------------


def check_teacher(config: DistillConfig, tokenizer: Any, rows: RowSet) -> None:
    """Check, before the run starts, that the teacher's server or engine can score ``rows``. ``tokenizer`` is the
    tokenizer of the trained model.

    Raises :class:`~headrace.base.errors.ConfigError` for a teacher with another vocabulary or a context that is too
    short, and for a server that cannot detokenize.
    """
    if config.teacher is not None:
        scored = config.run.dir and all(file.is_whole for file in _score_files(config, rows, Path(config.run.dir)))
        if not scored:  # a resumed run with all scores needs no server
            _run(_check_server(config.teacher, tokenizer))
        return
    for name, policy in config.learner.policies.items():
        if isinstance(policy, OtherModel):
            refuse_other_vocabulary(policy.path, config.model.path, f"learner.{name}.path")
    for teacher, _ in config.learner.served_teachers.values():
        if teacher.path is None:
            continue
        verify_model(Path(teacher.path))
        path = resolve_teacher_model(teacher, config.model).path
        refuse_other_vocabulary(path, config.model.path, f"{SETTING} path")
        longest, most = _longest_sample(rows.rows), context_length(path)
        if most < longest:
            raise ConfigError(
                f"{SETTING} path={path!r} was made for {most} tokens, and the longest row has {longest}",
                remedy=f"choose a model for >= {longest} tokens, or set data.max_length = {most}",
            )


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` and return its result. If an event loop is running, as in a notebook, run it in another
    thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _check_server(teacher: ServerTeacher, tokenizer: Any) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` unless the server of ``teacher`` decodes every token id to the
    same text as ``tokenizer``, so that both models have the same vocabulary; also if the server cannot decode
    tokens."""
    ids = sorted(tokenizer.get_vocab().values())
    async with connect(_find_endpoint(teacher)) as engine:
        try:
            await engine.detokenize(ids[:1])
        except HeadraceError as error:
            raise ConfigError(
                f"teacher.base_url={teacher.base_url!r} does not tell the texts of tokens, so whether it has the "
                f"vocabulary of this model cannot be known: {error.problem}",
                remedy="serve the teacher with headrace serve or vLLM; or give a model directory: [[learner.teachers]]",
            ) from None
        for start in range(0, len(ids), TOKENS_PER_CHECK):
            part = ids[start : start + TOKENS_PER_CHECK]
            if not await _same_texts(engine, tokenizer, part):
                token = await _differing_token(engine, tokenizer, part)
                raise ConfigError(
                    f"teacher.base_url={teacher.base_url!r} has another vocabulary than this model: {token} is "
                    f"{tokenizer.decode([token])!r} here, and not there, so the same id means different tokens to the "
                    "two models",
                    remedy="serve a model of the same family, whose tokenizer has the same entries",
                )


async def _same_texts(engine: RemoteEngine, tokenizer: Any, ids: list[int]) -> bool:
    """Return whether the server decodes ``ids`` to the same text as ``tokenizer``, with or without clean-up of spaces,
    because some servers clean up spaces."""
    try:
        text = await engine.detokenize(ids)
    except RequestError:
        return False
    return any(
        text == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=tidy)
        for tidy in (False, True)
    )


async def _differing_token(engine: RemoteEngine, tokenizer: Any, ids: list[int]) -> int:
    """Return one of ``ids`` that the server and ``tokenizer`` decode differently, by bisection. The caller knows that
    the text of all ``ids`` differs."""
    while len(ids) > 1:
        half = len(ids) // 2
        ids = ids[half:] if await _same_texts(engine, tokenizer, ids[:half]) else ids[:half]
    return ids[0]


def _find_endpoint(teacher: ServerTeacher) -> RemoteEndpoint:
    """Return the address of the teacher's server, with its API key. Raises :class:`~headrace.base.errors.ConfigError`
    if the environment variable of the key is not set."""
    key = secret(teacher.api_key_env) if teacher.api_key_env else ""
    if teacher.api_key_env and not key:
        raise ConfigError(
            f"teacher.api_key_env: the environment variable {teacher.api_key_env} is not set",
            remedy=f"export {teacher.api_key_env}=..., or leave api_key_env out",
        )
    return RemoteEndpoint(url=teacher.base_url, model=teacher.model, token=key or "")


# -- in the run -------------------------------------------------------------------------------------------------------


def score_rows(config: DistillConfig, rows: RowSet, run_dir: Path, tell: Callable[[str], None]) -> list[Row]:
    """Return ``rows`` with the scores of each token that carries loss by the teacher of ``config``. Scores that exist
    in ``run_dir`` are read; the teacher computes the others, during which ``tell`` is called with lines of progress.

    Raises :class:`~headrace.base.errors.DataError` for a row that the teacher cannot score.
    """
    files = _score_files(config, rows, run_dir)
    missing = [file for file in files if not file.is_whole]
    if missing:
        (run_dir / DIRECTORY).mkdir(exist_ok=True)
        tell(f"the teacher scores {plural(sum(len(file.rows) for file in missing), 'row')}")
        _score_missing(_make_scorer(config, rows), missing, tell)
        gc.collect()  # free the engine's memory for the learner
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [row for file in files for row in file.read()]


def _score_missing(score: ScoreRows, missing: Sequence[_ScoreFile], tell: Callable[[str], None]) -> None:
    """Compute the scores of each of the ``missing`` files with ``score``, and write the files; call ``tell`` with a
    line after each."""
    done, total = 0, sum(len(file.rows) for file in missing)
    for file in missing:
        file.write(score(file.samples))
        done += len(file.rows)
        tell(f"the teacher has scored {done:,} of {plural(total, 'row')}")


def _score_files(config: DistillConfig, rows: RowSet, run_dir: Path) -> list[_ScoreFile]:
    """Return a record for each file of scores of ``rows``, whether the file exists or not."""
    teacher, all_rows = _teacher_description(config), rows.rows
    parts = [all_rows[start : start + ROWS_PER_FILE] for start in range(0, len(all_rows), ROWS_PER_FILE)]
    return [
        _ScoreFile(path=run_dir / DIRECTORY / f"{number:05d}.safetensors", rows=part, label=_scores_hash(part, teacher))
        for number, part in enumerate(parts)
    ]


def _teacher_description(config: DistillConfig) -> str:
    """Return the settings on which the teacher's scores depend, as JSON. A change of this text invalidates stored
    scores."""
    tree = change_models(config.model_dump(mode="json"), lambda _, path: pinned_path(path))
    if config.teacher is not None:
        tree = {name: tree["teacher"][name] for name in ("base_url", "model", "top_k")}
    else:
        tree = {name: tree["learner"][name] for name in ("teachers", "top_k")} | {"model": tree["model"]}
    return json.dumps(tree, sort_keys=True)


def _scores_hash(rows: Sequence[Row], teacher: str) -> str:
    """Return a hash of the inputs of a file's scores: the token ids and masks of ``rows``, and ``teacher``, the
    description of the teacher."""
    digest = hashlib.blake2b(teacher.encode(), digest_size=16)
    for sample in (sample for row in rows for sample in row):
        digest.update(sample.ids_T.tobytes() + sample.mask_T.tobytes() + b"|")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoreFile:
    """A file of the teacher's scores of several rows. The file may not exist yet."""

    path: Path
    rows: Sequence[Row]
    """The rows whose scores the file contains, each as its samples."""
    label: str
    """The hash of the rows and of the teacher; a file with another hash is not used."""

    @property
    def samples(self) -> list[RenderedSample]:
        """The samples of the file's rows, in order."""
        return [sample for row in self.rows for sample in row]

    @property
    def is_whole(self) -> bool:
        """Whether the file exists and contains the scores of these rows by this teacher."""
        try:
            with safe_open(self.path, framework="np") as held:
                return bool(held.metadata()[LABEL] == self.label)
        except (OSError, SafetensorError, KeyError, TypeError):
            return False

    def write(self, scores: Sequence[TopScores]) -> None:
        """Write ``scores``, one record per sample, for the tokens that carry loss. The file appears complete or not at
        all."""
        masks = [sample.mask_T for sample in self.samples]
        tensors = {
            name: np.concatenate([column(each)[mask] for each, mask in zip(scores, masks, strict=True)])
            for name, column in _COLUMNS.items()
        }
        unfinished = self.path.with_suffix(".tmp")
        save_file(tensors, unfinished, metadata={LABEL: self.label})
        unfinished.rename(self.path)

    def read(self) -> Iterator[Row]:
        """Yield the file's rows, whose samples have the stored scores. Tokens without loss have no scores."""
        with safe_open(self.path, framework="np") as held:
            columns = {name: held.get_tensor(name) for name in _COLUMNS}
        end = 0
        for row in self.rows:
            taught = []
            for sample in row:
                start, end = end, end + int(sample.mask_T.sum())
                scores = TeacherScores.none(len(sample.ids_T), columns["ids_MK"].shape[1])
                scores.logprobs_T[sample.mask_T] = columns["logprobs_M"][start:end]
                scores.versions_T[sample.mask_T] = FROZEN
                scores.ids_TK[sample.mask_T] = columns["ids_MK"][start:end]
                scores.logs_TK[sample.mask_T] = columns["logs_MK"][start:end]
                taught.append(replace(sample, teacher_scores=scores))
            yield tuple(taught)


_COLUMNS: dict[str, Callable[[TopScores], Any]] = {
    "logprobs_M": lambda scores: scores.logprobs_T,
    "ids_MK": lambda scores: scores.ids_TK,
    "logs_MK": lambda scores: scores.logs_TK,
}
"""The tensors of a file by name, each as a function of a sample's scores."""


def _make_scorer(config: DistillConfig, rows: RowSet) -> ScoreRows:
    """Return the function that scores samples: with a server, or with an engine in this process that exists as long as
    the function. ``config`` are the settings with the teacher, and ``rows`` the rows that will be scored."""
    below = int(read_config(config.model.path).get_text_config().vocab_size)
    if config.teacher is not None:
        server = config.teacher
        return lambda samples: _run(_request_scores(server, samples, below))
    (teacher, _) = next(iter(config.learner.served_teachers.values()))
    device = str(use_device("learner.device", config.learner.device, only_cpu=config.model.deterministic))
    model = load_model(resolve_teacher_model(teacher, config.model), device)
    teacher_vocab_size = int(model.config.get_text_config().vocab_size)
    core = NativeEngine(
        model,
        EngineConfig(max_sequences=1).on(device, shared=False),
        max_context=max(2, _longest_sample(rows.rows)),
        receiver=LoadedWeights(),
        clock=RealClock(),
    )
    core.commit(INITIAL)
    options = {
        "top_k": min(config.learner.top_k, below, teacher_vocab_size),
        "top_below": below if teacher_vocab_size > below else 0,
    }
    return lambda samples: [
        core.top_scores(ScoreTokens.create(number, Tokens.observed(sample.ids_T), 1.0, **options))
        for number, sample in enumerate(samples)
    ]


async def _request_scores(teacher: ServerTeacher, samples: Sequence[RenderedSample], below: int) -> list[TopScores]:
    """Return the server's scores of ``samples``, in order; at most ``teacher.concurrency`` requests run at the same
    time. ``below`` is the vocabulary size of the model that is trained: only entries with smaller ids count.

    Raises :class:`~headrace.base.errors.RunError` if an answer takes too long, and
    :class:`~headrace.base.errors.DataError` for a row that the server refuses.
    """
    semaphore, num = asyncio.Semaphore(teacher.concurrency), min(teacher.top_k, below)

    async def ask(engine: RemoteEngine, sample: RenderedSample) -> TopScores:
        """Request the server's scores of one sample when the number of running requests allows it."""
        async with semaphore:
            try:
                async with TimeLimit(teacher.timeout_s):
                    return await engine.top_scores(Tokens.observed(sample.ids_T), num, below=below)
            except TimeoutError:
                raise RunError(
                    f"the teacher at {teacher.base_url} has not answered for {teacher.timeout_s:g} s",
                    remedy="raise teacher.timeout_s or lower teacher.concurrency, and --resume",
                ) from None
            except RequestError as error:
                raise DataError(
                    f"the teacher cannot score a row of {len(sample.ids_T)} tokens: {error.problem}",
                    remedy=error.remedy,
                ) from None

    async with connect(_find_endpoint(teacher)) as engine:
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(ask(engine, sample)) for sample in samples]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [call.result() for call in calls]


def _longest_sample(rows: Sequence[Row]) -> int:
    """Return the number of tokens of the longest sample of ``rows``."""
    return max(len(sample.ids_T) for row in rows for sample in row)
