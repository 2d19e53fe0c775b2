"""One sampling request of the Tinker protocol: its checks, its execution and its answer. A request asks for several
samples of one prompt. It may also ask for log-probabilities: of the prompt's tokens, of the likeliest tokens at each
position, or of given target tokens.

Shape legend: N tokens of the prompt, T sampled tokens, K entries of a distribution or targets at one position.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.base.errors import DataError
from headrace.base.tasks import run_together
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import NO_TOKENS, Tokens
from headrace.engine.base import TokenSource
from headrace.wings.tinker import wire
from headrace.wings.tinker.compute import PromptScores
from headrace.wings.tinker.schema import PromptBody, SampleBody, SamplingBody, TensorBody

Array = npt.NDArray[Any]
MOST_TOP, MOST_SAMPLES = 100, 1024
"""The largest number of likeliest entries at a position, and of samples of one request."""
NO_LOGPROB = -99999.0
"""The log-probability that the client reads as a missing entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    """The limits of an engine for sampling requests."""

    vocab_size: int
    """The number of token ids; every id is below it."""
    max_context: int
    """The largest number of tokens of a prompt and its answer together."""
    stop_ids: tuple[int, ...]
    """The token ids that end an answer, unless the request disables them with an empty list ``stop``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePlan:
    """A checked sampling request, which :func:`answer` executes."""

    prompt_N: Array
    """The token ids of the prompt."""
    samplings: tuple[Sampling | None, ...]
    """The sampling settings of each sample; ``None`` for an empty sample, if the prompt fills the context."""
    wants_prompt: bool
    """Whether to return the log-probability of each token of the prompt."""
    top_prompt: int
    """The number of likeliest entries to return at each token of the prompt."""
    top_sample: int
    """The number of likeliest entries to return at each sampled token."""
    targets_NK: Array | None
    """Other tokens to score at the position of each prompt token except the first, ``[N - 1, K]``, with −1 for no
    token; ``None`` if the request has no targets."""
    target_cells: wire.SparseCells | None
    """The cells of :attr:`targets_NK` that the client listed in a sparse matrix; the answer then is sparse too.
    ``None`` if the client sent a dense matrix."""
    last_n: int | None
    """The number of tokens at the end of the prompt that are scored; ``None`` for all."""


Score = Callable[[Array, int, Array | None], Awaitable[PromptScores]]
"""A function that returns the scores of a sequence. Its arguments are the token ids, the number of likeliest entries to
return at each token, and the targets (``None`` for none)."""
Keep = Callable[[Sequence[tuple[Tokens, StopReason]]], None]
"""A function that stores the samples of a request, each with the reason why it ended."""


def make_sample_plan(body: SampleBody, limits: SampleLimits, fresh_seed: int) -> SamplePlan:
    """Check the request ``body``, and return it as a plan. ``fresh_seed`` is the seed of the samples if the request has
    none. Raises :class:`~headrace.base.errors.DataError` for a request that is invalid or exceeds the ``limits``."""
    prompt_N = _read_prompt_ids(body.prompt, limits)
    problem = _find_problem(body, len(prompt_N), min(MOST_TOP, limits.vocab_size))
    if problem:
        raise DataError(problem[0], remedy=problem[1])
    targets, cells = None, None
    if body.target_prompt_logprobs is not None:
        targets, cells = _read_targets(body.target_prompt_logprobs, prompt_N, limits)
    seed = fresh_seed if body.sampling_params.seed is None else body.sampling_params.seed
    scores = bool(body.prompt_logprobs or body.topk_prompt_logprobs or targets is not None)
    if scores and len(prompt_N) == limits.max_context and body.sampling_params.max_tokens == 1:
        samplings: tuple[Sampling | None, ...] = (None,) * body.num_samples  # a request for scores alone
    else:
        sampling = _make_sampling(body.sampling_params, len(prompt_N), limits)
        samplings = tuple(_with_seed(sampling, seed, place) for place in range(body.num_samples))
    return SamplePlan(
        prompt_N=prompt_N,
        samplings=samplings,
        wants_prompt=bool(body.prompt_logprobs),
        top_prompt=body.topk_prompt_logprobs,
        top_sample=body.topk_sample_logprobs,
        targets_NK=targets,
        target_cells=cells,
        last_n=body.prompt_logprobs_last_n,
    )


def _read_prompt_ids(prompt: PromptBody, limits: SampleLimits) -> Array:
    """Return the token ids of a prompt. Raises :class:`~headrace.base.errors.DataError` if the prompt is empty, has
    content other than tokens, or has a token outside the vocabulary. ``limits`` has the size of the vocabulary."""
    other = next((chunk.type for chunk in prompt.chunks if chunk.type != "encoded_text"), None)
    if other is not None:
        raise DataError(f"the prompt holds a chunk of type {other[:40]!r}", remedy="give tokens: only text is served")
    ids = [token for chunk in prompt.chunks for token in chunk.tokens]
    if not ids:
        raise DataError("the prompt is empty", remedy="give at least one token")
    outside = next((each for each in ids if not 0 <= each < limits.vocab_size), None)
    if outside is not None:
        raise DataError(
            f"the prompt holds token {outside}, outside the vocabulary of {limits.vocab_size}",
            remedy="encode with the model's tokenizer",
        )
    return np.array(ids, np.int32)


def _find_problem(body: SampleBody, length: int, most_top: int) -> tuple[str, str] | None:
    """Return the reason why the sampling request ``body`` is refused, and the remedy; ``None`` if it is accepted.
    ``length`` is the number of tokens of its prompt, and ``most_top`` the largest number of likeliest entries at a
    position."""
    if not 1 <= body.num_samples <= MOST_SAMPLES:
        return f"num_samples={body.num_samples}", f"set 1 to {MOST_SAMPLES}"
    for name, value in (("topk_prompt", body.topk_prompt_logprobs), ("topk_sample", body.topk_sample_logprobs)):
        if not 0 <= value <= most_top:
            return f"{name}_logprobs={value}", f"set 0 to {most_top}"
    if body.record_stability_info:
        return "record_stability_info: stable_reinforce is not served", "set loss_fn=importance_sampling"
    if body.prompt_alt_tokens_k:
        return "prompt_alt_tokens_k is not served", "leave it out, or ask for topk_prompt_logprobs"
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last <= length - 1):
        return f"prompt_logprobs_last_n={last}", "set 1 to len(prompt) - 1, with prompt_logprobs"
    return None


def _make_sampling(body: SamplingBody, length: int, limits: SampleLimits) -> Sampling:
    """Return the engine's sampling settings for the settings ``body`` of a request and a prompt of ``length`` tokens.
    Without ``max_tokens``, an answer may fill the context, whose length is in ``limits``. Raises
    :class:`~headrace.base.errors.DataError` if prompt and answer together exceed the context."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    ids = tuple(one for one in stop or () if isinstance(one, int))
    texts = tuple(one for one in stop or () if isinstance(one, str))
    if body.top_k < -1:
        raise DataError(f"top_k={body.top_k}", remedy="set -1 for all, or a number of tokens")
    room = limits.max_context - length
    if room < 1 or (body.max_tokens is not None and body.max_tokens > room):
        raise DataError(
            f"a prompt of {length} tokens and max_tokens={body.max_tokens} exceed the context of {limits.max_context}",
            remedy=f"lower max_tokens to {room}, or shorten the prompt" if room > 0 else "shorten the prompt",
        )
    return Sampling(
        max_new_tokens=room if body.max_tokens is None else body.max_tokens,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        stop_ids=() if stop == [] else tuple(dict.fromkeys((*ids, *limits.stop_ids))),
        stop=texts,
    )


