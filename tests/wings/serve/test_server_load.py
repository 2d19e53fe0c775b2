"""What a server makes of its settings, with a real engine in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.launch.inprocess import LocalEngine
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.lora import save_adapter
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.prompts import ServedModel
from headrace.wings.serve.run import LoadedModel, load_served_model
from tests.wings.serve.server_process import CONTEXT, make_model

CACHE = 64
EOS = 1
"""The token ``<eos>`` of tiny models."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    path = make_model(tmp_path_factory.mktemp("tiny") / "little")
    return validate(ServeConfig, {"model": {"path": str(path)}, "engine": {"cache_tokens": CACHE}})


@pytest.fixture(scope="module")
def loaded(config: ServeConfig) -> LoadedModel:
    return load_served_model(config, clock=RealClock())


def ask(loaded: LoadedModel, config: ServeConfig, path: str, body: dict[str, Any]) -> Any:
    async def run() -> Any:
        served = ServedModel(
            name=loaded.name, agents=loaded.agents, max_context=loaded.max_context, settings=config.serve
        )
        with ThreadPoolExecutor(1) as encoder:
            async with asyncio.timeout(20), LocalEngine(loaded.core, clock=RealClock()) as engine:
                service = Service(
                    engine=engine, tokenizer=loaded.tokenizer, served=served, clock=RealClock(), encoder=encoder
                )  # fmt: skip
                transport = httpx.ASGITransport(make_app(ServerState(service=service), ""))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    return (await client.post(path, json=body)).json()

    return asyncio.run(run())


def test_a_chat_without_max_tokens_gets_what_a_small_cache_leaves(loaded: LoadedModel, config: ServeConfig) -> None:
    assert loaded.max_context == CACHE < CONTEXT
    messages = [{"role": "user", "content": "Hi"}]
    answer = ask(loaded, config, "/v1/chat/completions", {"messages": messages, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == CACHE
    refused = ask(loaded, config, "/v1/completions", {"prompt": "a" * (CACHE + 1)})
    assert "engine.cache_tokens" in refused["error"]["message"]


def test_a_stop_string_may_name_a_special_token(loaded: LoadedModel, config: ServeConfig) -> None:
    body = {"prompt": "a", "logit_bias": {str(EOS): 100}, "ignore_eos": True, "stop": "<eos>"}
    (choice,) = ask(loaded, config, "/v1/completions", body)["choices"]
    assert (choice["token_ids"], choice["stop_reason"], choice["text"]) == ([EOS], "stop", "")


def test_each_token_travels_at_once_unless_told_otherwise(config: ServeConfig) -> None:
    assert config.engine.flush_tokens == 1  # although other settings of the engine are given


def test_agents_answer_under_their_names_with_their_own_adapters(config: ServeConfig, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, agents=("first", "second"))
    model = load_model(ModelConfig(path=config.model.path, lora=lora))
    for number, name in enumerate(("default", "first", "second")):
        for parameter, tensor in model.named_parameters():
            if f"lora_B.{name}." in parameter:
                torch.nn.init.normal_(tensor, std=0.5, generator=torch.Generator().manual_seed(number))
        where = tmp_path if name == "default" else tmp_path / "agents" / name
        where.mkdir(parents=True, exist_ok=True)
        save_adapter(model, where, name)
    given = config.model.model_copy(update={"lora": lora.model_copy(update={"adapter": str(tmp_path)})})
    several = load_served_model(config.model_copy(update={"model": given}), clock=RealClock())
    assert several.agents == ("first", "second")
    said = {}
    for name in ("little", "first", "second"):
        body = {"model": name, "prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = ask(several, config, "/v1/completions", {**body, "logprobs": 0})
        assert answer["model"] == name
        said[name] = answer["choices"][0]["logprobs"]["token_logprobs"], answer["choices"][0]["token_ids"]
    assert len({str(each) for each in said.values()}) == 3
    refused = ask(several, config, "/v1/completions", {"model": "third", "prompt": "abc"})
    assert "first, little, second" in refused["error"]["message"]
    same = config.model_copy(update={"model": given, "serve": config.serve.model_copy(update={"name": "first"})})
    with pytest.raises(ConfigError, match="both called 'first'"):
        load_served_model(same, clock=RealClock())
