"""From the body of a request to the choices that are to be sampled."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from headrace.base.errors import nearest
from headrace.base.net.refusal import Refusal, shown
from headrace.base.types.sampling import Sampling
from headrace.engine.base import RequestOptions
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.choices import ChoiceRequest
from headrace.wings.serve.config import ServeSection
from headrace.wings.serve.schema import AnyBody, ChatBody, CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What is served, and within which limits."""

    model: str
    """Its name."""
    agents: tuple[str, ...] = ()
    """Names under which it answers with the adapters of agents."""
    max_context: int
    """Longest prompt plus choice, in tokens."""
    limits: ServeSection


def check_model(asked: str | None, terms: PromptLimits) -> None:
    """Refuse a model that is not served."""
    served = (terms.model, *terms.agents)
    if asked is not None and asked not in served:
        raise Refusal(
            f"model={shown(asked)} is not served",
            remedy=nearest(asked[:100], served),
            status=404,
            param="model",
            code="model_not_found",
        )


def check_body(body: AnyBody, terms: PromptLimits) -> None:
    """Refuse what is over a limit, or cannot be done, before anything is computed."""
    check_model(body.model, terms)
    limits = terms.limits
    if body.n > limits.max_n:
        raise Refusal(f"n={body.n} is more than {limits.max_n}", remedy=f"ask for n <= {limits.max_n}", param="n")
    if body.priority > limits.max_priority:
        raise Refusal(
            f"priority={body.priority} is more than {limits.max_priority}",
            remedy=f"ask for priority <= {limits.max_priority}, or raise serve.max_priority",
            param="priority",
        )
    if "stream_options" in body.model_fields_set and not body.stream:
        raise Refusal(
            "stream_options is given, and the answer is no stream",
            remedy="set stream=true, or leave stream_options out",
            param="stream_options",
        )
    count = body.n * (len(body.prompt) if isinstance(body, CompletionBody) else 1)
    if count > limits.max_sequences:
        raise Refusal(
            f"n={body.n} asks for {count} choices, more than the {limits.max_sequences} that may run at once",
            remedy="lower n, send several requests, or raise serve.max_sequences",
            param="n",
        )
    if isinstance(body, CompletionBody):
        _check_completion(body, limits)
    else:
        _check_chat(body)
    asked = _max_tokens(body)
    if asked is not None and limits.max_tokens is not None and asked > limits.max_tokens:
        raise Refusal(
            f"max_tokens={asked} is more than {limits.max_tokens}",
            remedy=f"ask for max_tokens <= {limits.max_tokens}",
            param="max_tokens",
        )


def encode(body: AnyBody, words: ServedTokenizer, terms: PromptLimits) -> list[list[int]]:
    """The prompts of ``body`` as token ids; what cannot fit the context is refused before it is encoded."""
    if isinstance(body, ChatBody):
        text = words.render([message.plain() for message in body.messages], body.chat_template_kwargs)
        _refuse_long(text, "messages", words, terms)
        return [words.encode_rendered(text)]
    for prompt in body.prompt:
        if isinstance(prompt, str):
            _refuse_long(prompt, "prompt", words, terms)
    return [words.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in body.prompt]


def choices(
    body: AnyBody, prompts: list[list[int]], words: ServedTokenizer, terms: PromptLimits
) -> list[ChoiceRequest]:
    """``n`` choices for each prompt, prompt after prompt."""
    seed = secrets.randbits(62) if body.seed is None else body.seed
    agent = body.model if body.model in terms.agents else ""
    options = RequestOptions(priority=body.priority, deadline_s=body.deadline_s, agent=agent)
    asked: list[ChoiceRequest] = []
    for prompt in prompts:
        ids_T = np.array(prompt, np.int32)
        max_new_tokens = _room(body, len(prompt), terms)
        for _ in range(body.n):
            sampling = _sampling(body, words, max_new_tokens, seed + len(asked))
            asked.append(ChoiceRequest(index=len(asked), prompt_ids_T=ids_T, sampling=sampling, options=options))
    return asked


def _refuse_long(text: str, param: str, words: ServedTokenizer, terms: PromptLimits) -> None:
    longest = terms.max_context * words.longest_token
    if len(text) > longest:
        raise Refusal(
            f"{param} of {len(text)} characters exceeds the context of {terms.max_context} tokens: no token stands for "
            f"more than {words.longest_token} characters",
            remedy="shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_completion(body: CompletionBody, limits: ServeSection) -> None:
    if body.logprobs:
        raise _no_top_logprobs("logprobs", body.logprobs)
    if len(body.prompt) > limits.max_prompts:
        raise Refusal(
            f"prompt holds {len(body.prompt)} prompts, more than {limits.max_prompts}",
            remedy="send several requests",
            param="prompt",
        )


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs:
        raise _no_top_logprobs("top_logprobs", body.top_logprobs)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Refusal(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ",
            remedy="give max_completion_tokens alone",
            param="max_tokens",
        )


def _no_top_logprobs(name: str, value: int) -> Refusal:
    return Refusal(
        f"{name}={value}: only the logprob of the sampled token is known, not those of the most likely others",
        remedy="set logprobs=true, and top_logprobs=0 or leave it out" if name[0] == "t" else "set logprobs=0",
        param=name,
        code="unsupported_value",
    )


def _max_tokens(body: AnyBody) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return body.max_tokens


def _room(body: AnyBody, length: int, terms: PromptLimits) -> int:
    """How many tokens a choice after a prompt of ``length`` may have."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if length == 0:
        raise Refusal(f"{param} holds no tokens", remedy="give at least one token", param=param)
    asked, left = _max_tokens(body), terms.max_context - length
    if left < max(1, asked or 0):
        raise Refusal(
            f"{param} of {length} tokens + max_tokens={asked or 1} exceed the context of {terms.max_context} tokens",
            remedy="shorten the prompt, lower max_tokens, or raise engine.max_context and engine.cache_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return asked or min(left, terms.limits.max_tokens or left)


def _sampling(body: AnyBody, words: ServedTokenizer, max_new_tokens: int, seed: int) -> Sampling:
    ends = () if body.ignore_eos else words.stop_ids
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        stop_ids=tuple(dict.fromkeys([*ends, *body.stop_token_ids])),
        stop=body.stop,
        seed=seed % 2**63,
        record_kept=body.kept_sizes,
    )
