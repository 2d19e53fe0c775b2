"""The checks of a request body against the server's limits, and the conversion of the body to requests to the engine. A
choice is one of the answers to a request. Checks raise :class:`Refusal`, which becomes the HTTP response."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.base.errors import nearest
from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.messages.engine import RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.wings.agents.reading import named_answers, refuse_same_names
from headrace.wings.serve.calls import make_call_structure
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.choices import ChoiceRequest, Echo
from headrace.wings.serve.config import ServeSection
from headrace.wings.serve.schema import AnyBody, ChatBody, CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served, with the limits of its requests."""

    name: str
    """The model's name in requests."""
    agents: tuple[str, ...] = ()
    """Names of the agents with adapters; a request may name one of them as its model."""
    max_context: int
    """Largest number of tokens of a prompt and its choice together."""
    settings: ServeSection
    """The settings ``[serve]``, which contain the limits of requests."""


def check_model(model: str | None, served: ServedModel) -> None:
    """Raise :class:`Refusal` with status 404 if the server of the model ``served`` does not serve ``model``; ``None``
    stands for the default model."""
    names = (served.name, *served.agents)
    if model is not None and model not in names:
        raise Refusal(
            f"model={excerpt(model)} is not served",
            remedy=nearest(model[:100], names),
            status=404,
            param="model",
            code="model_not_found",
        )


def check_body(body: AnyBody, served: ServedModel) -> None:
    """Raise :class:`Refusal` for a request with the ``body`` that exceeds a limit of the server (``served``) or has
    contradictory fields, before anything is computed."""
    check_model(body.model, served)
    limits = served.settings
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
        _check_completion(body, limits, served.agents)
    else:
        _check_chat(body)
    max_tokens = _requested_max_tokens(body)
    if max_tokens is not None and limits.max_tokens is not None and max_tokens > limits.max_tokens:
        raise Refusal(
            f"max_tokens={max_tokens} is more than {limits.max_tokens}",
            remedy=f"ask for max_tokens <= {limits.max_tokens}",
            param="max_tokens",
        )


def encode_prompts(body: AnyBody, tokenizer: ServedTokenizer, served: ServedModel) -> list[list[int]]:
    """Return the prompts of ``body`` as token ids by ``tokenizer``, one list for each prompt; a chat has one prompt,
    its messages rendered by the chat template. A text that is certainly too long for the context of ``served`` is
    refused before it is encoded."""
    if isinstance(body, ChatBody):
        messages = named_answers(message.message() for message in body.messages)
        text = tokenizer.render(messages, body.chat_template_kwargs, tools=body.offered)
        _refuse_long(text, "messages", tokenizer, served)
        return [tokenizer.encode_rendered(text)]
    for prompt in body.prompt:
        if isinstance(prompt, str):
            _refuse_long(prompt, "prompt", tokenizer, served)
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in body.prompt]


def make_structure(body: AnyBody, prompts: list[list[int]], tokenizer: ServedTokenizer) -> str:
    """Return the structure that every choice of ``body`` must follow, such as a JSON schema, in the engine's format; an
    empty string for none. If the request requires a call of a tool, return the structure of such calls. ``prompts`` are
    the prompts as token ids, and ``tokenizer`` is that of the model. Raises :class:`Refusal` for calls that cannot be
    enforced."""
    if not isinstance(body, ChatBody) or body.tool_choice.kind != "required":
        return body.structure
    if tokenizer.opens_thought(prompts[0]):
        raise Refusal(
            "tool_choice: the chat template begins a thought, and an answer that is a call has none",
            remedy="use tool_choice='auto', or a variable of the template without a thought, such as "
            "chat_template_kwargs={'enable_thinking': false}",
            param="tool_choice",
            code="unsupported_value",
        )
    name = body.tool_choice.name
    return make_call_structure(
        tokenizer.parser,
        [tool for tool in body.offered if name in ("", tool.name)],
        many=body.parallel_tool_calls and not name,
        special=tokenizer.special_markers,
    )


def make_choices(
    body: AnyBody, prompts: list[list[int]], tokenizer: ServedTokenizer, served: ServedModel, structure: str
) -> list[ChoiceRequest]:
    """Return the requests to the engine: ``body.n`` choices for each of ``prompts`` (token ids), in the order of the
    prompts. Each choice follows ``structure`` (empty: none). The seed of choice *i* is the seed of the request + *i*.
    ``tokenizer`` and ``served`` are those of the model."""
    seed = secrets.randbits(62) if body.seed is None else body.seed
    agent = body.model if body.model in served.agents else ""
    options = RequestOptions(priority=body.priority, deadline_s=body.deadline_s, agent=agent)
    requests: list[ChoiceRequest] = []
    for prompt in prompts:
        ids_T = np.array(prompt, np.int32)
        max_new_tokens = _max_new_tokens(body, len(prompt), served)
        for _ in range(body.n):
            sampling = msgspec.structs.replace(
                _make_sampling(body, tokenizer, max_new_tokens, seed + len(requests)), structure=structure
            )
            requests.append(
                ChoiceRequest(
                    index=len(requests), prompt_ids_T=ids_T, sampling=sampling, options=options, echo=_make_echo(body)
                )
            )
    return requests


