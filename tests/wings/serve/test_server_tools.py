"""Tools and responses of a server, called with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.base.net.refusal import Refusal
from headrace.base.types.columns import IntColumn
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine.base import Engine
from headrace.launch.inprocess import LocalEngine
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.calls import CallFinder, make_call_structure
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.prompts import ServedModel
from headrace.wings.serve.run import LoadedModel, load_served_model
from tests.extension.stranger.stranger.parser import Shout
from tests.wings.serve.test_server_structure import byte_tokenizer

pytest.importorskip("llguidance")
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if think %}<think>{% endif %}{% endif %}"
)
WITHOUT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
LOOK = {
    "type": "object",
    "properties": {"at": {"enum": ["sky", "sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "look", "description": "See.", "parameters": LOOK}},
]
FLAT: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
OF_TEXT = {"name": "f", "parameters": {"type": "string"}}
ENDLESS = {"name": "grow", "parameters": {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}
URL = "http://127.0.0.1/v1"
USER: Any = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def words(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module", params=[WITH_TOOLS, WITHOUT], ids=["hermes", "json"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    vocab = "".join(chr(0x100 + at) for at in range(260))
    size = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64, "max_positions": 2048}
    spec = TinySpec(vocab=vocab, init_std=0.3, **size)
    directory: Path = make_tiny(tmp_path_factory.mktemp("tools") / "little", spec)
    words(request.param).save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**tree, "eos_token_id": 0, "pad_token_id": 0}))
    config = {"model": {"path": str(directory)}, "engine": {"cache_tokens": 8192, "max_context": 2048}}
    return load_served_model(validate(ServeConfig, config), clock=RealClock())


Use = Callable[[openai.AsyncOpenAI], Any]


def with_client(engine: Callable[[], Engine], tokenizer: ServedTokenizer, masks: Any, use: Use) -> Any:
    """What ``use`` returns, given a client of a server over the engine that ``engine`` makes."""
    settings = validate(ServeConfig, {"model": {"path": "x"}}).serve

    async def run() -> Any:
        served = ServedModel(name="little", max_context=2048, settings=settings)
        with ThreadPoolExecutor(1) as encoder:
            service = Service(
                engine=engine(), masks=masks, tokenizer=tokenizer, served=served, clock=RealClock(), encoder=encoder
            )
            transport = httpx.ASGITransport(make_app(ServerState(service=service), ""))
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    base_url="http://127.0.0.1/v1", api_key="x", http_client=http, max_retries=0
                ) as client,
            ):
                return await use(client)

    return asyncio.run(asyncio.wait_for(run(), 60))


def sampled(loaded: LoadedModel, use: Use) -> Any:
    made: list[LocalEngine] = []

    def engine() -> Engine:
        made.append(LocalEngine(loaded.core, clock=RealClock()))
        return made[0]

    async def running(client: openai.AsyncOpenAI) -> Any:
        async with made[0]:
            return await use(client)

    return with_client(engine, loaded.tokenizer, loaded.masks, running)


class Scripted:
    """An engine that says the same text, token by token, and remembers the prompt and the sampling."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, reason: StopReason = StopReason.STOP) -> None:
        self.ids = [*tokenizer.encode(text), *([0] if reason is StopReason.STOP else [])]
        self.reason, self.tokenizer = reason, tokenizer
        self.prompt = ""
        self.sampling: Sampling | None = None

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions
    ) -> AsyncIterator[TokenChunk]:
        self.prompt, self.sampling = self.tokenizer.decode(prompt_ids_T.tolist()), sampling
        for place, token in enumerate(self.ids):
            tokens = Tokens(
                ids_T=np.array([token], np.int32),
                logprobs_T=np.array([-0.5], np.float32),
                versions_T=np.array([7], np.int32),
            )
            yield TokenChunk(tokens=tokens, stop_reason=self.reason if place == len(self.ids) - 1 else None)


def said(text: str, use: Use, template: str = WITH_TOOLS, reason: StopReason = StopReason.STOP) -> tuple[Any, Scripted]:
    tokenizer = words(template)
    engine = Scripted(text, tokenizer, reason)
    return with_client(lambda: cast("Engine", engine), ServedTokenizer(tokenizer, (0,)), None, use), engine


