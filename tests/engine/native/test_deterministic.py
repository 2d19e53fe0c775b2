"""In the deterministic mode nothing around a token changes a bit of it, and the learner computes the engine's bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import ModelError
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.tokens import Tokens
from headrace.engine.native import NativeEngine
from headrace.engine.native.sampler import TruncationLimits, find_support, sample, sample_from
from headrace.flow.ledger.browse import Browser, EpisodeQuery
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import ModelConfig, load_model
from headrace.models.kernels import deterministic
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.models.routing import find_routing
from tests.engine.native.harness import Weights, joined, make_engine, request, run
from tests.run.session.runs import make_run, tiny_model, verb

Dir = Callable[[str], Path]
COMMON = [3, 17, 5, 29, 11, 8, 22, 31, 4, 19, 7, 36, 25, 13, 9, 33, 28, 6, 14, 21]
TEMPERATURE = 0.7

if isinstance(kernels(), Unavailable):
    pytest.skip("no kernels here", allow_module_level=True)


@contextmanager
def threads(count: int) -> Iterable[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def engine_of(directory: Path, buffer: Path, **settings: object) -> NativeEngine:
    config = ModelConfig(path=str(directory), deterministic=True)
    engine = make_engine(config, **settings)
    Weights(config, buffer).send(engine, 0)
    return engine


def asked(*, temperature: float, top_p: float = 1.0, routing: bool = False) -> list[GenerateRequest]:
    """Half of them begin alike; every second one of those that are truncated is truncated otherwise."""
    rng = np.random.default_rng(1)
    return [
        request(
            number,
            [*(COMMON if number % 2 else ()), *rng.integers(3, 40, rng.integers(1, 18))],
            max_new_tokens=int(rng.integers(8, 30)),
            temperature=temperature,
            seed=number,
            top_p=top_p,
            top_k=9 if top_p < 1 and number % 4 == 0 else 0,
            record_kept=top_p < 1,
            record_routing=routing,
        )
        for number in range(9)
    ]


def answers(engine: NativeEngine, requests: list[GenerateRequest], seed: int = 0) -> dict[int, Tokens]:
    """They come in some order, at some times."""
    rng = np.random.default_rng(seed)
    chunks: dict[int, list] = {}
    for place in rng.permutation(len(requests)).tolist():
        engine.add(requests[place])
        for _ in range(rng.integers(0, 4)):
            for chunk in engine.step():
                chunks.setdefault(chunk.request_id, []).append(chunk)
    for number, more in run(engine).items():
        chunks.setdefault(number, []).extend(more)
    return {number: joined(parts) for number, parts in chunks.items()}


def prompts_routing(engine: NativeEngine, one: GenerateRequest) -> Routing:
    """Of its prompt, as the first chunk of a fresh request says."""
    again = msgspec.structs.replace(one, request_id=1000 + one.request_id)
    found = run(engine, [again])[again.request_id][0].prompt_routing
    assert found is not None
    return found


def batch_of(requests: list[GenerateRequest], found: dict[int, Tokens], routing: dict[int, Routing]) -> Batch:
    """One sample per request; those that begin alike are of one group."""
    lengths, columns, kept, routes = [], [], [], []
    for one in requests:
        tokens, prompt = found[one.request_id], one.prompt_ids_T
        given, total = len(prompt), len(prompt) + len(tokens)
        lengths.append(total)
        columns.append(
            (
                np.concatenate([prompt, tokens.ids_T]),
                np.arange(total) >= given,
                np.concatenate([np.zeros(given, np.float32), tokens.logprobs_T]),
            )
        )
        kept += [KeptSets.none(given), tokens.kept or KeptSets.none(len(tokens))]
        if routing:
            assert tokens.routing is not None
            routes += [routing[one.request_id], tokens.routing]
    ids, mask, logprobs = (np.concatenate(column) for column in zip(*columns, strict=True))
    count = len(lengths)
    return Batch(
        step=0,
        lengths_S=np.array(lengths, np.int32),
        groups_S=np.array([one.request_id % 2 for one in requests], np.int32),
        episodes_S=np.arange(count, dtype=np.int32),
        ids_N=ids.astype(np.int32),
        mask_N=mask,
        logprobs_N=logprobs,
        versions_N=np.where(mask, 0, -1).astype(np.int32),
        advantages_N=np.repeat(np.random.default_rng(0).normal(size=count), lengths).astype(np.float32),
        kept=KeptSets.concat(kept) if any(one.sampling.record_kept for one in requests) else None,
        routing=Routing.concat(routes) if routes else None,
    )


def learner_of(directory: Path, temperature: float, **settings: object) -> LearnerCore:
    return LearnerCore(
        load_model(ModelConfig(path=str(directory), deterministic=True)),
        LearnerConfig(lr=1e-2, **settings),
        Objective.build(AlgoConfig.model_validate({"bundle": "grpo"})),
        LearnerContext(temperature=temperature, total_steps=3, model_dir=directory, clock=RealClock()),
    )


def bits(tokens: Tokens) -> tuple[bytes, bytes]:
    return tokens.ids_T.tobytes(), tokens.logprobs_T.tobytes()


CROWDED = {"max_sequences": 4, "max_step_tokens": 11, "cache_tokens": 112, "flush_tokens": 3}


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_an_answer_is_the_same_bits_alone_crowded_preempted_and_on_more_threads(
    top_p: float, model_dir: Dir, tmp_path: Path
) -> None:
    requests = asked(temperature=TEMPERATURE, top_p=top_p)
    expected: dict[int, Tokens] = {}
    for one in requests:  # alone, with an empty cache
        engine = engine_of(model_dir("qwen3"), tmp_path / f"alone{one.request_id}")
        expected |= answers(engine, [one])
    crowded = engine_of(model_dir("qwen3"), tmp_path / "crowded", **CROWDED)
    for seed, count in enumerate((1, 2, 1)):
        with threads(count):
            found = answers(crowded, requests, seed)
        assert {number: bits(tokens) for number, tokens in found.items()} == {
            number: bits(tokens) for number, tokens in expected.items()
        }
    stats = crowded.stats()
    assert stats.preempted > 0 < stats.cached_tokens


@pytest.mark.parametrize(
    ("kind", "temperature", "top_p"),
    [
        ("qwen3", 1.0, 1.0),
        ("qwen3", TEMPERATURE, 0.8),
        ("llama", TEMPERATURE, 1.0),
        ("gemma3_text", 1.0, 0.8),
        ("gemma2", 1.3, 1.0),
        ("qwen3_moe", 1.0, 0.9),
    ],
)
def test_the_learners_logprobs_are_the_engines_bit_for_bit(
    kind: str, temperature: float, top_p: float, model_dir: Dir, tmp_path: Path
) -> None:
    directory = model_dir(kind)
    engine = engine_of(directory, tmp_path / "buffer", **CROWDED)
    routed = find_routing(engine._model) is not None
    requests = asked(temperature=temperature, top_p=top_p, routing=routed)
    found = answers(engine, requests)
    routing = {one.request_id: prompts_routing(engine, one) for one in requests} if routed else {}
    batch = batch_of(requests, found, routing)
    assert engine.stats().preempted > 0
    for settings in ({}, {"tokens_per_microbatch": 64}, {"share_prefixes": True}):
        learner = learner_of(directory, temperature, **settings)
        assert learner.logprobs(batch).tobytes() == batch.logprobs_N.tobytes(), settings
    metrics = learner.forward_backward(batch).metrics
    assert (metrics["mismatch_abs"], metrics["mismatch_kl"]) == (0.0, 0.0)
    assert learner.optim_step().grad_norm > 0
    one = requests[0]
    start, whole = len(one.prompt_ids_T), found[0]
    given = ScoreTokens(
        call=0,
        ids_T=np.concatenate([one.prompt_ids_T, whole.ids_T]),
        temperature=temperature,
        kept=None if whole.kept is None else KeptSets.concat([KeptSets.none(start), whole.kept]),
        routing=routing[0] + whole.routing if routed else None,
    )
    assert engine.score(given)[start:].tobytes() == whole.logprobs_T.tobytes()


@pytest.mark.parametrize("vocab_size", [37, 256, 300, 1024, 1500, 5000])
def test_what_is_drawn_for_a_row_does_not_depend_on_other_rows(vocab_size: int) -> None:
    """With or without the deterministic mode."""
    rng = torch.Generator().manual_seed(vocab_size)
    num_rows = 24
    logits = torch.randn(num_rows, vocab_size, generator=rng) * 3
    temperatures = torch.rand(num_rows, generator=rng) + 0.5
    draws = torch.rand(num_rows, generator=rng, dtype=torch.float64)
    limits = TruncationLimits(
        top_k_R=torch.tensor([0, 5, 1200] * 8),
        top_p_R=torch.tensor([0.9, 1.0, 0.5, 0.999] * 6, dtype=torch.float64),
        min_p_R=torch.tensor([0.0, 0.001] * 12, dtype=torch.float64),
    )
    scaled = logits / temperatures[:, None]
    together = sample(logits, temperatures, draws)
    truncated = sample_from(scaled, find_support(scaled, limits), draws)
    for row in range(num_rows):
        place = torch.tensor([row])
        one = sample(logits[place], temperatures[place], draws[place])
        cut = sample_from(scaled[place], find_support(scaled[place], limits.take(place)), draws[place])
        for whole, alone in ((together, one), (truncated, cut)):
            assert whole.ids_R[row] == alone.ids_R[0]
            assert whole.logprobs_R[row].view(torch.int32) == alone.logprobs_R[0].view(torch.int32)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss"])
def test_an_architecture_that_no_kernel_covers_is_refused_by_name(kind: str, model_dir: Dir) -> None:
    with pytest.raises(ModelError, match=r"model\.deterministic=true, and .* is a (GPT2|GptOss)"):
        load_model(ModelConfig(path=str(model_dir(kind)), deterministic=True))


def test_without_kernels_or_in_other_numbers_it_is_refused_with_the_remedy(
    model_dir: Dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"model\.dtype='bfloat16'"):
        ModelConfig(path="x", deterministic=True, dtype="bfloat16")
    monkeypatch.setattr(deterministic, "kernels", lambda: Unavailable(reason="no compiler was found"))
    with pytest.raises(ModelError, match="no compiler was found") as refused:
        load_model(ModelConfig(path=str(model_dir("qwen3")), deterministic=True))
    assert "install a C++ compiler" in refused.value.remedy


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_it_is_refused_by_name(model_dir: Dir) -> None:
    with pytest.raises(ModelError, match="cuda"):
        load_model(ModelConfig(path=str(model_dir("qwen3")), deterministic=True), "cuda")


def test_in_a_whole_run_engine_and_learner_do_not_differ_at_all(tmp_path: Path) -> None:
    run_file = make_run(
        tmp_path / "run",
        tiny_model(tmp_path / "model"),
        engine={"top_p": 0.9, "temperature": TEMPERATURE},
    )
    recomputed = "sync.interrupt=inflight_recompute"  # else keys of older weights are behind tokens of newer ones
    verb("train", run_file, "--set", "model.deterministic=true", "--set", recomputed)
    directory = tmp_path / "run" / "run"
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["mismatch_abs"], summary["mismatch_kl"]) == (0.0, 0.0)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    figures = [line["metrics"]["mismatch_abs"] for line in lines if "mismatch_abs" in line.get("metrics", {})]
    assert figures
    assert set(figures) == {0.0}
    browser = Browser.open_run(directory)
    fresh = []
    for row in browser.page(EpisodeQuery(status="trained"), order="oldest", limit=100):
        episode, learned = browser.episode(EpisodeKey(row.group, row.place)), browser.token_results(row.group)
        assert episode is not None
        assert learned is not None
        for turn, gaps_T in learned.gaps(episode).items():
            fresh += gaps_T[episode.turns[turn].tokens.versions_T == row.step].tolist()
    browser.close()
    assert len(fresh) > 8
    assert set(fresh) == {0.0}  # the ledger says it of every token


def test_a_sigmoid_has_the_same_bits_in_every_batch_and_with_several_threads() -> None:
    """Routers of four experts: of a few numbers torch computes a sigmoid by another formula than of many, and it
    divides more than 32,768 numbers among threads, each with a last incomplete vector."""
    logits_NE = torch.randn(32_801, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(5)  # a fifth of the numbers is not whole vectors
    try:
        with deterministic._InvariantSigmoid():
            together_NE = logits_NE.sigmoid()
            alone_NE = torch.cat([torch.sigmoid(rows_NE) for rows_NE in logits_NE.split(7)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone_NE, together_NE)
    torch.testing.assert_close(together_NE, logits_NE.double().sigmoid().float())
    together_NE.sum().backward()
    assert logits_NE.grad is not None
