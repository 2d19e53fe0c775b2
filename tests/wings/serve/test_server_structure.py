"""Structured output of a server: every answer fits, and logprobs are those of the masked distribution."""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.base.errors import RequestError
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine.native.masks import MaskMaker, TokenMask
from headrace.engine.structure import Grammars, json_schema, regex
from headrace.launch.inprocess import LocalEngine
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.prompts import ServedModel
from headrace.wings.serve.run import LoadedModel, load_served_model

pytest.importorskip("llguidance")
Post = Callable[..., Any]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "c"]}, "yes": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99, "minimum": 0}
    },
    "required": ["name", "yes", "n"],
    "additionalProperties": False,
}  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(tokenizer_models.BPE({letter: at for at, letter in enumerate(["<eos>", *letters])}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    vocab = "".join(chr(0x100 + at) for at in range(260))  # more rows than tokens, as models have them
    spec = TinySpec(vocab=vocab, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, init_std=0.3)
    directory = make_tiny(tmp_path_factory.mktemp("bytes") / "bytes", spec)
    byte_tokenizer().save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**tree, "eos_token_id": 0, "pad_token_id": 0}))
    return validate(ServeConfig, {"model": {"path": str(directory)}, "engine": {"cache_tokens": 2048}})


def test_a_slow_structure_holds_up_no_other_and_is_compiled_once() -> None:
    grammars = Grammars(byte_tokenizer(), 257, [0])
    begun, go_on, compile_one, done = threading.Event(), threading.Event(), grammars._compile, list[str]()

    def slowly(description: str) -> Any:
        done.append(description)
        if description == regex("slow"):
            begun.set()
            assert go_on.wait(60)
        return compile_one(description)

    grammars._compile = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(grammars, regex("slow")) for _ in range(2)]
        assert begun.wait(60)
        assert (
            threads.submit(grammars, regex("quick")).result(60).allowed()[byte_tokenizer().convert_tokens_to_ids("q")]
        )
        assert not any(each.done() for each in slow)
        go_on.set()
        masks = [each.result(60) for each in slow]
    masks[0].accept(byte_tokenizer().convert_tokens_to_ids("s"))
    assert masks[0].allowed().nonzero()[0] != masks[1].allowed().nonzero()[0]  # each has a state of its own
    for _ in range(2):  # what is refused is not remembered
        with pytest.raises(RequestError):
            grammars(regex("("))
    assert done == [regex("slow"), regex("quick"), regex("("), regex("(")]


@pytest.fixture(scope="module")
def loaded(config: ServeConfig) -> LoadedModel:
    return load_served_model(config, clock=RealClock())


@asynccontextmanager
async def serving(config: ServeConfig, loaded: LoadedModel, masks: MaskMaker) -> AsyncIterator[httpx.AsyncClient]:
    served = ServedModel(name=loaded.name, max_context=loaded.max_context, settings=config.serve)
    with ThreadPoolExecutor(1) as encoder:
        async with asyncio.timeout(60), LocalEngine(loaded.core, clock=RealClock()) as engine:
            service = Service(
                engine=engine, masks=masks, tokenizer=loaded.tokenizer, served=served, clock=RealClock(),
                encoder=encoder,
            )  # fmt: skip
            transport = httpx.ASGITransport(make_app(ServerState(service=service), ""))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                yield client


@pytest.fixture(scope="module")
def post(config: ServeConfig, loaded: LoadedModel) -> Post:
    async def run(path: str, body: dict[str, Any]) -> httpx.Response:
        async with serving(config, loaded, loaded.masks) as client:
            return await client.post(path, json=body)

    return lambda path, **body: asyncio.run(run(path, body))