async def whole(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.create(model="little", messages=USER, tools=TOOLS, seed=2, **more)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_required_is_made_and_fits_its_schema(loaded: LoadedModel, choice: Any, parallel: bool) -> None:
    more = {"tool_choice": choice, "parallel_tool_calls": parallel, "n": 4, "max_completion_tokens": 900}
    blanks = {str(token): -100 for blank in " \n\r\t" for token in byte_tokenizer().encode(blank)}
    answer = sampled(loaded, lambda client: whole(client, logit_bias=blanks, **more))
    for one in answer.choices:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        assert len(one.message.tool_calls) == 1 or (choice == "required" and parallel)
        for call in one.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in (("add", "look") if choice == "required" else ("look",))
            assert arguments.keys() == ({"a", "b"} if call.function.name == "add" else {"at"})
    ids = [call.id for one in answer.choices for call in one.message.tool_calls]
    assert len(set(ids)) == len(ids)


def test_calls_are_found_in_an_answer_and_its_text_is_kept() -> None:
    answer, engine = said(f"Well. {CALL}", whole)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert choice.token_ids == engine.ids
    assert '"name": "look"' in engine.prompt
    assert engine.sampling is not None
    assert engine.sampling.structure == ""


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"Well. {CALL}\n{CALL}", "Well.", 2),
        (f"<think>{CALL}</think>\n\nNo.", f"<think>{CALL}</think>\n\nNo.", 0),
        (f"<think>a</think>\n{CALL}", "<think>a</think>\n", 1),
        ("a <tool_call>{", "a <tool_call>{", 0),
        ("a < b", "a < b", 0),
        ("", "", 0),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer_and_its_calls(text: str, content: str, num_calls: int) -> None:
    async def streamed(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model="little", messages=USER, tools=TOOLS) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]
            return pieces, (await stream.get_final_completion()).choices[0]

    (pieces, last), _ = said(text, streamed)
    answer, _ = said(text, whole)
    message = answer.choices[0].message
    assert (message.content or "", len(message.tool_calls or [])) == (content, num_calls)
    assert ("".join(pieces), last.message.content or "") == (content, content)
    assert [call.function.arguments for call in last.message.tool_calls or []] == [
        call.function.arguments for call in message.tool_calls or []
    ]
    assert last.finish_reason == ("tool_calls" if num_calls else "stop")


def test_an_answer_that_is_cut_off_ends_for_its_length_whatever_it_calls() -> None:
    answer, _ = said(CALL, whole, reason=StopReason.LENGTH)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("template", [WITH_TOOLS, WITHOUT], ids=["hermes", "json"])
