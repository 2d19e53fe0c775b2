"""States of recurrent layers follow their sequences: slots, snapshots at block borders, forks, preemption, commits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.engine.native.states import Snapshots
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from tests.engine.native import harness
from tests.engine.native.harness import Weights, joined, logprobs, make_engine, ready_engine, request, run
from tests.models.kinds import HYBRIDS, plain, tiny

Dir = Callable[[str], Path]
KIND = "qwen3_5_text"


@pytest.fixture(params=[KIND, "lfm2", "falcon_h1"])
def directory(request: pytest.FixtureRequest, model_dir: Dir) -> Path:
    return model_dir(request.param)


def sampled_as_alone(engine: NativeEngine, directory: Path, requests: list[GenerateRequest]) -> None:
    """Run the requests and hold each logprob to that of a whole pass of transformers."""
    reference = plain(directory)
    results = run(engine, requests)
    for asked in requests:
        tokens = joined(results[asked.request_id])
        expected = logprobs(reference, asked.prompt_ids_T.tolist(), tokens.ids_T.tolist(), 1.0)
        assert len(expected) == asked.sampling.max_new_tokens
        assert np.abs(tokens.logprobs_T - expected).max() < 2e-5


@pytest.mark.parametrize("slots", [0, 1, 8])
def test_siblings_share_their_prompt_up_to_its_last_snapshot(directory: Path, slots: int, tmp_path: Path) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=4, max_step_tokens=24, state_snapshots=slots)
    prompt = np.random.default_rng(1).integers(3, 39, 40)
    sampled_as_alone(engine, directory, [request(number, prompt, seed=number) for number in range(4)])
    assert engine.stats().cached_tokens == (3 * 32 if slots else 0)


def test_next_turn_begins_at_the_newest_border_of_the_one_before(directory: Path, tmp_path: Path) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=4)
    prompt = list(range(3, 23))
    first = joined(run(engine, [request(0, prompt, max_new_tokens=30)])[0]).ids_T.tolist()
    sampled_as_alone(engine, directory, [request(1, [*prompt, *first, 7, 8], max_new_tokens=5)])
    assert engine.stats().cached_tokens == 48  # 20 + 30 tokens, of which the last is not computed


def test_preempted_sequences_go_on_from_a_snapshot(directory: Path, tmp_path: Path) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=6, cache_tokens=160)
    draw = np.random.default_rng(2)
    sampled_as_alone(
        engine, directory, [request(each, draw.integers(3, 39, 20), seed=each, max_new_tokens=40) for each in range(6)]
    )
    assert engine.stats().preempted > 0


@pytest.mark.parametrize("at", [0, 3, 12, 20])
def test_fork_of_a_running_sequence_continues_from_the_state_of_any_of_its_tokens(
    directory: Path, at: int, tmp_path: Path
) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=4, flush_tokens=1)
    prompt = list(range(3, 24))
    engine.add(request(0, prompt, max_new_tokens=60, seed=5))
    parent: list[int] = []
    while len(parent) < 20:
        parent += [token for chunk in engine.step() for token in chunk.tokens.ids_T.tolist()]
    asked = GenerateRequest(
        request_id=1,
        prompt_ids_T=np.zeros(0, np.int32),
        sampling=request(1, [], max_new_tokens=at + 9, seed=8).sampling,
        fork=ForkRequest(parent=0, at=at),
    )
    tokens = joined(run(engine, [asked])[1])
    given = [*prompt, *parent[:at]]
    expected = logprobs(plain(directory), given, tokens.ids_T.tolist(), 1.0)
    assert np.abs(tokens.logprobs_T - expected).max() < 2e-5


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME])
def test_commit_keeps_states_or_computes_them_again(mode: Interrupt, directory: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(directory))
    engine, weights = make_engine(config, max_sequences=4, flush_tokens=1), Weights(config, tmp_path / "b")
    weights.send(engine, 0)
    old = load_model(config)
    prompt = list(range(3, 30))
    engine.add(request(0, prompt, max_new_tokens=12))
    begun = [token for _ in range(6) for chunk in engine.step() for token in chunk.tokens.ids_T.tolist()]
    weights.scale(1.1)
    weights.stage(engine, 1)
    engine.commit(1, mode)
    rest = joined(run(engine)[0])
    given = torch.tensor([*prompt, *begun, *rest.ids_T.tolist()])
    with torch.no_grad():
        new = forward(weights.model, given, PackedPlan([len(given)])).log_softmax(-1)
        kept = forward(old, given, PackedPlan([len(given)])).log_softmax(-1)
    places = range(len(prompt) + len(begun), len(given))
    wanted = np.array([new[place - 1, given[place]].item() for place in places])
    stale = np.array([kept[place - 1, given[place]].item() for place in places])
    assert set(rest.versions_T.tolist()) == {1}
    off = np.abs(rest.logprobs_T - wanted).max()
    assert off > 1e-4 if mode is Interrupt.INFLIGHT else off < 2e-5
    assert np.abs(rest.logprobs_T - stale).max() > 1e-3  # the new weights are in use, whatever becomes of the state


def test_prefix_of_older_weights_is_not_used(directory: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(directory))
    engine, weights = make_engine(config, max_sequences=4), Weights(config, tmp_path / "b")
    weights.send(engine, 0)
    prompt = list(range(3, 38))
    run(engine, [request(0, prompt)])
    weights.scale(1.1)
    weights.send(engine, 1)
    tokens = joined(run(engine, [request(1, prompt)])[1])
    assert engine.stats().cached_tokens == 0
    weights.model.set_attn_implementation("eager")
    assert np.abs(tokens.logprobs_T - logprobs(weights.model, prompt, tokens.ids_T.tolist(), 1.0)).max() < 2e-5


def test_memory_that_was_given_back_comes_back_empty(directory: Path, tmp_path: Path) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=4)
    prompt = list(range(3, 38))
    engine.add(request(0, prompt, max_new_tokens=20))
    for _ in range(5):
        engine.step()
    engine.pause(release=True)
    engine.resume()
    tokens = joined(run(engine)[0])
    expected = logprobs(plain(directory), prompt, tokens.ids_T.tolist(), 1.0)
    assert np.abs(tokens.logprobs_T - expected).max() < 2e-5


def test_scoring_disturbs_no_sequence_and_begins_anew_each_time(directory: Path, tmp_path: Path) -> None:
    engine = ready_engine(directory, tmp_path / "b", max_sequences=2, flush_tokens=1)
    prompt = list(range(3, 20))
    engine.add(request(0, prompt, max_new_tokens=12))
    chunks = [chunk for _ in range(4) for chunk in engine.step()]
    ids_T = np.arange(3, 33, dtype=np.int32)
    scores = [engine.score(ScoreTokens(call=each, ids_T=ids_T, temperature=1.0)) for each in range(2)]
    assert np.array_equal(*scores)
    expected = logprobs(plain(directory), ids_T[:1].tolist(), ids_T[1:].tolist(), 1.0)
    assert np.abs(scores[0][1:] - expected).max() < 2e-5
    tokens = joined([*chunks, *run(engine)[0]])
    assert np.abs(tokens.logprobs_T - logprobs(plain(directory), prompt, tokens.ids_T.tolist(), 1.0)).max() < 2e-5


@pytest.mark.parametrize("kind", [KIND, *(pytest.param(each, marks=pytest.mark.slow) for each in HYBRIDS)])
def test_engine_learner_and_transformers_agree_at_every_length(
    kind: str, model_dir: Dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    long = request.node.get_closest_marker("slow") is not None
    lengths = [1, 5, 300, *([1500] if long else [])]
    monkeypatch.setattr(harness, "MAX_CONTEXT", 400 if not long else 1600)
    directory = tmp_path / "model"
    tiny(directory, kind, max_position_embeddings=2048)
    engine = ready_engine(directory, tmp_path / "b", max_sequences=4, max_step_tokens=100)
    learner, reference = load_model(ModelConfig(path=str(directory))), plain(directory)
    draw = np.random.default_rng(4)
    for length in lengths:
        ids_T = draw.integers(3, 39, length + 1).astype(np.int32)
        ids = torch.from_numpy(ids_T.astype(np.int64))
        engines = engine.score(ScoreTokens(call=length, ids_T=ids_T, temperature=1.0))[1:]
        with torch.no_grad():
            learners_TV = forward(learner, ids, PackedPlan([length + 1])).log_softmax(-1)
            own_TV = reference(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        learners, own = (each[:-1].gather(1, ids[1:, None])[:, 0].numpy() for each in (learners_TV, own_TV))
        assert np.abs(engines - own).max() < 2e-5
        assert np.abs(engines - learners).max() < 2e-5


def test_engine_says_what_computes_the_states_and_what_they_take(model_dir: Dir, tmp_path: Path) -> None:
    facts = ready_engine(model_dir(KIND), tmp_path / "b", max_sequences=2, state_snapshots=1).facts()
    assert facts["recurrence"].startswith("compiled kernels") == facts["kernels"].startswith("compiled kernels")
    assert "torch" in facts["recurrence"]
    assert facts["state_bytes"] == 4 * (64 * 3 + 4 * 8 * 8) * (2 + 1 + 1)
    assert "recurrence" not in ready_engine(model_dir("qwen3"), tmp_path / "c").facts()


def test_states_beyond_the_memory_are_refused_by_name(model_dir: Dir) -> None:
    with pytest.raises(ConfigError, match=r"state_snapshots=1000000000 needs \d+ bytes for the states"):
        make_engine(ModelConfig(path=str(model_dir(KIND))), state_snapshots=10**9)


def test_snapshot_used_longest_ago_makes_room() -> None:
    snapshots = Snapshots([5, 6])
    for digest in (b"a", b"b"):
        snapshots.plan(digest, 0)
        snapshots.pop_planned()
    assert snapshots.find(b"a") is not None
    snapshots.plan(b"c", 1)
    snapshots.pop_planned()
    assert b"b" not in snapshots
    assert b"a" in snapshots
    snapshots.clear()
    assert len(snapshots) == 0
