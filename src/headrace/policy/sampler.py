"""Prompts to samples: all requests of one call join the engine's batch together.

Shape legend: P tokens of a prompt, T tokens of an answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import ConfigError, DataError, nearest
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine import Engine, RequestOptions
from headrace.engine.base import PLAIN
from headrace.policy.sample import Sample
from headrace.rollout.environments.prompts import PromptTokenizer, make_tasks
from headrace.rollout.runner import episode_seed

T = TypeVar("T")

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | npt.NDArray[np.integer[Any]] | Tokens
"""Text, chat messages, token ids, or tokens of which some may have been sampled."""


class SampleOptions(TypedDict, total=False):
    """What may be said of one call of ``sample``; see :class:`~headrace.base.types.sampling.Sampling`."""

    max_new_tokens: int
    """Stop after this many."""
    temperature: float
    """Divides logits; 0 takes the likeliest token."""
    top_k: int
    """Only this many of the likeliest; 0 for all."""
    top_p: float
    """Only the likeliest that together reach this; 1 for all."""
    min_p: float
    """Only those at least this fraction as likely as the likeliest; 0 for all."""
    repetition_penalty: float
    """For tokens in prompt or answer; 1 for none."""
    presence_penalty: float
    """For tokens in the answer."""
    frequency_penalty: float
    """For each time in the answer."""
    logit_bias: dict[int, float]
    """Added to the logits of these ids."""
    stop_ids: tuple[int, ...]
    """Ids that end an answer, instead of the model's own."""
    stop: tuple[str, ...]
    """Texts that end an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sequence to sample."""

    prompt: Tokens
    group: int
    sampling: Sampling
    options: RequestOptions = PLAIN


class PolicySampler:
    """Speaks to the engine. ``usual`` is how it samples where nothing else is said; with ``keep_mask`` truncated
    sampling brings its kept-sets."""

    def __init__(self, tokenizer: Any, usual: Sampling, *, seed: int, num_prompts: int, keep_mask: bool) -> None:
        self._tokenizer: PromptTokenizer = tokenizer
        self._usual = usual
        self._seed = seed
        self._keep_mask = keep_mask
        self.name = secrets.token_hex(8)
        """Tells the samples of this engine from those of others, and of earlier lives."""
        self.num_prompts = num_prompts
        """Sampled so far; names the next group."""

    def encode(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        """The prompts as the model reads them. Raises :class:`~headrace.base.errors.DataError`, naming the prompt."""
        if isinstance(prompts, str | Tokens) or not isinstance(prompts, Iterable):
            raise DataError(f"prompts is a {type(prompts).__name__}", remedy="give a list of prompts: [prompt]")
        encoded = [self._encode(place, prompt) for place, prompt in enumerate(prompts)]
        if not encoded:
            raise DataError("there are no prompts", remedy="give at least one")
        return encoded

    def _encode(self, place: int, prompt: Prompt) -> Tokens:
        if isinstance(prompt, Tokens):
            return prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            (task,) = make_tasks([{"prompt": prompt}], "prompt", self._tokenizer, source=f"prompts[{place}]")
            return Tokens.observed(task.prompt_ids_T)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(
                f"prompts[{place}] is {repr(prompt)[:80]}", remedy="give text, chat messages, token ids, or Tokens"
            )
        return Tokens.observed(ids.astype(np.int32))

    def plan(
        self, prompts: Sequence[Tokens], n: int, seed: int | None, how: Mapping[str, Any]
    ) -> list[list[SampleRequest]]:
        """The requests for ``n`` answers to each prompt. A ``seed`` makes the call repeatable; without one, every call
        draws anew."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n={n!r} answers to each prompt", remedy="set n >= 1")
        first, self.num_prompts = self.num_prompts, self.num_prompts + len(prompts)
        usual = self._sampling(how)
        return [
            [
                SampleRequest(
                    prompt=prompt, group=first + place, sampling=_seeded(usual, self._draw(seed, first, place, member))
                )
                for member in range(n)
            ]
            for place, prompt in enumerate(prompts)
        ]

    def _draw(self, seed: int | None, first: int, place: int, member: int) -> int:
        if seed is None:
            return episode_seed(self._seed, EpisodeKey(first + place, member))
        return episode_seed(seed, EpisodeKey(place, member))

    def _sampling(self, how: Mapping[str, Any]) -> Sampling:
        known = SampleOptions.__annotations__
        for key in how:
            if key not in known:
                raise ConfigError(f"sampling has no setting {key!r}", remedy=nearest(key, known))
        try:
            tree = {**msgspec.to_builtins(self._usual), **how}
            sampling = msgspec.convert({**tree, "logit_bias": dict(tree["logit_bias"])}, Sampling)
        except msgspec.ValidationError as error:
            raise ConfigError(f"sampling {dict(how)}: {error}", remedy="mend that setting") from None
        return msgspec.structs.replace(sampling, record_kept=sampling.truncated and self._keep_mask)

    async def sample(self, engine: Engine, groups: Sequence[Sequence[SampleRequest]]) -> list[list[Sample]]:
        """One sample for each request, nested as they are."""
        flat = await together([self._one(engine, asked) for group in groups for asked in group])
        samples = iter(flat)
        return [[next(samples) for _ in group] for group in groups]

    async def _one(self, engine: Engine, asked: SampleRequest) -> Sample:
        parts: list[Tokens] = []
        prompt, stop_reason, request_id = asked.prompt, None, -1
        given_T = np.zeros(0, np.int32) if asked.options.fork else prompt.ids_T
        async for chunk in engine.generate(given_T, asked.sampling, asked.options):
            if chunk.restarted:
                parts.clear()
            if chunk.prompt_routing is not None:
                prompt = replace(prompt, routing=chunk.prompt_routing)
            parts.append(chunk.tokens)
            stop_reason, request_id = chunk.stop_reason, chunk.request_id
        tokens = Tokens.concat(parts)
        return Sample(
            prompt=prompt,
            tokens=tokens,
            text=self._text(tokens),
            stop_reason=stop_reason,
            group=asked.group,
            sampling=asked.sampling,
            request_id=request_id,
            engine=self.name,
        )

    def _text(self, tokens: Tokens) -> str:
        tokenizer: Any = self._tokenizer  # nothing is tidied: what counts is what was sampled
        return str(
            tokenizer.decode(tokens.ids_T.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def demonstration(self, prompt: Tokens, answer: str) -> Sample:
        """An answer that was given, with the tokenizer's end of sequence."""
        tokenizer: Any = self._tokenizer
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        self.num_prompts += 1
        return Sample(prompt=prompt, tokens=Tokens.observed(ids), text=answer, group=self.num_prompts - 1)


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in their order; where one fails the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(job) for job in jobs]
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in running]
