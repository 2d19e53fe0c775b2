"""Every family lives through what happens to an engine: preemption, forks, weights under load, memory given back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace.base.types.messages.engine import ForkRequest, GenerateRequest
from headrace.base.types.weights import Interrupt
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, logprobs, make_engine, ready_engine, request, run
from tests.models.families import FAMILIES, by_transformers, family
from tests.models.wrapped import SPECIAL, WRAPPERS

CLOSE = 2e-5
"""Nats."""
FAST = ("qwen3_5", "longrope", "gemma4_text")
"""Beside the hybrids of test_states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A tiny model, and the same under transformers."""

    path: Path
    own: PreTrainedModel
    multimodal: bool


@pytest.fixture(
    scope="module",
    params=[*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in FAST)],
)
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Made:
    path = family(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return Made(path=path, own=by_transformers(path, request.param), multimodal=request.param in WRAPPERS)


def off(made: Made, prompt: list[int], found: object) -> float:
    """The largest difference of the logprobs of an answer from those of a whole pass of transformers, up to a token
    that a multimodal model takes for an image."""
    tokens = joined(found)
    gap_T = np.abs(tokens.logprobs_T - logprobs(made.own, prompt, tokens.ids_T.tolist(), 1.0))
    images = np.flatnonzero(tokens.ids_T == SPECIAL) if made.multimodal else []
    return float(gap_T[: images[0] + 1 if len(images) else None].max())


def test_preempted_sequences_go_on_as_if_alone(made: Made, tmp_path: Path) -> None:
    engine = ready_engine(made.path, tmp_path / "b", max_sequences=6, cache_tokens=160)
    draw = np.random.default_rng(2)
    prompts = [draw.integers(3, 39, 20).tolist() for _ in range(6)]
    found = run(engine, [request(n, prompt, seed=n, max_new_tokens=40) for n, prompt in enumerate(prompts)])
    assert engine.stats().preempted > 0 or not engine.stats().cache_bytes  # mamba2 has nothing to run out of
    assert max(off(made, prompt, found[n]) for n, prompt in enumerate(prompts)) < CLOSE


@pytest.mark.parametrize("at", [0, 12])
def test_fork_goes_on_from_any_token_of_its_parent(made: Made, at: int, tmp_path: Path) -> None:
    engine = ready_engine(made.path, tmp_path / "b", max_sequences=4, flush_tokens=1)
    prompt, parent = list(range(3, 24)), list[int]()
    engine.add(request(0, prompt, max_new_tokens=60, seed=5))
    while len(parent) < 20:
        parent += [token for chunk in engine.step() for token in chunk.tokens.ids_T.tolist()]
    asked = GenerateRequest(
        request_id=1,
        prompt_ids_T=np.zeros(0, np.int32),
        sampling=request(1, [], max_new_tokens=at + 9, seed=8).sampling,
        fork=ForkRequest(parent=0, at=at),
    )
    assert off(made, [*prompt, *parent[:at]], run(engine, [asked])[1]) < CLOSE


@torch.no_grad()
def test_weights_published_under_load_are_those_of_the_tokens_that_name_them(made: Made, tmp_path: Path) -> None:
    config = ModelConfig(path=str(made.path))
    engine, weights = make_engine(config, max_sequences=4, flush_tokens=1), Weights(config, tmp_path / "b")
    weights.send(engine, 0)
    prompts = [list(range(3, 30)), list(range(9, 20))]
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt, seed=number, max_new_tokens=12))
    begun: dict[int, list[int]] = {0: [], 1: []}
    for chunk in [chunk for _ in range(6) for chunk in engine.step()]:
        begun[chunk.request_id] += chunk.tokens.ids_T.tolist()
    weights.scale(1.1)
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.INFLIGHT_RECOMPUTE)
    rest = run(engine)
    weights.model.set_attn_implementation("eager")
    for number, prompt in enumerate(prompts):
        tokens = joined(rest[number])
        assert set(tokens.versions_T.tolist()) == {1}
        whole = logprobs(weights.model, [*prompt, *begun[number]], tokens.ids_T.tolist(), 1.0)
        assert np.abs(tokens.logprobs_T - whole).max() < CLOSE


def test_memory_that_was_given_back_changes_no_answer(made: Made, tmp_path: Path) -> None:
    engine = ready_engine(made.path, tmp_path / "b", max_sequences=4)
    prompt = list(range(3, 38))
    engine.add(request(0, prompt, max_new_tokens=20))
    for _ in range(5):
        engine.step()
    engine.pause(release=True)
    engine.resume()
    assert off(made, prompt, run(engine)[0]) < CLOSE