def test_requests_are_answered_while_the_structure_of_another_one_is_compiled(
    config: ServeConfig, loaded: LoadedModel
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def masks(description: str) -> TokenMask:
        if description == regex("slow"):
            begun.set()
            assert go_on.wait(60)
        return loaded.masks(description)

    async def main() -> tuple[list[str], list[str]]:
        async with serving(config, loaded, masks) as client:
            ask = partial(client.post, "/v1/completions")
            slow = asyncio.create_task(ask(json={"prompt": "Hi", "guided_regex": "slow"}))
            try:
                assert await asyncio.to_thread(begun.wait, 60)
                plain = asyncio.create_task(ask(json={"prompt": "Hi", "max_tokens": 3}))
                quick = asyncio.create_task(ask(json={"prompt": "Hi", "guided_regex": "quick"}))
                others, _ = await asyncio.wait([plain, quick], timeout=30)
                assert others == {plain, quick}
                assert not slow.done()
            finally:
                go_on.set()
            assert (await plain).status_code == 200
            return texts(await quick), texts(await slow)

    assert asyncio.run(main()) == (["quick"], ["slow"])


def texts(answer: Any) -> list[str]:
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in choices]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/completions", {"guided_json": SCHEMA}),
        ("/v1/completions", {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ],
)  # fmt: skip
def test_every_answer_follows_its_schema(post: Post, path: str, form: dict[str, Any]) -> None:
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    # whitespace is allowed between parts, and a random model would write nothing else
    answer = post(path, **prompt, **form, n=8, max_tokens=200, seed=3, logit_bias={str(at): -100 for at in blanks()})
    for text in texts(answer):
        tree = json.loads(text)
        assert tree.keys() == SCHEMA["properties"].keys()
        assert tree["name"] in ("ab", "c")
        assert isinstance(tree["yes"], bool)
        assert 0 <= tree["n"] <= 99


def blanks() -> list[int]:
    return [token for text in (" ", "\n", "\r", "\t") for token in byte_tokenizer().encode(text)]


def test_answers_match_their_expression_and_are_one_of_their_choices(post: Post) -> None:
    for text in texts(post("/v1/completions", prompt="Hi", guided_regex="[a-c]{2,5}z", n=8, max_tokens=20)):
        assert re.fullmatch("[a-c]{2,5}z", text)
    many = texts(post("/v1/completions", prompt="Hi", guided_choice=["yes", "no (or so)"], n=16, max_tokens=20, seed=1))
    assert set(many) == {"yes", "no (or so)"}
    (greedy,) = texts(post("/v1/completions", prompt="Hi", structured_outputs={"choice": ["a", "bé"]}, temperature=0))
    assert greedy in ("a", "bé")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_json": {"type": "array", "items": False, "minItems": 1}}, "whose parts exclude each other"),
        ({"guided_regex": "[^\\s\\S]"}, "allows no answer that this tokenizer can write"),
        ({"guided_json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "within itself without end"),
        ({"guided_json": {"type": "nope"}}, "the structure cannot be kept to"),
        ({"guided_json": "{"}, "expected a JSON schema"),
        ({"guided_choice": []}, "expected a list of texts"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "expected one structure, and guided_regex and guided_choice ask for one each",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "expected no ignore_eos"),
        ({"response_format": {"type": "xml"}}, "expected the type"),
        ({"structured_outputs": {"grammar": "x"}}, "expected an object with one of json"),
        ({"guided_regex": "a" * 70_000}, "longer than 65536"),
    ],
)
def test_structures_that_cannot_be_kept_are_refused_in_words(post: Post, body: dict[str, Any], words: str) -> None:
    refused = post("/v1/completions", prompt="Hi", **body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    if words.startswith(("the structure cannot", "allows no answer")):
        assert refused.json()["error"]["param"] in body


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.8}])
def test_recorded_kept_sets_make_logprobs_under_a_structure_exact(loaded: LoadedModel, how: dict[str, Any]) -> None:
    engine, prompt = loaded.core, np.array([40, 41, 42], np.int32)
    structures = [json_schema(SCHEMA), regex("[a-c]{2,5}z"), ""]
    for number, structure in enumerate(structures):
        sampling = Sampling(max_new_tokens=40, seed=number, structure=structure, record_kept=True, stop_ids=(0,), **how)
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=prompt, sampling=sampling))
    parts: dict[int, list[Tokens]] = {number: [] for number in range(len(structures))}
    while engine.has_work():
        for chunk in engine.step():
            parts[chunk.request_id].append(chunk.tokens)
    for number, structure in enumerate(structures):
        tokens = Tokens.concat([Tokens.observed(prompt), *parts[number]])
        if structure:
            assert tokens.kept is not None
            assert 0 < tokens.kept.sizes_T[3:].min() <= tokens.kept.sizes_T[3:].max() < 200
        scored = engine.score(ScoreTokens.create(0, tokens, how.get("temperature", 1.0)))
        np.testing.assert_allclose(tokens.logprobs_T[3:], scored[3:], atol=1e-4)