def _with_seed(sampling: Sampling, seed: int, index: int) -> Sampling:
    """Return ``sampling`` with the seed of the sample number ``index``, derived from the ``seed`` of the request."""
    own = xxhash.xxh3_64_intdigest(f"{seed}/{index}".encode()) >> 1
    return msgspec.structs.replace(sampling, seed=own)


def _read_targets(body: TensorBody, prompt_N: Array, limits: SampleLimits) -> tuple[Array, wire.SparseCells | None]:
    """Return the targets that ``body`` asks to score at the positions of the tokens of ``prompt_N`` except the first,
    ``[N - 1, K]`` with −1 for no token, and the cells that a sparse tensor lists (``None`` for a dense tensor). Raises
    :class:`~headrace.base.errors.DataError` for a wrong shape, or for a token outside the vocabulary of ``limits``."""
    shape = body.shape or []
    if body.dtype != "int64" or len(shape) != 2 or shape[0] != len(prompt_N) - 1 or shape[1] < 1:
        raise DataError(
            f"target_prompt_logprobs has dtype {body.dtype} and shape {shape}",
            remedy=f"give int64 of shape [{len(prompt_N) - 1}, K]",
        )
    if len(body.data) > wire.MOST_NUMBERS:
        raise DataError(
            f"target_prompt_logprobs has {len(body.data)} ids, and {wire.MOST_NUMBERS} are possible",
            remedy="ask for fewer targets in a request",
        )
    values = np.array(body.data, np.float64)
    whole = (values == np.round(values)) & (values >= -1) & (values < limits.vocab_size)
    if not whole.all():
        raise DataError(
            f"target_prompt_logprobs holds {values[~whole][0]:g}, outside the vocabulary of {limits.vocab_size}",
            remedy="give ids of the model's tokenizer, and -1 for nothing",
        )
    ids = values.astype(np.int64)
    if body.sparse_crow_indices is None:
        if ids.size != shape[0] * shape[1]:
            raise DataError(f"target_prompt_logprobs of shape {shape} has {ids.size} ids", remedy="give one for each")
        return ids.reshape(shape), None
    try:
        starts, columns = (
            np.array(part or [], np.int64) for part in (body.sparse_crow_indices, body.sparse_col_indices)
        )
        cells = wire.SparseCells(row_starts=starts, columns=columns)
        return cells.dense(ids, shape, elsewhere=-1, max_entries=wire.MOST_NUMBERS), cells
    except (ValueError, OverflowError) as error:
        raise DataError(f"target_prompt_logprobs: {error}", remedy="give a tensor of TensorData") from None


