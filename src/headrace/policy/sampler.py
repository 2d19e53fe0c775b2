"""The sampler of a policy, which converts prompts to requests and answers to samples. All requests of one call are sent
to the engine at once.

The answers to one prompt are a *group*, whose number is the number of the prompt. Shape legend: P tokens of a prompt, T
tokens of an answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import ConfigError, DataError, nearest
from headrace.base.tasks import run_together
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.engine import PLAIN
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine import Engine, RequestOptions
from headrace.policy.sample import Sample
from headrace.rollout.environments.prompts import make_tasks
from headrace.rollout.rendering import Tokenizer
from headrace.rollout.runner import episode_seed

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | npt.NDArray[np.integer[Any]] | Tokens
"""A prompt: text, chat messages, token ids, or :class:`Tokens`, some of which may have been sampled."""


class SampleOptions(TypedDict, total=False):
    """The options of one call of ``sample``; see :class:`~headrace.base.types.sampling.Sampling`."""

    max_new_tokens: int
    """Maximum number of tokens of an answer."""
    temperature: float
    """Divisor of the logits; 0 always selects the most likely token."""
    top_k: int
    """Number of most likely tokens to sample from; 0 for all."""
    top_p: float
    """Sample from the smallest set of most likely tokens whose total probability is at least this; 1 for all."""
    min_p: float
    """Sample only tokens whose probability is at least this fraction of the highest probability; 0 for all."""
    repetition_penalty: float
    """Penalty for tokens that occur in prompt or answer; 1 for none."""
    presence_penalty: float
    """Penalty for tokens that occur in the answer; 0 for none."""
    frequency_penalty: float
    """Penalty for each occurrence of a token in the answer; 0 for none."""
    logit_bias: dict[int, float]
    """Values that are added to logits, by token id."""
    stop_ids: tuple[int, ...]
    """Ids that end an answer, instead of the model's own."""
    stop: tuple[str, ...]
    """Texts that end an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for one answer, before it is sent to the engine."""

    prompt: Tokens
    group: int
    """The number of the prompt, which all answers to this prompt share."""
    sampling: Sampling
    """The sampling parameters, with the seed of this answer."""
    options: RequestOptions = PLAIN
    """The other options of the request; for a fork, they contain the parent."""


