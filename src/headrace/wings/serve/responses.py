"""The conversion of requests to OpenAI's ``POST /v1/responses`` to chat requests, and of their answers back to
responses.

The models of bodies and the events come from :mod:`headrace.wings.agents.responses`. The server stores no responses, so
a request must contain the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.chat import Message, Reply
from headrace.wings.agents.base import ExchangeContext, Json
from headrace.wings.agents.reading import encode_call
from headrace.wings.agents.responses import ResponseForm, ResponsesBody
from headrace.wings.serve.answers import AnswerHead
from headrace.wings.serve.choices import ChoicePiece
from headrace.wings.serve.schema import ChatBody
from headrace.wings.serve.strict import read_body

LOGPROBS = "message.output_text.logprobs"


class _ServedBody(ResponsesBody):
    """The body of a request to ``/v1/responses``, without ``tool_choice`` and ``text.format``, which are parsed
    separately. Unlike an environment's endpoint, the server accepts ``parallel_tool_calls``, and refuses
    ``previous_response_id``."""

    unsupported: ClassVar = {
        **{name: harmless for name, harmless in ResponsesBody.unsupported.items() if name != "parallel_tool_calls"},
        "previous_response_id": ("",),
    }
    parallel_tool_calls: bool = True


def read_response(tree: Mapping[str, Any], context: ExchangeContext, name: str) -> tuple[ChatBody, ResponseForm]:
    """Parse a request to ``/v1/responses``, and return it as the body of a chat request, with the builder of its
    answer. ``tree`` is the JSON of the request; ``name`` is the model's name in the answer if the request has none.
    Raises :class:`Refusal` for invalid or unsupported fields. ``context`` has the facts of the request beside its
    JSON."""
    fields = dict(tree)
    choice = fields.pop("tool_choice", "auto")
    text = fields.get("text") or {}
    format_ = text.get("format") if isinstance(text, dict) else None
    if format_ is not None:
        fields["text"] = {name: part for name, part in text.items() if name != "format"}
    body = read_body(_ServedBody, fields)
    _refuse_unsampled(body)
    messages = (*body.opening(), *body.conversation({}))
    if any(message.reasoning for message in messages):
        raise Refusal(
            "input holds reasoning, which this server does not tell apart from text",
            remedy="leave it out, or send it as text",
            param="input",
            code="unsupported_value",
        )
    chat = {
        "model": body.model or None,
        "messages": [_encode_message(message) for message in messages],
        "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools],
        "tool_choice": _convert_choice(choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _convert_format(format_),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": LOGPROBS in body.include,
        "stream": body.stream,
    }
    own = {
        "model": body.model or name,
        "tool_choice": choice,
        "text": {"format": format_ or {"type": "text"}},
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    with rename_refused_field():
        chat_body = read_body(ChatBody, {name: value for name, value in chat.items() if value is not None})
    return chat_body, ResponseForm(body=body, context=context, own=own)


def make_response(form: ResponseForm, head: AnswerHead, pieces: Sequence[ChoicePiece], num_prompt_tokens: int) -> Json:
    """Return the JSON of a complete response, built by ``form`` and ``head``, whose only choice consists of ``pieces``,
    after a prompt of ``num_prompt_tokens`` tokens. In addition to OpenAI's fields it has the token ids, the version
    that sampled each token, and the stop reason."""
    whole = ChoicePiece.concat(pieces)
    assert whole.stop_reason is not None, "a choice has ended with its last piece"
    tokens = whole.tokens
    reply = Reply(
        message=Message(role="assistant", content=whole.text, tool_calls=tuple(head.calls(whole))),
        turn=0,
        stop_reason=whole.stop_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=tokens.num_sampled,
        logprobs=tuple(tokens.logprobs_T.tolist()),
        token_ids=tuple(tokens.ids_T.tolist()),
    )
    return {
        **form.final_body(reply),
        "stop_reason": whole.stop_reason,
        "token_ids": list(reply.token_ids),
        "versions": tokens.versions_T.tolist(),
    }


@contextmanager
def rename_refused_field() -> Iterator[None]:
    """Return a context that rewrites a :class:`Refusal` of the chat field ``response_format`` to name ``text.format``,
    the field of the response from which it was converted."""
    try:
        yield
    except Refusal as error:
        theirs, ours = "response_format", "text.format"
        if error.param is None or error.param.partition(".")[0] != theirs:
            raise
        problem, remedy, param = (
            words.replace(theirs, ours, 1) for words in (error.problem, error.remedy, error.param)
        )
        raise Refusal(problem, remedy=remedy, status=error.status, param=param, code=error.code) from None


def _refuse_unsampled(body: ResponsesBody) -> None:
    """Raise :class:`Refusal` for the settings of effort and verbosity, which this server does not implement."""
    settings = {"reasoning.effort": body.reasoning.effort, "text.verbosity": body.text.verbosity}
    for name, value in settings.items():
        if value not in ("", "none"):
            raise Refusal(
                f"{name}={excerpt(value)} is not supported",
                remedy=f"leave {name} out",
                param=name,
                code="unsupported_parameter",
            )


def _encode_message(message: Message) -> Json:
    """Return a message as JSON in the format of chat completions."""
    calls = [encode_call(call) for call in message.tool_calls]
    fields = {"role": message.role, "content": message.content, "tool_call_id": message.tool_call_id}
    return {**fields, **({"tool_calls": calls} if calls else {})}


def _convert_choice(choice: object) -> object:
    """Return the field ``tool_choice`` of a response, converted to the format of chat completions. A value in another
    format is returned unchanged, and checked later."""
    match choice:
        case {"type": "function", "name": name, **rest} if not rest:
            return {"type": "function", "function": {"name": name}}
    return choice


def _convert_format(format_: object) -> object:
    """Return the field ``text.format`` of a response, converted to the format of chat completions' ``response_format``.
    A value in another format is returned unchanged, and checked later."""
    match format_:
        case {"type": "json_schema", "schema": schema, **rest} if rest.keys() <= {"name", "strict", "description"}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    return format_
