"""The routes ``/tokenize`` and ``/detokenize``, which convert text to token ids and back, in vLLM's format."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.base.net.refusal import Refusal
from headrace.wings.serve.answering import Service, make_body_limits
from headrace.wings.serve.body import read_object
from headrace.wings.serve.prompts import check_model
from headrace.wings.serve.schema import INT32_MAX, ChatMessageBody, TemplateVariables
from headrace.wings.serve.strict import StrictBody, read_body


class TokenizeBody(StrictBody):
    """The body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    """Name of the model; unset: the served model."""
    prompt: str | None = None
    """The text to encode; unset where ``messages`` are given."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a ``prompt``, as it does for completions."""
    messages: list[ChatMessageBody] | None = Field(default=None, min_length=1)
    """The messages to render by the chat template and encode; unset where a ``prompt`` is given."""
    add_generation_prompt: bool = True
    """Whether the beginning of the assistant's turn is added after ``messages``, as it is for chat completions."""
    chat_template_kwargs: TemplateVariables = Field(default={}, max_length=32)
    """Further variables of the chat template."""
    return_token_strs: bool = False
    """Whether the answer contains the text of each token."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        """Refuse a body with both a prompt and messages, and one with neither."""
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("source", "give either prompt or messages")
        return self


class DetokenizeBody(StrictBody):
    """The body of ``POST /detokenize``: the token ids to convert to text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT32_MAX)]]


async def tokenize(request: Request, service: Service) -> Response:
    """Answer ``POST /tokenize`` with the token ids of a prompt or of a rendered chat by the tokenizer of ``service``,
    and their number. Raises :class:`Refusal` for an invalid request."""
    body = read_body(TokenizeBody, await read_object(request, make_body_limits(service)))
    check_model(body.model, service.served)
    tokenizer = service.tokenizer

    def encode() -> list[int]:
        """Return the token ids of the prompt, or of the messages by the chat template."""
        if body.messages is None:
            prompt = body.prompt or ""
            return tokenizer.encode(prompt) if body.add_special_tokens else tokenizer.encode_rendered(prompt)
        messages = [message.message() for message in body.messages]
        return tokenizer.encode_rendered(
            tokenizer.render(messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt)
        )

    ids = await asyncio.get_running_loop().run_in_executor(service.encoder, encode)
    spelled = {"token_strs": [tokenizer.spell(token) for token in ids]} if body.return_token_strs else {}
    return JSONResponse({"count": len(ids), "max_model_len": service.served.max_context, "tokens": ids, **spelled})


async def detokenize(request: Request, service: Service) -> Response:
    """Answer the ``request`` to ``POST /detokenize`` with the text of the token ids by the tokenizer of ``service``,
    including special tokens. Raises :class:`Refusal` for an id that the tokenizer does not have."""
    body = read_body(DetokenizeBody, await read_object(request, make_body_limits(service)))
    check_model(body.model, service.served)
    unknown = next((token for token in body.tokens if token >= service.tokenizer.vocab_size), None)
    if unknown is not None:
        raise Refusal(
            f"tokens holds {unknown}, outside the vocabulary of {service.tokenizer.vocab_size}",
            remedy="send ids of this tokenizer",
            param="tokens",
        )
    return JSONResponse({"prompt": service.tokenizer.decode_all(body.tokens)})
