"""What a protocol says of an answer, said again in a later request, is the same answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.net.refusal import Refusal
from headrace.base.types.chat import Message, Reply, ToolCall
from headrace.base.types.episode import StopReason
from headrace.rollout.environments.base import AnswerPiece
from headrace.rollout.history import canonical
from headrace.wings.agents.base import ChatProtocol, Exchange, ExchangeContext
from headrace.wings.agents.chat import CHAT
from headrace.wings.agents.messages import MESSAGES
from headrace.wings.agents.responses import RESPONSES

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SPELLED = st.dictionaries(TEXTS, st.none() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2), max_size=3).map(
    json.dumps
)
CALLS = st.lists(st.tuples(TEXTS.filter(bool), SPELLED | st.sampled_from(["{", "[1]", "", "{'a': 1}"])), max_size=3)
ANSWERS = st.builds(
    lambda content, reasoning, calls: Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=f"call_1_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(calls)
        ),
    ),
    TEXTS,
    TEXTS,
    CALLS,
)
USER: Any = {"role": "user", "content": "hi"}
SYSTEM: Any = {"role": "developer", "content": "hi"}
TOOL: Any = {"name": "f", "input_schema": {}}


def context() -> ExchangeContext:
    return ExchangeContext(name="x", created_s=0, spell=str)


def reply(message: Message) -> Reply:
    return Reply(message=message, turn=1, stop_reason=StopReason.STOP, num_prompt_tokens=3, num_tokens=2)


def said_in(protocol: ChatProtocol, body: Any, message: Message) -> tuple[Exchange, Any]:
    """The body that tells ``message`` in answer to ``body``, as a client reads it."""
    exchange = protocol.parse(body, context())
    return exchange, json.loads(json.dumps(exchange.answer([reply(message)])))


def streamed(exchange: Exchange, message: Message, size: int) -> list[Any]:
    """The data of all events of a stream, in which the text comes ``size`` characters at a time."""
    stream = exchange.stream()
    texts = [("reasoning", message.reasoning), ("content", message.content)]
    pieces = [(name, text[at : at + size]) for name, text in texts for at in range(0, len(text), size)]
    events = [
        event for name, text in pieces for event in stream.add(0, AnswerPiece(num_prompt_tokens=3, **{name: text}))
    ]
    return [json.loads(json.dumps(event.data)) for event in [*events, *stream.end([reply(message)])]]


def read_again(protocol: ChatProtocol, body: Any) -> Message:
    """The first message of the policy in ``body``."""
    messages = protocol.parse(body, context()).request.messages
    (found,) = [message for message in messages if message.role == "assistant"]
    return canonical(found)


@given(ANSWERS)
def test_an_answer_in_chat_completions_comes_back_as_it_was(message: Message) -> None:
    _, told = said_in(CHAT, {"messages": [USER]}, message)
    again = {"messages": [USER, told["choices"][0]["message"], USER]}
    assert read_again(CHAT, again) == canonical(message)


@given(ANSWERS)
def test_an_answer_in_responses_comes_back_as_it_was(message: Message) -> None:
    _, told = said_in(RESPONSES, {"input": "hi"}, message)
    assert read_again(RESPONSES, {"input": [USER, *told["output"], USER]}) == canonical(message)


@given(ANSWERS)
def test_an_answer_in_messages_comes_back_as_it_was(message: Message) -> None:
    body = {"messages": [USER], "max_tokens": 9, "thinking": {"type": "adaptive"}}
    _, told = said_in(MESSAGES, body, message)
    again = {"messages": [USER, {"role": "assistant", "content": told["content"]}, USER], "max_tokens": 9}
    assert read_again(MESSAGES, again) == canonical(message)


@given(ANSWERS, st.integers(1, 13))
def test_a_stream_of_messages_adds_up_to_the_whole(message: Message, size: int) -> None:
    body = {"messages": [USER], "max_tokens": 9, "thinking": {"type": "adaptive"}}
    exchange, whole = said_in(MESSAGES, body, message)
    blocks: list[Any] = []
    for data in streamed(exchange, message, size):
        if data["type"] == "content_block_start":
            blocks.append({**data["content_block"], "spelled": ""})
        for name, field in (
            ("text", "text"),
            ("thinking", "thinking"),
            ("signature", "signature"),
            ("partial_json", "spelled"),
        ):
            if name in data.get("delta", {}):
                blocks[-1][field] += data["delta"][name]
    for block in blocks:
        spelled = block.pop("spelled")
        if block["type"] == "tool_use":
            block["input"] = json.loads(spelled)
    assert blocks == whole["content"]


@given(ANSWERS, st.integers(1, 13))
def test_a_stream_of_chat_completions_adds_up_to_the_whole(message: Message, size: int) -> None:
    exchange, whole = said_in(CHAT, {"messages": [USER], "stream": True}, message)
    choices = [data["choices"][0] for data in streamed(exchange, message, size) if data != "[DONE]"]
    told = whole["choices"][0]
    for name in ("content", "reasoning_content"):
        text = "".join(choice["delta"].get(name) or "" for choice in choices)
        assert text == (told["message"].get(name) or "")
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [{**call, "index": None} for call in calls] == [
        {**call, "index": None} for call in told["message"].get("tool_calls", ())
    ]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [told["finish_reason"]]


@given(ANSWERS, st.integers(1, 13))
def test_a_stream_of_a_response_adds_up_to_the_whole_and_ends_with_it(message: Message, size: int) -> None:
    exchange, whole = said_in(RESPONSES, {"input": "hi", "stream": True}, message)
    events = streamed(exchange, message, size)
    for kind, text in (("output_text", message.content), ("reasoning_text", message.reasoning)):
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]


def test_answers_that_follow_each_other_in_responses_stay_apart() -> None:
    def said(text: str) -> Any:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}
    items = [
        USER,
        thought,
        said("a"),
        call,
        output,
        said("b"),
        said("c"),
        thought,
        said("d"),
        {**USER, "role": "developer"},
    ]
    messages = RESPONSES.parse({"input": items}, context()).request.messages
    told = [(message.role, message.content, message.reasoning, len(message.tool_calls)) for message in messages]
    assert told == [
        ("user", "hi", "", 0), ("assistant", "a", "hm", 1), ("tool", "1", "", 0), ("assistant", "b", "", 0),
        ("assistant", "c", "", 0), ("assistant", "d", "hm", 0), ("system", "hi", "", 0),
    ]  # fmt: skip
    assert messages[2].name == "f"


def test_instructions_are_those_of_the_request_alone() -> None:
    here = context()
    first = RESPONSES.parse({"input": "one", "instructions": "Be brief."}, here)
    first.answer([reply(Message(role="assistant", content="1"))])
    again = ExchangeContext(name="y", created_s=0, spell=str, histories=here.histories)
    later = RESPONSES.parse({"input": "two", "previous_response_id": "resp_x"}, again)
    assert [message.content for message in later.request.messages] == ["one", "1", "two"]


def test_a_users_message_in_messages_is_its_texts_and_the_answers_of_tools() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    parts = [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}], "is_error": True},
        {"type": "text", "text": "and ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "now?"},
    ]
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": parts}],
        "max_tokens": 9,
    }
    messages = MESSAGES.parse(body, context()).request.messages
    assert messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),)),
        Message(role="tool", content="1", tool_call_id="c", name="f", failed=True),
        Message(role="user", content="and now?"),
    )


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}),
        (RESPONSES, {"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}),
        (
            MESSAGES,
            {
                "messages": [USER],
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "none"},
            },
        ),
    ],
)
def test_a_request_that_wants_no_call_offers_no_tool(protocol: ChatProtocol, body: Any) -> None:
    assert protocol.parse(body, context()).request.tools == ()
    body = {name: value for name, value in body.items() if name != "tool_choice"}
    assert [tool.name for tool in protocol.parse(body, context()).request.tools] == ["f"]


def test_what_claude_code_and_codex_send_beside_the_conversation_is_understood() -> None:
    """A note of the system between messages is one; to keep all thinking, and to say who asks, change nothing."""
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    note = {"role": "system", "content": [{"type": "text", "text": "agents: none"}]}
    body = {"max_tokens": 9, "messages": [USER, note, USER], "context_management": kept}
    said = MESSAGES.parse(body, context()).request.messages
    assert [(message.role, message.content) for message in said] == [
        ("user", "hi"),
        ("system", "agents: none"),
        ("user", "hi"),
    ]
    RESPONSES.parse({"input": "hi", "client_metadata": {"turn_id": "1"}}, context())
    with pytest.raises(Refusal, match="context_management"):
        MESSAGES.parse({**body, "context_management": {"edits": [{**kept["edits"][0], "keep": "none"}]}}, context())


def test_an_error_has_the_shape_of_its_protocol() -> None:
    refusal = Refusal("n=3 is odd", remedy="make it even", status=429, param="n", code="odd")
    assert CHAT.refusal(refusal)["error"]["param"] == "n"
    assert MESSAGES.refusal(refusal) == {
        "type": "error", "error": {"type": "rate_limit_error", "message": "n=3 is odd; make it even"},
    }  # fmt: skip
    name, data = RESPONSES.broken(refusal)
    assert isinstance(data, dict)
    assert (name, data["type"], data["code"], data["error"]["code"]) == ("error", "error", "odd", "odd")