def test_a_conversation_goes_on_after_its_calls(template: str) -> None:
    async def twice(client: openai.AsyncOpenAI) -> Any:
        text = {"role": "assistant", "content": None, "tool_calls": calls}
        messages: Any = [*USER, text, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
        return await client.chat.completions.create(model="little", messages=messages, tools=TOOLS)

    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    answer, engine = said("3.", twice, template)
    assert answer.choices[0].message.content == "3."
    shown = '[assistant]<add {"a": 1, "b": 2}>[tool]3[assistant]'
    if template == WITHOUT:
        shown = '[assistant]{"name": "add", "arguments": {"a": 1, "b": 2}}[user]Answer of tool: 3'
    assert shown in engine.prompt.replace("Answer of add", "Answer of tool")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    answer, engine = said(CALL, lambda client: whole(client, tool_choice="none"))
    assert answer.choices[0].message.content == CALL
    assert "look" not in engine.prompt


@pytest.mark.parametrize(
    ("more", "words_"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "expected tools among which"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "expected \"none\", \"auto\""),
        ({"tools": [], "tool_choice": "required"}, "expected tools among which"),
        ({"parallel_tool_calls": False}, "only with tool_choice 'required'"),
        ({"response_format": {"type": "json_object"}}, "expected no structure of the answer beside tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools are called 'add'"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "expected no ignore_eos"),
        ({"tool_choice": "required", "extra_body": {"chat_template_kwargs": {"think": True}}}, "begins a thought"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": OF_TEXT}]},
            "arguments are an object",
        ),
        (
            {"tool_choice": "required", "tools": [TOOLS[0], {"type": "function", "function": ENDLESS}]},
            "the parameters of the tool 'grow': the structure cannot be kept to: the schema requires a part within "
            "itself without end",
        ),
        ({"messages": [*USER, {"role": "tool", "tool_call_id": "z", "content": "3"}]}, "names the call 'z'"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_made_are_refused_in_words(more: dict[str, Any], words_: str) -> None:
    asked: dict[str, Any] = {"model": "little", "messages": USER, "tools": TOOLS, **more}
    with pytest.raises(openai.BadRequestError) as refused:
        said("", lambda client: client.chat.completions.create(**asked))
    assert words_ in refused.value.message


def test_calls_of_a_form_without_a_grammar_cannot_be_enforced() -> None:
    with pytest.raises(Refusal, match="calls in the form of Shout cannot be enforced"):
        make_call_structure(Shout(), [], many=True)


def test_what_may_be_a_call_is_held_back() -> None:
    finder = CallFinder(ServedTokenizer(words(WITH_TOOLS), (0,)).parser, opened=True)
    pieces = [finder.push(part, ended=False)[0] for part in ("so</thi", "nk>\nA", "h <to", "y> b", " <tool_call>{")]
    assert pieces == ["so</thi", "nk>\nA", "h", " <toy> b", ""]
    assert finder.push("", ended=True) == (" <tool_call>{", ())


async def respond(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.responses.create(**{"model": "little", "input": "Hi", "instructions": "Be brief.", **more})


def test_a_response_tells_text_calls_tokens_and_their_versions() -> None:
    answer, engine = said(
        f"Well. {CALL}", lambda client: respond(client, tools=FLAT, include=["message.output_text.logprobs"])
    )
    message, call = answer.output
    assert (answer.status, answer.output_text, answer.model) == ("completed", "Well.", "little")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
    assert [entry.logprob for entry in message.content[0].logprobs] == [-0.5] * len(engine.ids)
    assert (answer.token_ids, set(answer.versions)) == (engine.ids, {7})
    assert answer.usage.output_tokens == len(engine.ids)
    assert engine.prompt.endswith("[system]Be brief.[user]Hi[assistant]")


@pytest.mark.parametrize("text", [f"Well. {CALL}", CALL, "Well.", ""])
def test_the_events_of_a_response_add_up_to_it(text: str) -> None:
    async def streamed(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="little", input="Hi", tools=FLAT) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    (events, last), _ = said(text, streamed)
    answer, _ = said(text, lambda client: respond(client, tools=FLAT))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    assert [item.type for item in last.output] == [item.type for item in answer.output]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_goes_on_after_its_calls_and_ends_for_its_length() -> None:
    items: Any = [
        *USER,
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    answer, engine = said(
        "3", lambda client: respond(client, input=items, max_output_tokens=2), reason=StopReason.LENGTH
    )
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert '[assistant]<add {"a": 1, "b": 2}>[tool]3[assistant]' in engine.prompt
    assert engine.sampling is not None
    assert engine.sampling.max_new_tokens == 2


def test_a_response_keeps_to_a_schema_or_to_a_required_call(loaded: LoadedModel) -> None:
    blanks = "exactly one word"
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": [blanks]}, "strict": True}
    answer = sampled(loaded, lambda client: respond(client, text={"format": schema}))
    assert json.loads(answer.output_text) == blanks
    named = {"type": "function", "name": "look"}
    tools = [{**FLAT[1], "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}]
    answer = sampled(loaded, lambda client: respond(client, tools=tools, tool_choice=named, max_output_tokens=900))
    (call,) = answer.output
    assert (call.name, answer.tool_choice.name) == ("look", "look")


@pytest.mark.parametrize(
    ("more", "words_"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1' is not supported"),
        ({"background": True}, "background=True is not supported"),
        ({"top_logprobs": 2}, "top_logprobs=2 is not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort='high' is not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity='low' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"text": {"format": {"type": "xml"}}}, "expected the type"),
        ({"input": [THOUGHT]}, "input holds reasoning"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_do_is_refused_by_name(more: dict[str, Any], words_: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        said("", lambda client: respond(client, **more))
    assert words_ in refused.value.message
    if "format" in more.get("text", {}):
        assert refused.value.param == "text.format"
        assert "response_format" not in refused.value.message


def test_a_response_whose_schema_cannot_be_kept_is_refused_by_the_field_that_was_sent(loaded: LoadedModel) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "array", "items": False, "minItems": 1}}
    with pytest.raises(openai.BadRequestError) as refused:
        sampled(loaded, lambda client: respond(client, text={"format": schema}))
    assert refused.value.param == "text.format"


def test_a_response_that_fails_while_it_streams_says_so() -> None:
    async def streamed(client: openai.AsyncOpenAI) -> Any:
        return [event async for event in await respond(client, stream=True)]

    class Breaking(Scripted):
        async def generate(self, *asked: Any) -> AsyncIterator[TokenChunk]:
            async for chunk in super().generate(*asked):
                yield chunk
                yield TokenChunk(tokens=chunk.tokens, lost="new weights")

    tokenizer = words(WITH_TOOLS)
    engine = cast("Engine", Breaking("Well.", tokenizer))
    with pytest.raises(openai.APIError, match="was restarted with new weights"):
        with_client(lambda: engine, ServedTokenizer(tokenizer, (0,)), None, streamed)