def test_a_preempted_answer_keeps_to_its_structure(config: ServeConfig) -> None:
    small = config.model_copy(update={"engine": config.engine.model_copy(update={"cache_tokens": 64})})
    engine = load_served_model(small, clock=RealClock()).core
    for number in range(4):
        sampling = Sampling(max_new_tokens=40, seed=number, structure=regex("(ab){12}"), stop_ids=(0,))
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=np.array([5] * 9, np.int32), sampling=sampling))
    answers: dict[int, list[int]] = {number: [] for number in range(4)}
    while engine.has_work():
        for chunk in engine.step():
            answers[chunk.request_id] += chunk.tokens.ids_T.tolist()
    assert engine.stats().preempted > 0
    assert {byte_tokenizer().decode(ids, skip_special_tokens=True) for ids in answers.values()} == {"ab" * 12}


def test_a_tokenizer_that_is_not_of_bytes_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "m", TinySpec(vocab=string.ascii_letters, hidden_size=16, num_heads=2))
    engine = load_served_model(validate(ServeConfig, {"model": {"path": str(directory)}}), clock=RealClock()).core
    request = GenerateRequest(
        request_id=0, prompt_ids_T=np.array([3], np.int32), sampling=Sampling(max_new_tokens=4, structure=regex("a"))
    )
    with pytest.raises(ValueError, match="needs a tokenizer of bytes"):
        engine.add(request)


def some_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose every answer has an end."""
    kinds = ["integer", "string", "boolean", "enum", "null", "pattern"] + (
        ["object", "array", "any"] if depth < 2 else []
    )
    match rng.choice(kinds) if depth else "object":
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": f"^[a-f]{{1,{rng.randint(1, 4)}}}-[0-9]$"}
        case "enum":
            return {"enum": rng.sample(["a", "bc", 3, True, None, "d e"], rng.randint(1, 4))}
        case "array":
            return {"type": "array", "items": some_schema(rng, depth + 1), "maxItems": rng.randint(0, 2)}
        case "any":
            return {"anyOf": [some_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["x", "y", "name", "a b", "k1"], rng.randint(1, 3))
            properties = {name: some_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_schemas_are_followed_with_exact_logprobs(loaded: LoadedModel) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    engine, rng, prompt = loaded.core, random.Random(0), np.array([40, 41, 42], np.int32)
    schemas = [some_schema(rng) for _ in range(1000)]
    bias = dict.fromkeys(blanks(), -1e4)  # where anything else may come, never
    parts: dict[int, list[TokenChunk]] = {number: [] for number in range(len(schemas))}
    for number, schema in enumerate(schemas):
        sampling = Sampling(
            max_new_tokens=400, seed=number, structure=json_schema(schema), record_kept=True, stop_ids=(0,),
            logit_bias=bias,
        )  # fmt: skip
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=prompt, sampling=sampling))
        while engine.stats().waiting > 32 or (number == len(schemas) - 1 and engine.has_work()):
            for chunk in engine.step():
                parts[chunk.request_id].append(chunk)
    tokenizer, worst = byte_tokenizer(), 0.0
    for number, schema in enumerate(schemas):
        whole = TokenChunk.concat(parts[number])
        assert whole.stop_reason is StopReason.STOP
        text = tokenizer.decode(whole.tokens.ids_T.tolist(), skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)
        assert whole.tokens.kept is not None
        tokens = Tokens.concat([Tokens.observed(prompt), whole.tokens])
        scored = engine.score(ScoreTokens.create(0, tokens, 1.0))
        worst = max(worst, float(np.abs(tokens.logprobs_T[3:] - scored[3:]).max()))
    assert worst < 1e-4
