"""A real server process, called with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.wings.serve.schema import ChatBody, CompletionBody
from tests.wings.serve.server_process import CONTEXT, TOKEN, Server, make_model, served

LIMITS = {"max_n": 4, "max_prompts": 4, "max_body_bytes": 20_000, "max_sequences": 48, "grace_s": 0.3}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "little")


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    limits = [part for name, value in LIMITS.items() for part in ("--set", f"serve.{name}={value}")]
    with served(model_dir, *limits) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def complete(client: openai.OpenAI, prompt: Any = "Hello", **asked: Any) -> Any:
    return client.completions.create(model="little", prompt=prompt, **{"max_tokens": 12, "seed": 1, **asked})


def chat(client: openai.OpenAI, **asked: Any) -> Any:
    asked = {"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}], **asked}
    return client.chat.completions.create(model="little", **{"max_tokens": 12, "seed": 1, **asked})


def test_the_server_says_what_it_serves(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.version, model.max_model_len) == ("little", 0, CONTEXT)
    assert client.models.retrieve("little").id == "little"
    with pytest.raises(openai.NotFoundError, match="did you mean 'little'"):
        client.models.retrieve("litle")


def test_a_completion_carries_text_tokens_and_versions_that_agree(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert (choice.finish_reason, choice.stop_reason) == ("length", "length")
    assert len(choice.token_ids) == 12
    assert choice.versions == [0] * 12
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)


def test_every_form_of_a_prompt_gives_the_same(client: openai.OpenAI) -> None:
    ids = {text: complete(client, text, max_tokens=1).usage.prompt_tokens for text in ("ab", "c")}
    assert ids == {"ab": 2, "c": 1}
    plain = [complete(client, "ab").choices[0].text, complete(client, "c", seed=2).choices[0].text]
    assert [choice.text for choice in complete(client, ["ab", "c"]).choices] == plain
    assert complete(client, [3, 4]).choices[0].text == plain[0]  # after three special tokens, a is 3 and b is 4
    assert [choice.text for choice in complete(client, [[3, 4], [5]]).choices] == plain


def test_a_chat_is_a_completion_of_the_rendered_conversation(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == complete(client, "[system]Be[user]Hi[assistant]").choices[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    shouted = chat(client, messages=parts, extra_body={"chat_template_kwargs": {"shout": True}})
    assert shouted.choices[0].message.content == complete(client, "[user]Hi[assistant]!").choices[0].text


def test_an_assistant_may_have_said_nothing_and_nulls_are_nothing(client: openai.OpenAI) -> None:
    hello = {"role": "user", "content": "Hi", "name": None}
    for silent in ({"content": None}, {}, {"content": "", "refusal": None, "tool_calls": None}):
        answer = chat(client, messages=[hello, {"role": "assistant", **silent}, hello])
        assert answer.usage.prompt_tokens == len("[user]Hi[assistant][user]Hi[assistant]")
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    for wrong, words in ((None, "content is missing"), (picture, "reads text alone"), ([3], "reads text alone")):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            chat(client, messages=[{"role": "user", "content": wrong}])
        assert refused.value.param == "messages.0.content"


def test_a_template_may_refuse_a_conversation(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no bosses here") as refused:
        chat(client, messages=[{"role": "boss", "content": "Hi"}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("stop", [None, ["a", "e", "t"]])
def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI, stop: list[str] | None) -> None:
    settings: dict[str, Any] = {"n": 2, "max_tokens": 40, **({"stop": stop} if stop else {})}
    whole = complete(client, **settings)
    events = list(complete(client, **settings, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage == whole.usage
    assert not events[-1].choices
    for choice in whole.choices:
        mine = [event.choices[0] for event in events[:-1] if event.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [token for part in mine for token in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    talked = chat(client, **settings)
    deltas = [event.choices[0] for event in chat(client, **settings, stream=True)]
    for choice in talked.choices:
        mine = [part for part in deltas if part.index == choice.index]
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part.delta.content for part in mine) == choice.message.content


def test_each_of_n_choices_is_the_one_of_its_own_seed(client: openai.OpenAI) -> None:
    together = [choice.text for choice in complete(client, n=4, seed=7).choices]
    assert together == [complete(client, seed=7 + index).choices[0].text for index in range(4)]
    assert len(set(together)) == 4


def test_a_seed_fixes_an_answer_and_without_one_answers_differ(client: openai.OpenAI) -> None:
    assert complete(client, seed=5).choices[0].text == complete(client, seed=5).choices[0].text
    free = {complete(client, seed=None, max_tokens=24).choices[0].text for _ in range(3)}
    assert len(free) == 3


def test_many_requests_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    seeds = range(24)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: complete(client, seed=seed).choices[0].text, seeds))
    assert together[::6] == [complete(client, seed=seed).choices[0].text for seed in seeds[::6]]


def test_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    (choice,) = complete(client, logprobs=0, extra_body={"ignore_eos": True}).choices
    assert len(choice.logprobs.token_logprobs) == 12
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs)
    spelled = list(zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True))
    assert all(choice.text[offset:].startswith(token) for offset, token in spelled if token[0] != "<")
    (greedy,) = chat(client, logprobs=True, temperature=0).choices
    assert {entry.logprob for entry in greedy.logprobs.content} == {0.0}  # it was certain
    assert all(entry.top_logprobs == [] for entry in greedy.logprobs.content)


def test_stop_strings_end_a_choice_and_are_no_part_of_its_text(client: openai.OpenAI) -> None:
    (free,) = complete(client, max_tokens=60, extra_body={"ignore_eos": True}).choices
    stop = free.text[20:23]
    before = free.text[: free.text.index(stop)]
    for asked in (stop, ["no such text", stop]):
        (choice,) = complete(client, max_tokens=60, stop=asked, extra_body={"ignore_eos": True}).choices
        assert (choice.text, choice.finish_reason) == (before, "stop")
        assert len(choice.token_ids) < 60


def test_sampling_settings_reach_the_engine(client: openai.OpenAI) -> None:
    certain = complete(client, temperature=0).choices[0].text
    assert complete(client, extra_body={"top_k": 1}).choices[0].text == certain
    assert complete(client, top_p=1e-6).choices[0].text == certain
    assert complete(client, extra_body={"min_p": 1.0}).choices[0].text == certain
    (biased,) = complete(client, logit_bias={"3": 100}).choices
    assert biased.text == "a" * 12
    (penalised,) = complete(client, logit_bias={"3": 20}, frequency_penalty=2, max_tokens=40).choices
    assert 0 < penalised.text.count("a") < 40
    (kept,) = complete(client, extra_body={"top_k": 3, "kept_sizes": True, "ignore_eos": True}).choices
    assert kept.kept_sizes == [3] * 12
    (stopped,) = complete(client, logit_bias={"3": 100}, extra_body={"stop_token_ids": [3]}).choices
    assert (stopped.token_ids, stopped.finish_reason) == ([3], "stop")


def test_a_deadline_ends_a_choice_with_what_it_has(client: openai.OpenAI) -> None:
    (choice,) = complete(client, max_tokens=500, extra_body={"deadline_s": 1e-6, "ignore_eos": True}).choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", "deadline")
    assert len(choice.token_ids) < 500


def test_only_the_right_token_opens_the_door(server: Server) -> None:
    for token in ("wrong", TOKEN[:-1]):
        with server.client(token) as caller, pytest.raises(openai.AuthenticationError, match="401"):
            complete(caller)
    with httpx.Client(base_url=server.url) as nobody:
        assert nobody.get("/v1/models", headers=[(b"authorization", b"Bearer \xe9")]).status_code == 401
    with server.http() as known:
        assert known.get("/health").json() == {"status": "ok", "version": 0}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{", 400, "is not JSON"),
        ("", 400, "is not JSON"),
        ("\u00e9".encode("latin-1"), 400, "is not JSON"),
        ("[" * 5000, 400, "is not JSON"),
        ('{"prompt": "a", "temperature": NaN}', 400, "is not JSON"),
        ('{"prompt": "\\ud800"}', 400, "is not JSON"),
        ("[1]", 400, "not an object"),
        ("3", 400, "not an object"),
        ('{"prompt": "a", "temperature": 1e999}', 400, "temperature=inf"),
        ('{"prompt": "a", "n": 1' + "0" * 500 + "}", 400, "n=1000"),
        ('{"prompt": "a", "n": 1.0}', 400, "n=1.0"),
        ('{"prompt": "a", "n": true}', 400, "n=True"),
        ('{"prompt": "a", "n": 5}', 400, "n=5 is more than 4; ask for n <= 4"),
        ('{"prompt": "a", "max_tokens": 0}', 400, "max_tokens=0 without echo=true requests no output"),
        ('{"prompt": "a", "max_tokens": 512}', 400, "exceed the context of 512 tokens"),
        ('{"prompt": "a", "temprature": 1}', 400, "did you mean 'temperature'"),
        ('{"prompt": "a", "logprobs": 21}', 400, "logprobs=21"),
        ('{"prompt": "a", "suffix": "b"}', 400, "suffix='b' is not supported; leave suffix out"),
        ('{"prompt": "a", "best_of": 2}', 400, "best_of=2 is not supported"),
        ('{"prompt": "a", "model": "gpt"}', 404, "model='gpt' is not served"),
        ('{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "set stream=true"),
        ('{"prompt": "a", "n": 2, "n": 1}', 400, "'n' is there twice"),
        ('{"prompt": "a", "logit_bias": {"3": 1, "3": 2}}', 400, "'3' is there twice"),
        ('{"prompt": "a", "priority": 1}', 400, "priority=1 is more than 0"),
        ('{"prompt": "a", "stop": ""}', 400, "stop=''"),
        ('{"prompt": "a", "stop": [1]}', 400, "stop=[1]"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', 400, "logit_bias={'x': 1}"),
        ('{"prompt": "a", "logit_bias": {"70000": 1}}', 400, "outside the vocabulary"),
        ('{"prompt": [99999]}', 400, "outside the vocabulary"),
        ('{"prompt": [99999999999999999999]}', 400, "prompt=[99999999999999999999]"),
        ('{"prompt": []}', 400, "prompt=[]"),
        ('{"prompt": ["a", 1]}', 400, "expected a text, a list of texts"),
        ('{"prompt": ""}', 400, "prompt holds no tokens"),
        ('{"prompt": ["a", "a", "a", "a", "a"]}', 400, "holds 5 prompts, more than 4"),
        ("{}", 400, "prompt is missing"),
        ('{"prompt": "' + "a" * 21_000 + '"}', 413, "longer than 20000 bytes"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(server: Server, body: Any, status: int, words: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert words in error["message"]


def test_strange_paths_methods_and_content_types_are_refused_in_the_same_shape(server: Server) -> None:
    with server.http() as http:
        answers = [
            http.get("/v1/nothing"), http.get("/v1/completions"), http.post("/v1/models", json={}),
            http.post("/v1/completions", content='{"prompt": "a"}', headers={"content-type": "text/plain"}),
        ]  # fmt: skip
    told = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    refused = (405, "method_not_allowed")
    assert told == [(404, "not_found"), refused, refused, (415, "unsupported_media_type")]
    assert all(answer.json()["error"]["message"] for answer in answers)


def test_a_long_body_is_refused_without_its_length_being_announced(server: Server) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    with server.http() as http:
        answer = http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_fields_that_change_nothing_are_ignored_and_null_is_nothing(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    extra = {"user": "me", "suffix": None, "echo": False, "best_of": 1, "stop": None, "top_p": None}
    assert complete(client, extra_body=extra).choices[0].text == plain
    said = {"store": False, "metadata": {"a": "b"}, "tools": [], "response_format": {"type": "text"}}
    assert chat(client, extra_body=said).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match=r"functions=.* is not supported"):
        chat(client, extra_body={"functions": [{"name": "f"}]})


def test_a_client_that_leaves_frees_its_place_and_no_other(server: Server, client: openai.OpenAI) -> None:
    gone = server.figures()["headrace_clients_gone_total"]
    long = {"max_tokens": CONTEXT - 5, "extra_body": {"ignore_eos": True}, "stream": True}
    staying = complete(client, **long)
    next(staying)
    for _ in range(3):
        leaving = complete(client, n=4, **long)
        next(leaving)
        leaving.close()
    impatient = {"prompt": "Hello", "max_tokens": CONTEXT - 5, "n": 4, "ignore_eos": True}
    with server.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=impatient, timeout=0.1)
    assert sum(len(event.choices[0].token_ids) for event in staying) == CONTEXT - 6
    while server.figures()["headrace_engine_running"]:
        pass
    figures = server.figures()
    assert figures["headrace_clients_gone_total"] == gone + 4
    assert figures["headrace_requests_open"] == 0


def test_a_full_engine_asks_clients_to_come_back_later(server: Server, client: openai.OpenAI) -> None:
    long = {"max_tokens": CONTEXT - 5, "n": 4, "extra_body": {"ignore_eos": True}, "stream": True}
    open_streams = [complete(client, **long) for _ in range(12)]
    for stream in open_streams:
        next(stream)
    with pytest.raises(openai.RateLimitError, match="48 requests") as refused:
        open_streams += [complete(client, **long) for _ in range(48)]  # some of the first may have ended
    assert refused.value.response.headers["retry-after"] == "1"
    for stream in open_streams:
        stream.close()
    while server.figures()["headrace_engine_running"]:
        pass
    assert complete(client).choices


def test_the_metrics_tell_of_requests_tokens_cache_and_times(server: Server, client: openai.OpenAI) -> None:
    before = server.figures()
    complete(client, n=2, extra_body={"ignore_eos": True})
    after = server.figures()

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert gained('headrace_requests_total{path="/v1/completions",status="200"}') == 1
    assert gained("headrace_engine_generated_tokens_total") == 24
    assert gained('headrace_choices_total{stop_reason="length"}') == 2
    for name in ("headrace_request_seconds", "headrace_first_token_seconds"):
        assert gained(name + '_count{path="/v1/completions"}') == 1
        assert gained(name + '_sum{path="/v1/completions"}') > 0
    assert after["headrace_engine_version"] == 0
    assert after["headrace_engine_cache_blocks"] > after["headrace_engine_cache_blocks_used"] == 0
    assert after["headrace_engine_running"] == after["headrace_engine_waiting"] == 0


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 5) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["a", "user", "none", "text", 10**400, 1e308, -1e308, 5e-324, 2**63])
)  # fmt: skip
JSONS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "boss", "é"]), "content": st.text()}),
    min_size=1,
    max_size=3,
)
PROMPTS = st.text(min_size=1) | st.lists(st.integers(0, 60), min_size=1, max_size=6)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.just(0) | st.floats(0.01, 100),
    "top_p": st.floats(0.0, 1.0, exclude_min=True),
    "min_p": st.floats(0.0, 1.0),
    "top_k": st.integers(0, 2**31 - 1),
    "repetition_penalty": st.floats(0.1, 10),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logit_bias": st.dictionaries(st.integers(0, 60).map(str), st.floats(-100, 100), max_size=3),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "priority": st.integers(-(2**31) + 1, 0),
    "deadline_s": st.floats(1e-9, 1e6),
    "n": st.integers(1, 4),
    "stream": st.booleans(),
    "kept_sizes": st.booleans(),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 60), max_size=4),
}
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "echo", "tools", "user", "?"} - {"model"})


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as made:
        yield made


@settings(max_examples=100)
@given(data=st.data())
def test_no_body_whatever_gives_an_error_of_the_server(http: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
    good = data.draw(st.fixed_dictionaries({}, optional=GOOD))
    wild = data.draw(st.dictionaries(st.sampled_from(FIELDS), JSONS, max_size=1))
    asked = {"prompt": data.draw(PROMPTS)} if path == "/v1/completions" else {"messages": data.draw(MESSAGES)}
    body = {**asked, "max_tokens": data.draw(st.integers(1, 6)), **good, **wild}
    content = json.dumps(data.draw(JSONS) if data.draw(st.integers(0, 9)) == 0 else body)
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    event(f"status {answer.status_code}")
    assert answer.status_code < 500, (answer.text, content)
    assert '"error":{' not in answer.text or answer.status_code >= 400, (answer.text, content)
