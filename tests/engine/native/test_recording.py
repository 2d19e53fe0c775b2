"""What is recorded of a token is what computed it: kept-sets, experts, scores, and the strings that end an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RequestError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.recorded import Routing
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.models import ModelConfig
from tests.engine.native.harness import ManualClock, Weights, joined, make_engine, ready_engine, request, run
from tests.models.kinds import plain

Dir = Callable[[str], Path]
PROMPT = list(range(3, 23))


def test_kept_sets_come_with_every_token_and_scores_agree_with_the_sampler(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", flush_tokens=3)
    asked = [
        request(0, PROMPT, max_new_tokens=12, top_k=5, record_kept=True, temperature=0.7, seed=3),
        request(1, PROMPT, max_new_tokens=12, record_kept=True),
        request(2, PROMPT, max_new_tokens=12),
    ]
    results = run(engine, asked)
    tokens = joined(results[0])
    assert tokens.kept is not None
    assert tokens.kept.sizes_T.tolist() == [5] * 12
    assert joined(results[1]).kept.sizes_T.tolist() == [0] * 12
    assert joined(results[2]).kept is None

    whole = Tokens.observed(PROMPT) + tokens
    scored = engine.score(ScoreTokens(call=0, ids_T=whole.ids_T, temperature=0.7, kept=whole.kept))
    np.testing.assert_allclose(scored[len(PROMPT) :], tokens.logprobs_T, atol=1e-4)
    assert scored[0] == 0
    plainly = engine.score(ScoreTokens(call=0, ids_T=whole.ids_T, temperature=0.7))
    assert (plainly[len(PROMPT) :] < tokens.logprobs_T).all()


def test_tokens_that_no_model_could_have_sampled_are_not_scored(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    for bad in (
        ScoreTokens(call=0, ids_T=np.array([3, 4000], np.int32)),
        ScoreTokens(call=0, ids_T=np.array([3], np.int32), temperature=0.0),
        ScoreTokens(call=0, ids_T=np.full(600, 3, np.int32)),
    ):
        with pytest.raises(RequestError, match="tokens to score"):
            engine.score(bad)


@pytest.mark.parametrize("cache_tokens", [None, 64])
def test_routing_is_known_of_all_but_the_last_token_whatever_happens(
    cache_tokens: int | None, model_dir: Dir, tmp_path: Path
) -> None:
    engine = ready_engine(
        model_dir("qwen3_moe"), tmp_path / "buffer", flush_tokens=3, cache_tokens=cache_tokens, max_step_tokens=16
    )
    asked = [request(number, PROMPT, max_new_tokens=20, seed=number, record_routing=number < 3) for number in range(4)]
    results = run(engine, asked)
    assert (engine.stats().preempted > 0) == (cache_tokens is not None)
    assert engine.stats().cached_tokens > 0
    for number in range(3):
        first, tokens = results[number][0], joined(results[number])
        assert tokens.routing.known_T.tolist() == [True] * 19 + [False]
        assert first.prompt_routing.known_T.all()
        assert len(first.prompt_routing) == len(PROMPT)
        whole = first.prompt_routing + tokens.routing
        ids = np.concatenate([PROMPT, tokens.ids_T]).astype(np.int32)
        scored = engine.score(ScoreTokens(call=0, ids_T=ids, routing=whole))
        np.testing.assert_allclose(scored[len(PROMPT) :], tokens.logprobs_T, atol=1e-4)
        turned = Routing(known_T=whole.known_T, experts_RLK=(whole.experts_RLK + 1) % 4)
        other = engine.score(ScoreTokens(call=0, ids_T=ids, routing=turned))
        assert np.abs(other - scored).max() > 1e-2
    assert joined(results[3]).routing is None
    assert results[3][0].prompt_routing is None


def test_a_dense_model_records_no_routing(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    with pytest.raises(RequestError, match="no experts"):
        engine.add(request(0, PROMPT, record_routing=True))
    assert not engine.has_work()


def test_an_answer_ends_with_the_token_that_completes_a_string(model_dir: Dir, tmp_path: Path) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine = make_engine(config, decode=lambda ids: "".join(chr(60 + token) for token in ids), max_sequences=2)
    Weights(config, tmp_path / "buffer").send(engine, 0)
    free = joined(run(engine, [request(0, PROMPT, max_new_tokens=20, seed=1)])[0]).ids_T.tolist()
    string = "".join(chr(60 + token) for token in free[9:12])
    asked = [request(number, PROMPT, max_new_tokens=20, seed=1, stop=(string,) * (number == 2)) for number in (1, 2, 3)]
    results = run(engine, asked)
    assert joined(results[2]).ids_T.tolist() == free[:12]
    assert results[2][-1].stop_reason == StopReason.STOP
    assert joined(results[1]).ids_T.tolist() == joined(results[3]).ids_T.tolist() == free


def test_stop_strings_without_a_tokenizer_are_refused(model_dir: Dir, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        ready_engine(model_dir("qwen3"), tmp_path / "buffer").add(request(0, PROMPT, stop=("end",)))


def _rerouted(weights: Weights) -> None:
    """Other routers: every token goes to other experts."""
    with torch.no_grad():
        for name, parameter in weights.model.named_parameters():
            if "gate" in name or "router" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_routing_is_that_of_the_version_that_sampled_the_token_also_where_the_context_is_computed_again(
    steps: int, model_dir: Dir, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3_moe")))
    engine, weights = make_engine(config, flush_tokens=1000), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    asked = request(0, PROMPT, max_new_tokens=20, record_routing=True, temperature=0.0)
    plainly = run(engine, [asked])[0]
    engine.add(asked)
    for _ in range(steps):
        engine.step()
    _rerouted(weights)
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.INFLIGHT_RECOMPUTE)
    chunks = run(engine)[0]
    told = [chunk.prompt_routing for chunk in chunks if chunk.prompt_routing is not None]
    assert len(told) == 1
    np.testing.assert_array_equal(told[0].experts_RLK, plainly[0].prompt_routing.experts_RLK)
    tokens, before = joined(chunks), joined(plainly)
    num_old = int((tokens.versions_T == 0).sum())
    assert num_old == steps
    np.testing.assert_array_equal(
        tokens.routing.experts_RLK[: steps - 1], before.routing.experts_RLK[: steps - 1]
    )  # the newest was fed under version 1
    assert not np.array_equal(tokens.routing.experts_RLK, before.routing.experts_RLK)


@pytest.mark.parametrize("how", ["abort", "deadline", "deadline while it stands still"])
def test_the_last_chunk_comes_after_all_others_of_its_sequence(how: str, model_dir: Dir, tmp_path: Path) -> None:
    config, clock = ModelConfig(path=str(model_dir("qwen3_moe"))), ManualClock()
    engine = make_engine(config, flush_tokens=1000, clock=clock)
    weights = Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    asked = request(0, PROMPT, max_new_tokens=30, record_routing=True)
    expected = joined(run(engine, [asked])[0]).ids_T[:8].tolist()
    engine.add(msgspec.structs.replace(asked, deadline_s=5.0))
    for _ in range(8):
        engine.step()
    if how == "deadline while it stands still":
        engine.pause(release=True)
        assert not engine.has_work()
    else:
        weights.stage(engine, 1)
        engine.commit(1, Interrupt.ABORT_RESUME)
    if how == "abort":
        chunks = engine.abort([0])
    else:
        clock.time_s = 9.0
        assert engine.has_work()
        chunks = engine.step()
    tokens = joined(chunks)
    assert chunks[-1].stop_reason == (StopReason.ABORTED if how == "abort" else StopReason.DEADLINE)
    assert tokens.ids_T.tolist() == expected
    assert not engine.has_work()


def test_entropies_come_with_every_token_whatever_it_was_drawn_from(model_dir: Dir, tmp_path: Path) -> None:
    settings = {"max_new_tokens": 12, "record_entropy": True, "seed": 3}
    asked = [
        request(0, PROMPT, temperature=0.7, top_k=5, **settings),
        request(1, PROMPT, temperature=1.3, logit_bias={7: 2.0}, **settings),
        request(2, PROMPT, temperature=0.0, **settings),
        request(3, PROMPT, max_new_tokens=12),
    ]
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", flush_tokens=5)
    results = run(engine, asked)
    assert all(chunk.tokens.entropies_T is None for chunk in results[3])
    model = plain(model_dir("qwen3")).double()
    for number, (temperature, bias) in enumerate([(0.7, {}), (1.3, {7: 2.0}), (0.0, {})]):
        ids = np.concatenate([PROMPT, *[chunk.tokens.ids_T for chunk in results[number]]])
        found = np.concatenate([chunk.tokens.entropies_T for chunk in results[number]])
        with torch.no_grad():
            logits = model(torch.tensor(ids[None].astype(np.int64))).logits[0, len(PROMPT) - 1 : -1]
        for token, more in bias.items():
            logits[:, token] += more
        expected = np.zeros(12)
        if temperature:
            expected = torch.distributions.Categorical(logits=logits / temperature).entropy().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_entropies_survive_preemption_and_neighbours_that_leave(model_dir: Dir, tmp_path: Path) -> None:
    asked = [
        request(n, PROMPT, max_new_tokens=12 + 6 * n, seed=n, record_entropy=n != 1) for n in range(4)
    ]  # fmt: skip
    roomy = run(ready_engine(model_dir("qwen3"), tmp_path / "a"), asked)
    engine = ready_engine(model_dir("qwen3"), tmp_path / "b", cache_tokens=96, flush_tokens=7)
    crowded = run(engine, asked)
    assert engine.stats().preempted > 0
    for n in (0, 2, 3):
        here, there = (np.concatenate([chunk.tokens.entropies_T for chunk in each[n]]) for each in (roomy, crowded))
        assert len(here) == 12 + 6 * n
        np.testing.assert_allclose(here, there, atol=1e-5)
