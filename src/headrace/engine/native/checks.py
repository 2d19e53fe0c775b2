"""The validation of all numbers of a request, before any other code of the engine uses them.

Requests are sent by other processes and programs, so the checks assume neither that an integer has 32 bits nor that a
float is finite. Numbers that pass fit the dtypes of the engine's arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ConfigError
from headrace.base.types.columns import IntColumn
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.recorded import KeptSets
from headrace.base.types.sampling import Sampling
from headrace.engine.config import MIN_TEMPERATURE
from headrace.models.rope import ContextLimit

MAX_STOP_STRINGS = 64
"""The most stop strings of one request."""
MAX_STOP_IDS = 1024
"""The most stop ids of one request."""
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_INT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of :func:`check_ids`: valid ids, or the problem with them."""

    ids_T: IntColumn
    """The ids as int32; empty if there is a problem."""
    problem: str = ""
    """The problem in words; empty if the ids are valid."""


def check_ids(name: str, ids: Sequence[int] | npt.NDArray[np.generic], vocab_size: int) -> Checked:
    """Return token ids of any integer type as a column of int32, or the problem with them: a wrong shape or type, or an
    id outside the vocabulary of ``vocab_size`` tokens. ``name`` names the ids in the problem.

    >>> check_ids("prompt", [3, 2**40], 100).problem
    'prompt holds token 1099511627776, outside the vocabulary of 100'
    """
    none = np.zeros(0, np.int32)
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return Checked(ids_T=none)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return Checked(ids_T=none, problem=f"{name} has shape {array.shape} and dtype {array.dtype}, not a row of ids")
    for extreme in (int(array.min()), int(array.max())):
        if not 0 <= extreme < vocab_size:
            return Checked(
                ids_T=none, problem=f"{name} holds token {extreme}, outside the vocabulary of {vocab_size}"
            )  # fmt: skip
    return Checked(ids_T=array.astype(np.int32))


def refuse_long(max_context: int, limit: ContextLimit | None) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``max_context``, the engine's longest context in tokens, is
    longer than ``limit``, the longest that the model supports, or if that limit is not known (``None``)."""
    if limit is None:
        raise ConfigError(
            "the model's config.json does not say max_position_embeddings, the longest context", remedy="add it there"
        )
    if max_context > limit.length:
        why = f": {limit.reason}" if limit.reason else ""
        raise ConfigError(
            f"engine.max_context={max_context} is longer than the model's context of {limit.length} tokens{why}",
            remedy=f"set engine.max_context <= {limit.length}, or shorten engine.max_new_tokens or the prompts",
        )


def request_problem(request: GenerateRequest, vocab_size: int) -> str:
    """Return the reason why ``request`` cannot be served by a model with ``vocab_size`` tokens; an empty string if it
    can. The prompt is not checked."""
    if abs(request.priority) > _LARGEST_INT:
        return f"priority={request.priority} is not within ±{_LARGEST_INT}"
    if request.deadline_s is not None and not (math.isfinite(request.deadline_s) and request.deadline_s > 0):
        return f"deadline_s={request.deadline_s} is not a finite number > 0"
    return sampling_problem(request.sampling, vocab_size)


def sampling_problem(sampling: Sampling, vocab_size: int) -> str:
    """Return the first reason why ``sampling`` is invalid for a vocabulary of ``vocab_size`` tokens; an empty string if
    it is valid.

    >>> sampling_problem(Sampling(max_new_tokens=8, top_p=0.0), 100)
    'top_p=0.0 is not in (0, 1]'
    """
    return next(_sampling_problems(sampling, vocab_size), "")


def score_problem(request: ScoreTokens, vocab_size: int) -> str:
    """Return the reason why the tokens of ``request`` cannot be scored by a model with ``vocab_size`` tokens; an empty
    string if they can. The routing is not checked."""
    checked = check_ids("ids_T", request.ids_T, vocab_size)
    if checked.problem:
        return checked.problem
    if not MIN_TEMPERATURE <= request.temperature <= _LARGEST:
        return f"temperature={request.temperature} is not a number >= {MIN_TEMPERATURE}"
    entries = min(request.top_below or vocab_size, vocab_size)
    if not 0 <= request.top_k <= entries:
        return f"top_k={request.top_k} of {entries} entries"
    return "" if request.kept is None else _kept_problem(request.kept, checked.ids_T, vocab_size)


def _kept_problem(kept: KeptSets, ids_T: IntColumn, vocab_size: int) -> str:
    """Return why ``kept`` cannot be the kept-sets (the entries that survived truncation) of the tokens ``ids_T``; an
    empty string if it can."""
    sizes = np.asarray(kept.sizes_T)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        return f"the sizes of the kept-sets have shape {sizes.shape} and dtype {sizes.dtype}"
    if sizes.size and not 0 <= int(sizes.min()) <= int(sizes.max()) <= vocab_size:
        return f"the sizes of the kept-sets run from {sizes.min()} to {sizes.max()}, of a vocabulary of {vocab_size}"
    return check_ids("a kept-set", kept.ids_E, vocab_size).problem or kept.problem(ids_T)


def _sampling_problems(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    """Yield each problem of the sampling options for a model with ``vocab_size`` tokens in words, such as ``top_p=0.0
    is not in (0, 1]``."""
    if sampling.max_new_tokens < 1:
        yield f"max_new_tokens={sampling.max_new_tokens} is not at least 1"
    for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not _fits_float32(getattr(sampling, name)):
            yield f"{name}={getattr(sampling, name)} is not a finite number of 32 bits"
    if sampling.temperature < 0:
        yield f"temperature={sampling.temperature} is not >= 0 (0 takes the most likely token)"
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        yield f"temperature={sampling.temperature} is neither 0 (the most likely token) nor >= {MIN_TEMPERATURE}"
    if not np.float32(sampling.repetition_penalty) > 0:
        yield f"repetition_penalty={sampling.repetition_penalty} is not > 0"
    if not 0 <= sampling.top_k <= _LARGEST_INT:
        yield f"top_k={sampling.top_k} is not >= 0 (0 for all tokens) and <= {_LARGEST_INT}"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p={sampling.top_p} is not in (0, 1]"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p={sampling.min_p} is not in [0, 1]"
    if not 0 <= sampling.record_top <= vocab_size:
        yield f"record_top={sampling.record_top} is not within the vocabulary of {vocab_size}"
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_ids", sampling.stop_ids)):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            yield f"{name} holds token {outside[0]}, outside the vocabulary of {vocab_size}"
    unsound = [token for token, bias in sampling.logit_bias.items() if not _fits_float32(bias)]
    if unsound:
        yield f"logit_bias of token {unsound[0]} is {sampling.logit_bias[unsound[0]]}, not a finite number of 32 bits"
    yield from _stop_problems(sampling)


def _stop_problems(sampling: Sampling) -> Iterator[str]:
    """Yield each problem of the stop strings and stop ids in words."""
    if "" in sampling.stop:
        yield "stop holds an empty string"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield f"stop holds {len(sampling.stop)} strings, more than {MAX_STOP_STRINGS}"
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        yield f"stop_ids holds {len(sampling.stop_ids)} ids, more than {MAX_STOP_IDS}"


def _fits_float32(number: float) -> bool:
    """Return whether ``number`` is finite and within the range of a 32-bit float."""
    return math.isfinite(number) and abs(number) <= _LARGEST