def _refuse_long(text: str, param: str, tokenizer: ServedTokenizer, served: ServedModel) -> None:
    """Raise :class:`Refusal` for a text that has more characters than the longest tokens could represent in the
    context, so that it need not be tokenized. ``param`` is the field of the request that contains the text."""
    longest = served.max_context * tokenizer.longest_token
    if len(text) > longest:
        raise Refusal(
            f"{param} of {len(text)} characters exceeds the context of {served.max_context} tokens: no token stands "
            f"for more than {tokenizer.longest_token} characters",
            remedy="shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_completion(body: CompletionBody, limits: ServeSection, agents: Sequence[str]) -> None:
    """Raise :class:`Refusal` if the options of the completion request ``body`` contradict each other, or if it has more
    prompts than ``limits`` allow. Logprobs of an echoed prompt are refused for the ``agents``, which are names of
    adapters, because they are computed by the model without an adapter."""
    if body.max_tokens == 0 and not body.echo:
        raise Refusal(
            "max_tokens=0 without echo=true requests no output",
            remedy="set max_tokens >= 1, or echo=true",
            param="max_tokens",
        )
    if body.echo and body.logprobs is not None and body.model in agents:
        raise Refusal(
            f"echo=true with logprobs: the logprobs of a prompt are those of the model, not of {excerpt(body.model)}",
            remedy="leave logprobs or echo out, or set model to the name of the served model",
            param="echo",
            code="unsupported_value",
        )
    if len(body.prompt) > limits.max_prompts:
        raise Refusal(
            f"prompt holds {len(body.prompt)} prompts, more than {limits.max_prompts}",
            remedy="send several requests",
            param="prompt",
        )


def _check_chat(body: ChatBody) -> None:
    """Raise :class:`Refusal` if the options of the chat request ``body`` contradict each other."""
    refuse_same_names([tool.tool() for tool in body.tools])
    if body.top_logprobs and not body.logprobs:
        raise Refusal(
            f"top_logprobs={body.top_logprobs} without logprobs",
            remedy="set logprobs=true, or leave top_logprobs out",
            param="top_logprobs",
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Refusal(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ",
            remedy="give max_completion_tokens alone",
            param="max_tokens",
        )


def count_likeliest(body: AnyBody) -> int:
    """Return the number of likeliest entries that the request with the ``body`` requests at each token."""
    return (body.top_logprobs if isinstance(body, ChatBody) else body.logprobs) or 0


def _requested_max_tokens(body: AnyBody) -> int | None:
    """Return the largest number of tokens of a choice that the request sets; ``None`` if it sets none."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return body.max_tokens


def _max_new_tokens(body: AnyBody, length: int, served: ServedModel) -> int:
    """Return the largest number of tokens of a choice after a prompt of ``length`` tokens: the number that the request
    with the ``body`` sets or, without one, the number that the context and the limit of ``served`` allow. Raises
    :class:`Refusal` if the prompt is empty, or if prompt and choice do not fit the context."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if length == 0:
        raise Refusal(f"{param} holds no tokens", remedy="give at least one token", param=param)
    requested, left = _requested_max_tokens(body), served.max_context - length
    needed = 1 if requested is None else requested
    if left < needed:
        raise Refusal(
            f"{param} of {length} tokens + max_tokens={needed} exceed the context of {served.max_context} tokens",
            remedy="shorten the prompt, lower max_tokens, or raise engine.max_context and engine.cache_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return min(left, served.settings.max_tokens or left) if requested is None else requested


def _make_echo(body: AnyBody) -> Echo | None:
    """Return the settings of the echo of a completion request; ``None`` for a chat, and if no echo is requested."""
    if isinstance(body, ChatBody) or not body.echo:
        return None
    return Echo(alone=body.max_tokens == 0, scored=body.logprobs is not None, num_top=count_likeliest(body))


def _make_sampling(body: AnyBody, tokenizer: ServedTokenizer, max_new_tokens: int, seed: int) -> Sampling:
    """Return the sampling parameters of one choice of ``body``, with its own ``seed`` and at most ``max_new_tokens``
    tokens. ``tokenizer`` has the model's stop tokens. Stop tokens are the model's (unless ``ignore_eos`` is set) and
    the request's."""
    ends = () if body.ignore_eos else tokenizer.stop_ids
    return Sampling(
        max_new_tokens=max(1, max_new_tokens),  # with 0, only the prompt is returned
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
        record_top=count_likeliest(body),
    )
