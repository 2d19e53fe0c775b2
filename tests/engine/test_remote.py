"""An engine behind somebody else's endpoint: what it says becomes tokens, or an error that names it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.base.errors import EngineFull, RequestError, RunError, SequenceFailed
from headrace.base.types.episode import StopReason
from headrace.base.types.sampling import Sampling
from headrace.engine.remote import RemoteEngine

SAMPLING = Sampling(max_new_tokens=9, stop_ids=(2,), top_k=5, seed=7)
PROMPT_T = np.array([4, 5], np.int32)


def events(*choices: dict[str, Any], end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + end


def choice(ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    told = {"token_logprobs": [-0.5] * len(ids)}
    return {"index": 0, "text": "", "token_ids": ids, "logprobs": told, "finish_reason": reason, **more}


def sampled(answer: Callable[[dict[str, Any]], httpx.Response], *, is_ours: bool = False) -> list[Any]:
    async def main() -> list[Any]:
        transport = httpx.MockTransport(lambda request: answer(json.loads(request.content)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1/") as client:
            engine = RemoteEngine(client, "m", is_ours=is_ours)
            chunks = [chunk async for chunk in engine.generate(PROMPT_T, SAMPLING)]
            assert engine.stats().running == 0
            return chunks

    return asyncio.run(main())


def test_tokens_logprobs_and_the_end_arrive_as_they_were_told() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        asked.append(body)
        return httpx.Response(200, text=events(choice([6, 7]), choice([], None), choice([2], "stop")))

    first, last = sampled(answer)
    assert first.tokens.ids_T.tolist() == [6, 7]
    assert first.tokens.logprobs_T.tolist() == [-0.5, -0.5]
    assert (last.tokens.ids_T.tolist(), last.stop_reason) == ([2], StopReason.STOP)
    (body,) = asked
    assert (body["prompt"], body["max_tokens"], body["stop_token_ids"]) == ([4, 5], 9, [2])
    assert (body["top_k"], body["seed"], body["return_token_ids"]) == (5, 7, True)
    assert "min_p" not in body
    sampled(answer, is_ours=True)
    assert "return_token_ids" not in asked[-1]


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        (httpx.Response(400, text="no such model"), RequestError, "answered 400: no such model"),
        (
            httpx.Response(200, text=events({"index": 0, "text": "hi", "finish_reason": None})),
            RequestError,
            "ids of its",
        ),
        (httpx.Response(200, text=events(choice([6]))), SequenceFailed, "without a reason"),
        (httpx.Response(200, text="data: {oops\n\n"), SequenceFailed, "not a completion"),
        (
            httpx.Response(200, text='data: {"error": {"message": "out of memory"}}\n\n'),
            SequenceFailed,
            "out of memory",
        ),
    ],
)
def test_what_goes_wrong_there_is_told_in_words(response: httpx.Response, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        sampled(lambda _: response)


def test_one_that_cannot_be_reached_ends_the_evaluation() -> None:
    def answer(_: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(RunError, match="cannot be reached"):
        sampled(answer)


def test_one_that_is_full_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.remote.PAUSES_S", (0.0, 0.0))
    calls: list[int] = []

    def answer(_: dict[str, Any]) -> httpx.Response:
        calls.append(1)
        return (
            httpx.Response(429, text="full")
            if len(calls) < 3
            else httpx.Response(200, text=events(choice([2], "stop")))
        )

    assert len(sampled(answer)) == 1
    calls.clear()
    monkeypatch.setattr("headrace.engine.remote.PAUSES_S", ())
    with pytest.raises(EngineFull, match="full"):
        sampled(answer)
