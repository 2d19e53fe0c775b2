"""Prompt logprobs, likeliest entries and tokens as a server tells them, held against transformers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.launch.inprocess import LocalEngine
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.prompts import ServedModel
from headrace.wings.serve.run import load_served_model
from tests.wings.serve.server_process import make_model

Post = Callable[..., Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny") / "little"))


@pytest.fixture(scope="module")
def post(directory: str) -> Post:
    config = validate(ServeConfig, {"model": {"path": directory}, "engine": {"cache_tokens": 512}})
    loaded = load_served_model(config, clock=RealClock())

    async def run(path: str, body: dict[str, Any]) -> httpx.Response:
        served = ServedModel(name=loaded.name, max_context=loaded.max_context, settings=config.serve)
        with ThreadPoolExecutor(1) as encoder:
            async with asyncio.timeout(20), LocalEngine(loaded.core, clock=RealClock()) as engine:
                service = Service(
                    engine=engine, tokenizer=loaded.tokenizer, served=served, clock=RealClock(), encoder=encoder
                )  # fmt: skip
                transport = httpx.ASGITransport(make_app(ServerState(service=service), ""))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    return await client.post(path, json=body)

    return lambda path, **body: asyncio.run(run(path, body))


def own_logprobs(directory: str, ids: list[int]) -> torch.Tensor:
    """(T - 1, V), by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def close(found: list[Any], wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(torch.tensor(found), wanted, atol=1e-4))


def test_an_echo_tells_the_models_own_logprobs_of_the_prompt(post: Post, directory: str) -> None:
    body = {"echo": True, "logprobs": 3, "max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True}
    answer = post("/v1/completions", prompt="Hello there", **body).json()
    (choice,) = answer["choices"]
    ids = AutoTokenizer.from_pretrained(directory).encode("Hello there")
    assert choice["token_ids"][:-1] == ids
    assert choice["versions"] == [-1] * len(ids) + [0]
    assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
    told, logprobs = choice["logprobs"], own_logprobs(directory, choice["token_ids"])
    assert told["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    own = logprobs.gather(1, torch.tensor(choice["token_ids"])[1:, None])[:, 0]
    assert close(told["token_logprobs"][1:-1], own[:-1])
    for place, top in enumerate(told["top_logprobs"][1:]):
        best = logprobs[place].topk(3)
        names = [f"token_id:{token}" for token in best.indices.tolist()]
        assert set(names) <= top.keys() <= {*names, told["tokens"][place + 1]}
        assert close([top[name] for name in names], best.values)
        token = told["tokens"][place + 1]
        assert top[token] == pytest.approx(float(own[place]), abs=1e-4)


def test_max_tokens_0_tells_the_prompt_alone(post: Post) -> None:
    (choice,) = post("/v1/completions", prompt="Hello", echo=True, max_tokens=0, logprobs=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert set(choice["versions"]) == {-1}
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
    refused = post("/v1/completions", prompt="Hello", max_tokens=0)
    assert (refused.status_code, "requests no output" in refused.text) == (400, True)


def test_an_echo_precedes_what_is_sampled_whole_and_in_a_stream(post: Post) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, "seed": 3, "logprobs": 0}
    (plain,) = post("/v1/completions", **body).json()["choices"]
    (echoed,) = post("/v1/completions", **body, echo=True).json()["choices"]
    assert echoed["text"] == "Hello" + plain["text"]
    assert echoed["token_ids"][-6:] == plain["token_ids"]
    offsets = [5 + offset for offset in plain["logprobs"]["text_offset"]]
    assert echoed["logprobs"]["text_offset"][-6:] == offsets
    lines = post("/v1/completions", **body, echo=True, stream=True).text.splitlines()
    assert '"text":"Hello"' in next(line for line in lines if line)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"temperature": 0.5, "top_k": 2, "logit_bias": {"9": 4}}])
def test_the_likeliest_entries_are_the_models_own_whatever_the_sampling(
    post: Post, directory: str, settings: dict[str, Any]
) -> None:
    body = {"prompt": [5, 9, 2, 7], "max_tokens": 5, "logprobs": 2, "return_tokens_as_token_ids": True, "seed": 1}
    (choice,) = post("/v1/completions", **body, **settings).json()["choices"]
    logprobs = own_logprobs(directory, [5, 9, 2, 7, *choice["token_ids"]])[3:]
    for place, top in enumerate(choice["logprobs"]["top_logprobs"]):
        for name, value in top.items():
            assert value == pytest.approx(float(logprobs[place, int(name.removeprefix("token_id:"))]), abs=1e-4)
        assert 2 <= len(top) <= 3


def test_a_chat_tells_likeliest_entries_in_their_order(post: Post) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    (choice,) = post("/v1/chat/completions", **body, logprobs=True, top_logprobs=4).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        values = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    refused = post("/v1/chat/completions", **body, top_logprobs=4)
    assert (refused.status_code, "without logprobs" in refused.text) == (400, True)
    refused = post("/v1/chat/completions", **body, logprobs=True, top_logprobs=21)
    assert refused.status_code == 400


def test_the_server_tells_how_text_becomes_tokens_and_back(post: Post, directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    told = post("/tokenize", prompt="Hello, you", return_token_strs=True).json()
    assert told["tokens"] == tokenizer.encode("Hello, you")
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
    assert "".join(told["token_strs"]) == "Hello, you"
    assert post("/detokenize", tokens=told["tokens"]).json() == {"prompt": "Hello, you"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = post("/tokenize", messages=messages).json()["tokens"]
    assert tokenizer.decode(chat) == "[user]Hi[assistant]"
    shorter = post("/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    assert tokenizer.decode(shorter) == "[user]Hi"
    for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": 3}):
        assert post("/tokenize", **body).status_code == 400
    refused = post("/tokenize").json()["error"]
    assert (refused["message"], refused["param"]) == (
        "the body={}: give either prompt or messages; change the body",
        None,
    )
    assert "outside the vocabulary" in post("/detokenize", tokens=[99_999]).text
