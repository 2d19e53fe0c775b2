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
from headrace.base.types.tokens import Tokens
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


def scored(answer: dict[str, Any] | str, *, below: int = 0) -> Any:
    async def main() -> Any:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1/") as client:
            return await RemoteEngine(client, "m", is_ours=False).top_scores(Tokens.observed(PROMPT_T), 2, below=below)

    return asyncio.run(main())


def echo(top: dict[str, float], **change: Any) -> dict[str, Any]:
    told = {"tokens": ["token_id:4", "token_id:5"], "token_logprobs": [None, -3.0], "top_logprobs": [None, top]}
    return {"choices": [{"logprobs": {**told, **change}}]}


def test_scores_of_given_tokens_are_the_likeliest_entries_without_the_token_itself() -> None:
    scores = scored(echo({"token_id:5": -3.0, "token_id:8": -1.0, "token_id:7": -0.5}))
    assert scores.logprobs_T.tolist() == [0.0, -3.0]
    assert (scores.ids_TK.tolist(), scores.logs_TK.tolist()) == ([[0, 0], [7, 8]], [[0.0, 0.0], [-0.5, -1.0]])


@pytest.mark.parametrize(
    ("answer", "below", "words"),
    [
        (echo({"token_id:7": -0.5}), 0, "does not tell the 2 likeliest entries"),
        (echo({"seven": -0.5, "token_id:8": -1.0}), 0, "does not tell the 2 likeliest entries"),
        (echo({"token_id:7": -0.5, "token_id:8": -1.0}, tokens=["a", "b"]), 0, "are not those of the prompt"),
        (echo({"token_id:7": -0.5, "token_id:8": -1.0}, top_logprobs=None), 0, "does not tell the 2 likeliest"),
        (echo({"token_id:-7": -0.5, "token_id:8": -1.0}), 0, "or an id negative"),
        (echo({"token_id:7": -0.5, "token_id:8": -1.0}), 8, "names the token 8, and the vocabulary here has 8"),
        ("[]", 0, "something else than an object"),
        ("<html>", 0, "something else than an object"),
    ],
)
def test_an_answer_without_scores_is_refused_in_words(answer: Any, below: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        scored(answer, below=below)