class PolicySampler:
    """The sampler of a policy. It creates requests with seeds, sends them to the engine, and collects the answers as
    samples."""

    def __init__(self, tokenizer: Any, defaults: Sampling, *, seed: int, num_prompts: int, keep_mask: bool) -> None:
        """Create the sampler. ``tokenizer`` is the model's tokenizer. ``defaults`` are the sampling parameters for
        calls without options, ``seed`` is the seed of the policy, and ``num_prompts`` is the number of prompts sampled
        before the policy was saved. With ``keep_mask``, truncated sampling (top-k, top-p, min-p) records the kept-set
        of each token: the vocabulary entries that survived."""
        self._tokenizer: Tokenizer = tokenizer
        self._defaults = defaults
        self._seed = seed
        self._keep_mask = keep_mask
        self.name = secrets.token_hex(8)
        """A random name that identifies the engine of this sampler in its samples."""
        self.num_prompts = num_prompts
        """Number of prompts sampled so far, which is also the number of the next group."""

    def encode(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        """Return the tokens of each prompt; text and messages are tokenised. Raises
        :class:`~headrace.base.errors.DataError` for an invalid prompt, which the error names, and for an empty list."""
        if isinstance(prompts, str | Tokens) or not isinstance(prompts, Iterable):
            raise DataError(f"prompts is a {type(prompts).__name__}", remedy="give a list of prompts: [prompt]")
        encoded = [self._encode_one(index, prompt) for index, prompt in enumerate(prompts)]
        if not encoded:
            raise DataError("there are no prompts", remedy="give at least one")
        return encoded

    def _encode_one(self, index: int, prompt: Prompt) -> Tokens:
        """Return the tokens of one prompt, which may have any form of :data:`Prompt`. ``index`` is its index in the
        call, for error messages."""
        if isinstance(prompt, Tokens):
            return prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            (task,) = make_tasks([{"prompt": prompt}], "prompt", self._tokenizer, source=f"prompts[{index}]")
            return Tokens.observed(task.prompt_ids_T)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(
                f"prompts[{index}] is {repr(prompt)[:80]}", remedy="give text, chat messages, token ids, or Tokens"
            )
        return Tokens.observed(ids.astype(np.int32))

    def plan(
        self, prompts: Sequence[Tokens], n: int, seed: int | None, options: Mapping[str, Any]
    ) -> list[list[SampleRequest]]:
        """Return the requests for ``n`` answers to each prompt, a list for each prompt. ``options`` override the
        sampling parameters of the policy. With a ``seed``, calls with the same arguments use the same random numbers;
        with ``None``, every call uses new ones."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n={n!r} answers to each prompt", remedy="set n >= 1")
        first, self.num_prompts = self.num_prompts, self.num_prompts + len(prompts)
        sampling = self._make_sampling(options)
        return [
            [
                SampleRequest(
                    prompt=prompt,
                    group=first + index,
                    sampling=msgspec.structs.replace(sampling, seed=self._answer_seed(seed, first, index, member)),
                )
                for member in range(n)
            ]
            for index, prompt in enumerate(prompts)
        ]

    def _answer_seed(self, seed: int | None, first: int, index: int, member: int) -> int:
        """Return the seed of one answer: the answer number ``member`` to the prompt with the index ``index`` in this
        call. It follows from ``seed``, the seed of the call. If that is ``None``, it follows from the policy's seed and
        the number of the prompt; ``first`` is the number of the call's first prompt."""
        if seed is None:
            return episode_seed(self._seed, EpisodeKey(first + index, member))
        return episode_seed(seed, EpisodeKey(index, member))

    def _make_sampling(self, options: Mapping[str, Any]) -> Sampling:
        """Return the sampling parameters of a call: the defaults of the policy, overridden by ``options``. Raises
        :class:`~headrace.base.errors.ConfigError` for an unknown name or an invalid value."""
        known = SampleOptions.__annotations__
        for key in options:
            if key not in known:
                raise ConfigError(f"sampling has no setting {key!r}", remedy=nearest(key, known))
        try:
            tree = {**msgspec.to_builtins(self._defaults), **options}
            sampling = msgspec.convert({**tree, "logit_bias": dict(tree["logit_bias"])}, Sampling)
        except msgspec.ValidationError as error:
            raise ConfigError(f"sampling {dict(options)}: {error}", remedy="fix that setting") from None
        return msgspec.structs.replace(sampling, record_kept=sampling.truncated and self._keep_mask)

    async def sample(self, engine: Engine, groups: Sequence[Sequence[SampleRequest]]) -> list[list[Sample]]:
        """Send all requests to ``engine`` at once, and return one sample for each request, nested like the requests."""
        flat = await run_together([self._sample_one(engine, request) for group in groups for request in group])
        samples = iter(flat)
        return [[next(samples) for _ in group] for group in groups]

    async def _sample_one(self, engine: Engine, request: SampleRequest) -> Sample:
        """Send one request to ``engine``, collect the chunks of its answer, and return them as one sample."""
        parts: list[Tokens] = []
        prompt, stop_reason, request_id = request.prompt, None, -1
        prompt_ids_T = np.zeros(0, np.int32) if request.options.fork else prompt.ids_T
        async for chunk in engine.generate(prompt_ids_T, request.sampling, request.options):
            if chunk.lost:
                parts.clear()
            if chunk.prompt_routing is not None:
                prompt = msgspec.structs.replace(prompt, routing=chunk.prompt_routing)
            parts.append(chunk.tokens)
            stop_reason, request_id = chunk.stop_reason, chunk.request_id
        tokens = Tokens.concat(parts)
        return Sample(
            prompt=prompt,
            tokens=tokens,
            text=self._decode(tokens),
            stop_reason=stop_reason,
            group=request.group,
            sampling=request.sampling,
            request_id=request_id,
            engine=self.name,
        )

    def _decode(self, tokens: Tokens) -> str:
        """Return the text of sampled tokens, without special tokens."""
        tokenizer: Any = self._tokenizer  # without clean-up, so that the text is exactly the sampled text
        return str(
            tokenizer.decode(tokens.ids_T.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def demonstration(self, prompt: Tokens, answer: str) -> Sample:
        """Return a sample with the text ``answer``, which was not sampled, for supervised training. The tokenizer's
        end-of-sequence token is appended to the answer."""
        tokenizer: Any = self._tokenizer
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        self.num_prompts += 1
        return Sample(prompt=prompt, tokens=Tokens.observed(ids), text=answer, group=self.num_prompts - 1)