async def answer(plan: SamplePlan, engine: TokenSource, adapter: str, score: Score, keep: Keep) -> bytes:
    """Execute the request ``plan``: sample with ``engine`` and the weights of the sampling session ``adapter`` (empty:
    the base model), compute the requested log-probabilities with ``score``, pass the samples to ``keep``, and return
    the encoded answer. If the caller is cancelled, the samples are cancelled too."""
    sampled = await run_together(  # starts all before the first await: one batch
        [_sample_one(plan.prompt_N, each, engine, adapter) for each in plan.samplings]
    )
    if any(len(tokens) for tokens, _ in sampled):
        keep(sampled)
    sequences = [await _encode_sample(plan, tokens, reason, score) for tokens, reason in sampled]
    logprobs_N, top, targets = None, None, None
    if plan.wants_prompt or plan.top_prompt or plan.targets_NK is not None:
        found = await score(plan.prompt_N, plan.top_prompt, plan.targets_NK)
        unscored = len(plan.prompt_N) - plan.last_n if plan.last_n is not None else 1
        found.logprobs_N[:unscored] = np.nan
        found.top_ids_NK[:unscored], found.top_logprobs_NK[:unscored] = 0, NO_LOGPROB
        logprobs_N = found.logprobs_N if plan.wants_prompt else None
        top = wire.write_top(found.top_ids_NK, found.top_logprobs_NK) if plan.top_prompt else None
        targets = None if found.targets_NK is None else wire.write_tensor(found.targets_NK, plan.target_cells)
    return wire.write_samples(sequences, prompt_logprobs_T=logprobs_N, top=top, targets=targets)


async def _sample_one(
    prompt_N: Array, sampling: Sampling | None, engine: TokenSource, adapter: str
) -> tuple[Tokens, StopReason]:
    """Sample one answer to the prompt, and return its tokens and the reason why it ended. If ``sampling`` is ``None``,
    the prompt fills the context, and the answer is empty."""
    if sampling is None:
        return NO_TOKENS, StopReason.LENGTH
    parts, reason = list[Tokens](), StopReason.LENGTH
    chunks = engine.generate(prompt_N, sampling, RequestOptions(agent=adapter))
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            parts = [chunk.tokens] if chunk.lost else [*parts, chunk.tokens]
            reason = chunk.stop_reason or reason
    return Tokens.concat(parts), reason


async def _encode_sample(plan: SamplePlan, tokens: Tokens, reason: StopReason, score: Score) -> bytes:
    """Encode one sampled answer in the format of the protocol, with the likeliest tokens at each of its positions if
    the plan requests them."""
    top = None
    if plan.top_sample and len(tokens):
        start = len(plan.prompt_N)
        found = await score(np.concatenate([plan.prompt_N, tokens.ids_T]), plan.top_sample, None)
        top = wire.write_top(found.top_ids_NK[start:], found.top_logprobs_NK[start:])
    return wire.write_sequence(
        stopped=reason is StopReason.STOP,
        ids_T=tokens.ids_T,
        logprobs_T=tokens.logprobs_T,
        versions_T=tokens.versions_T,
        top=top,
    )
