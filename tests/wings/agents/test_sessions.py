"""Whoever calls, whatever they send and whenever they leave: only their own episode hears of it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeStatus
from headrace.rollout.conversations import EpisodeLimits as Budgets
from headrace.wings.agents import Access, SessionLimits, app, serving
from headrace.wings.agents.app import EndpointDispatcher, make_app
from headrace.wings.agents.sessions import Sessions
from tests.wings.agents import agents
from tests.wings.agents.harness import HANG, ScriptedEngine, open_episode, sampled, world

HI: Any = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def http(access: Access, key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {access.api_key if key is None else key}"}
    return httpx.AsyncClient(base_url=access.base_url, headers=headers, timeout=30, trust_env=False)


def test_only_the_key_of_an_episode_opens_it_and_only_while_it_runs() -> None:
    old: list[Access] = []

    async def refused(access: Access, key: str, kind: tuple[type[Exception], type[Exception]], words: str) -> None:
        wrong = Access(base_url=access.base_url, api_key=key)
        async with agents.oai(wrong) as client, agents.claude(wrong) as other:
            with pytest.raises(kind[0], match=words):
                await client.chat.completions.create(model="m", messages=HI)
            with pytest.raises(kind[0], match=words):
                await client.responses.create(model="m", input="hi")
            with pytest.raises(kind[0], match=words):
                await client.models.list()
            with pytest.raises(kind[1], match=words):
                await other.messages.create(model="m", messages=HI, max_tokens=9)

    async def program(access: Access) -> None:
        async with agents.oai(access) as client:
            await client.chat.completions.create(model="m", messages=HI)
            assert [model.id async for model in client.models.list()] == ["policy"]
        wrong = (openai.AuthenticationError, anthropic.AuthenticationError)
        for key in ("sk-x", access.api_key[:-1], access.api_key + "0", f"sk-headrace-7{access.api_key[13:]}"):
            await refused(access, key, wrong, "401")
        async with httpx.AsyncClient(base_url=access.base_url, trust_env=False) as nobody:
            told = await nobody.post(MESSAGES, json={})
            assert (told.status_code, told.content) == (401, b"")
            strange = await nobody.get("/v1/models", headers=[(b"authorization", b"Bearer sk-headrace-1-\xe9")])
            assert strange.status_code == 401
        if old:
            gone = (openai.PermissionDeniedError, anthropic.PermissionDeniedError)
            await refused(access, old[0].api_key, gone, "the episode of this key has ended")
        old.append(access)

    async def run() -> None:
        async with world(lambda _: "hello", limits=SessionLimits(delay_s=0)) as here:
            for _ in range(2):
                episode = await here.play(program)
                assert episode.status is EpisodeStatus.FINISHED, episode.cause
                assert len(episode.turns) == 2
        first, second = old
        assert first.api_key != second.api_key

    asyncio.run(run())


def test_what_one_episode_said_cannot_be_continued_in_another() -> None:
    async def program(access: Access) -> None:
        async with agents.oai(access) as client:
            names.append((await client.responses.create(model="m", input="hi")).id)
            again = await client.responses.create(model="m", input="more", previous_response_id=names[-1])
            assert again.previous_response_id == names[-1]
            if names[:-1]:
                with pytest.raises(openai.NotFoundError, match="is not a response of this episode"):
                    await client.responses.create(model="m", input="more", previous_response_id=names[0])

    async def run() -> None:
        async with world(lambda _: "hello") as here:
            for _ in range(2):
                episode = await here.play(program)
                assert episode.status is EpisodeStatus.FINISHED, episode.cause
                assert [turn.parent for turn in episode.turns] == [None, 0, 1, 2]

    names: list[str] = []
    asyncio.run(run())


USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, b"{", 400, "is not JSON"),
    (CHAT, b"[1]", 400, "not an object"),
    (CHAT, b'{"messages": [], "messages": []}', 400, "'messages' is there twice"),
    (CHAT, b" " * 200_001, 413, "longer than 200000 bytes"),
    (CHAT, {}, 400, "messages is missing"),
    (CHAT, {"messages": []}, 400, "messages=[]"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, 400, "nothing makes the policy call a tool"),
    (CHAT, {"messages": [USER], "parallel_tool_calls": False}, 400, "parallel_tool_calls=False is not supported"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, 400, "response_format="),
    (CHAT, {"messages": [USER], "logit_bias": {"3": 1}}, 400, "logit_bias="),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, 400, "top_logprobs=3 is not supported"),
    (CHAT, {"messages": [USER], "presence_penalty": 0.5}, 400, "presence_penalty=0.5"),
    (CHAT, {"messages": [USER], "n": 17}, 400, "n=17 is more than 16"),
    (CHAT, {"messages": [USER], "max_token": 3}, 400, "did you mean 'max_tokens'"),
    (CHAT, {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2}, 400, "differ"),
    (CHAT, {"messages": [USER], "stream_options": {"include_usage": True}}, 400, "set stream=true"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, 400, "'boss'"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "the policy reads text alone"),
    (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, 400, "names the call 'c'"),
    (CHAT, {"messages": [USER], "tools": [{"type": "custom", "custom": {}}]}, 400, "tools.0.type"),
    (CHAT, {"messages": [USER], "tools": 2 * [{"type": "function", "function": {"name": "f"}}]}, 400, "two tools"),
    (RESPONSES, {}, 400, "input is missing"),
    (RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}, 404, "'resp_1' is not a response of this episode"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, 400, "tools.0.type='web_search'"),
    (RESPONSES, {"input": "hi", "conversation": "c"}, 400, "conversation='c' is not supported"),
    (RESPONSES, {"input": "hi", "background": True}, 400, "background=True is not supported"),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_object"}}}, 400, "text.format.type='json_object'"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, 400, "item_reference"),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "encrypted_content"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "text alone"),
    (MESSAGES, {"messages": [USER]}, 400, "max_tokens is missing"),
    (MESSAGES, {"messages": [USER], "max_tokens": 0}, 400, "max_tokens=0"),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "tool_choice": {"type": "any"}}, 400, "call a tool"),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "mcp_servers": [{}]}, 400, "mcp_servers="),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "output_config": {"format": {}}}, 400, "output_config.format"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "It"}], "max_tokens": 9}, 400, "is not continued"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 9}, 400, "'image'"),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "tools": [{"type": "bash_1", "name": "b"}]}, 400, "tools.0.type"),
    (f"{MESSAGES}/count_tokens", {"messages": [USER], "max_tokens": 9}, 400, "'max_tokens' is not a field"),
    ("/v1/nothing", {}, 404, "there is nothing at"),
]  # fmt: skip


def test_what_cannot_be_answered_is_refused_in_words_and_the_episode_goes_on() -> None:
    async def program(access: Access) -> None:
        async with http(access) as client:
            for path, body, status, words in REFUSED:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                told = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert (told.status_code, words in told.json()["error"]["message"]) == (status, True), told.text
                is_anthropic = path.startswith(MESSAGES)
                assert told.json().get("type") == ("error" if is_anthropic else None), told.text
                if path != "/v1/nothing":
                    assert words in access.last_refusal or words in told.text
            wrong = await client.post(CHAT, content="{}", headers={"content-type": "text/plain"})
            assert wrong.status_code == 415
            assert (await client.get(CHAT)).status_code == 405
            assert (await client.post("/messages", json={"messages": [USER], "max_tokens": 9})).status_code == 200
            assert (await client.post("/chat/completions", json={"messages": [USER]})).status_code == 200

    async def run() -> None:
        async with world(lambda _: "hello", limits=SessionLimits(max_body_bytes=200_000, patience=99)) as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert len(sampled(episode)) == 12

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_own_request_and_its_tokens_stay() -> None:
    async def program(access: Access) -> None:
        async with http(access) as client:
            leaving = asyncio.ensure_future(client.post(CHAT, json={"messages": [{"role": "user", "content": "slow"}]}))
            await engine.reach(1)
            other = client.stream("POST", MESSAGES, json={"messages": [USER], "max_tokens": 9, "stream": True})
            async with other as answer:
                assert b"hello" in await answer.aread()
            assert engine.num_running == 1
            leaving.cancel()
            await asyncio.wait([leaving])
            await engine.reach(0)

    async def run() -> None:
        nonlocal engine
        async with world(lambda text: HANG * 9 if "slow" in text else "hello") as here:
            engine = here.engine
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert sorted(sampled(episode)) == sorted(engine.sampled)
        cut = [turn for turn in episode.turns if turn.parent is not None and turn.stop_reason is None]
        assert [(len(turn.tokens), turn.untrained) for turn in cut] == [(8, "cut_off")]

    engine: Any = None
    asyncio.run(run())


def test_what_is_open_when_an_episode_ends_is_cut_short_in_words() -> None:
    async def program(access: Access) -> None:
        async with asyncio.timeout(10):
            open_ones.append(asyncio.ensure_future(post(access, {"messages": HI})))
            open_ones.append(asyncio.ensure_future(post(access, {"messages": HI, "stream": True})))
            await engine.reach(2)

    async def post(access: Access, body: Any) -> httpx.Response:
        async with http(access) as client:
            return await client.post(CHAT, json=body)

    async def run() -> None:
        nonlocal engine
        async with world(lambda _: HANG * 9, limits=SessionLimits(ping_s=0.001)) as here:
            engine = here.engine
            episode = await here.play(program)
            assert engine.num_running == 0
            assert sorted(sampled(episode)) == sorted(engine.sampled)
            for answer in await asyncio.gather(*open_ones):
                assert "the episode of this key has ended" in answer.text

    engine: Any = None
    open_ones: list[asyncio.Future[httpx.Response]] = []
    asyncio.run(run())


def test_a_session_has_so_many_requests_open_and_no_more() -> None:
    async def program(access: Access) -> None:
        async with http(access) as client:
            first = [asyncio.ensure_future(client.post(CHAT, json={"messages": HI})) for _ in range(3)]
            await engine.reach(3)
            refused = await client.post(MESSAGES, json={"messages": HI, "max_tokens": 9})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            for one in first:
                one.cancel()
            await asyncio.wait(first)

    async def run() -> None:
        nonlocal engine
        async with world(lambda _: HANG * 9, limits=SessionLimits(max_open=3)) as here:
            engine = here.engine
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    engine: Any = None
    asyncio.run(run())


def test_a_program_that_asks_in_a_circle_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def program(access: Access) -> None:
        async with http(access) as client, http(access, "wrong") as stranger:
            for held in (0, 0, 1, 2):
                assert (await client.post(CHAT, json={})).status_code == 400
                assert len(naps) == held
            assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
            assert (await stranger.post(CHAT, json={})).status_code == 401
            assert naps == [7.0] * 3

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    async def run() -> None:
        async with world(lambda _: "hello", limits=SessionLimits(patience=2, delay_s=7.0)) as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    naps: list[float] = []
    monkeypatch.setattr(app, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": nap}))
    asyncio.run(run())


def test_a_spent_budget_is_told_once_and_not_asked_again() -> None:
    async def program(access: Access) -> None:
        client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)  # asks again where that may help
        async with client:
            await client.chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.PermissionDeniedError, match=r"used up env\.max_turns"):
                await client.chat.completions.create(model="m", messages=HI)
        assert "max_turns" in access.last_refusal

    async def run() -> None:
        async with world(lambda _: "hello", budgets=Budgets(max_turns=1)) as here:
            episode = await here.play(program)
            assert here.engine.num_asked == 1
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    asyncio.run(run())


def test_a_failure_that_no_program_can_mend_fails_the_episode() -> None:
    def answer(text: str) -> str:
        raise ZeroDivisionError("a defect of ours")

    async def program(access: Access) -> None:
        async with agents.oai(access) as client:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="the run failed: ZeroDivisionError"):
                    await client.chat.completions.create(model="m", messages=HI, stream=stream)  # type: ignore[call-overload]

    async def run() -> None:
        async with world(answer) as here:
            episode = await here.play(program)
        assert (episode.status, episode.cause) == (
            EpisodeStatus.FAILED, "env_error: ZeroDivisionError: a defect of ours",
        )  # fmt: skip

    asyncio.run(run())


def test_idle_connections_make_room_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)

    async def program(access: Access) -> None:
        port = int(access.base_url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for _ in range(3):
            async with http(access) as client:
                assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
        for _, writer in idle:
            writer.close()

    async def run() -> None:
        async with world(lambda _: "hello") as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    asyncio.run(run())


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)
NAMES = st.sampled_from(
    [
        *("role", "type", "content", "text", "id", "name", "input", "tool_use_id", "call_id", "output", "arguments"),
        *("messages", "tools", "function", "tool_calls", "tool_call_id", "parameters", "input_schema", "thinking"),
    ]
)
WORDS = st.sampled_from(
    [
        *("user", "assistant", "tool", "system", "text", "tool_use", "tool_result", "thinking", "function"),
        *("function_call", "function_call_output", "reasoning", "message", "input_text", "output_text", "c"),
    ]
)
JSONS = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)
FIELDS = st.sampled_from(
    [
        *("messages", "input", "system", "instructions", "tools", "tool_choice", "stop", "stop_sequences", "stream"),
        *("n", "max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "thinking", "temperature"),
        *("stream_options", "previous_response_id", "include", "model", "text", "reasoning", "metadata"),
    ]
)


@settings(max_examples=150)
@given(
    path=st.sampled_from([CHAT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens"]),
    wild=st.dictionaries(FIELDS, JSONS, max_size=2),
    whole=st.booleans(),
)
def test_no_body_whatever_is_an_error_of_ours(path: str, wild: Any, whole: bool) -> None:
    asked = {"input": "hi"} if path == RESPONSES else {"messages": [USER]}
    body = ({} if path.endswith("tokens") or path != MESSAGES else {"max_tokens": 9}) | (asked if whole else {}) | wild
    answer = asyncio.run(_post(path, body))
    event(f"status {answer.status_code}")
    assert answer.status_code < 500, (answer.text, body)
    assert '"error": {' not in answer.text or answer.status_code >= 400, (answer.text, body)


async def _post(path: str, body: Any) -> httpx.Response:
    """One request of a session of its own, without a server between."""
    sessions, limits = Sessions(SessionLimits()), SessionLimits()
    dispatcher = EndpointDispatcher(sessions=sessions, limits=limits, clock=RealClock(), on_ignored=lambda *_: None)
    transport, episode = httpx.ASGITransport(make_app(dispatcher)), open_episode(ScriptedEngine(lambda _: "hello"))
    async with asyncio.timeout(30), sessions.open(episode, "http://here") as access:
        headers = {"x-api-key": access.api_key}
        async with httpx.AsyncClient(transport=transport, base_url=access.base_url, headers=headers) as client:
            return await client.post(path, json=body)
