"""The server before its model is loaded, while it ends, and after its engine has died; and who is let in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.base.net.auth import refuse_unprotected_host
from headrace.base.types.sampling import Sampling
from headrace.launch.inprocess import LocalEngine
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.config import ServeSection
from headrace.wings.serve.prompts import ServedModel
from tests.launch.test_local import CountingCore
from tests.wings.serve.test_server_text import BYTES

BODY = {"prompt": [1], "max_tokens": 4}


def within(test: Callable[[httpx.AsyncClient, ServerState, CountingCore], Awaitable[None]], token: str = "") -> None:
    """Run ``test`` with a server over an engine that counts, and in time."""

    async def run() -> None:
        core, state = CountingCore(), ServerState()
        served = ServedModel(name="counter", max_context=100, settings=ServeSection())
        transport = httpx.ASGITransport(make_app(state, token), raise_app_exceptions=False)
        with ThreadPoolExecutor(1) as encoder:
            async with (
                asyncio.timeout(20),
                LocalEngine(core, clock=RealClock()) as engine,
                httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client,
            ):
                state.service = Service(
                    engine=engine, tokenizer=BYTES, served=served, clock=RealClock(), encoder=encoder
                )
                await test(client, state, core)

    asyncio.run(run())


async def answers(client: httpx.AsyncClient) -> list[tuple[int, Any]]:
    """Status and code of whatever answers with text, and of the health."""
    given = [
        await client.get("/health"),
        await client.get("/v1/models"),
        await client.post("/v1/completions", json=BODY),
    ]
    return [(answer.status_code, answer.json().get("error", {}).get("code")) for answer in given]


def test_health_and_answers_say_how_far_the_server_is() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        assert await answers(client) == [(200, None)] * 3
        service, state.service = state.service, None
        assert await answers(client) == [(503, "starting")] * 3
        assert (await client.get("/health")).headers["retry-after"] == "1"
        assert (await client.get("/metrics")).status_code == 200
        state.service, state.draining = service, True
        assert await answers(client) == [(503, "ending")] * 3

    within(test)


def test_the_death_of_the_engine_is_told_to_open_and_later_requests() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        core.die_at = 3
        whole = await client.post("/v1/completions", json=BODY)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_died")
        assert "token of doom" in whole.json()["error"]["message"]
        assert await answers(client) == [(503, "engine_died")] * 3

    within(test)


def test_a_stream_that_fails_ends_with_the_error_instead_of_done() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        core.break_at = 3
        for prompt, status in (([1], 200), ([2], 500)):  # the second breaks before its first token
            answer = await client.post("/v1/completions", json={**BODY, "prompt": prompt, "stream": True})
            assert answer.status_code == status
            assert answer.text.count("sequence_failed") == 1
            assert "[DONE]" not in answer.text

    within(test)


def test_an_engine_that_is_told_to_end_answers_with_what_it_has() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        assert state.service is not None
        engine = state.service.engine
        assert isinstance(engine, LocalEngine)
        asked = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, "max_tokens": 90}))
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=10**6))
        await anext(stream)
        engine.withdraw_all()
        choice = (await asked).json()["choices"][0]
        assert choice["token_ids"] == list(range(2, 2 + len(choice["token_ids"])))
        await stream.aclose()

    within(test)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_without_a_token_only_requests_to_this_machine_by_name_are_answered(host: str, status: int) -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == status

    within(test)


def test_with_a_token_the_name_does_not_matter_and_the_scheme_does() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        headers = {"host": "far.example"}
        for value, status in (("Bearer secret", 200), ("bearer secret", 200), ("Basic secret", 401), ("secret", 401)):
            given = await client.get("/v1/models", headers={**headers, "authorization": value})
            assert given.status_code == status
        assert (await client.get("/v1/models", headers=headers)).headers["www-authenticate"] == "Bearer"

    within(test, token="secret")


@pytest.mark.parametrize("token", ["geheim-é", "voilà", "🔑"])  # the second one's last byte is a space in Latin-1
def test_a_token_may_be_any_text(token: str) -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        for given, status in ((token, 200), (token[:-1], 401), (token + "x", 401)):
            headers = {b"authorization": b"Bearer " + given.encode()}
            assert (await client.get("/v1/models", headers=headers)).status_code == status

    within(test, token=token)


def test_the_priority_that_may_be_asked_for_is_the_operators() -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        for priority, status in ((0, 200), (-5, 200), (1, 400), (2**31 - 1, 400)):
            answer = await client.post("/v1/completions", json={**BODY, "priority": priority})
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "priority"
        assert "serve.max_priority" in answer.json()["error"]["message"]

    within(test)


def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, state: ServerState, core: CountingCore) -> None:
        longest = 100 * BYTES.longest_token
        encoded: list[int] = []
        monkeypatch.setattr(BYTES, "encode", lambda text: encoded.append(len(text)) or [1])
        for length, status in ((longest, 200), (longest + 1, 400)):
            answer = await client.post("/v1/completions", json={**BODY, "prompt": ["a", "a" * length]})
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert encoded == [1, longest]

    within(test)


def test_a_door_that_is_open_to_the_network_needs_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        refuse_unprotected_host(host, "")
    refuse_unprotected_host("0.0.0.0", "secret")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="HEADRACE_SERVE_TOKEN"):
            refuse_unprotected_host(host, "")
