"""Rotary embeddings that are scaled by length: what transformers computes for each sequence alone, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, ModelError, RequestError, RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.tokens import Tokens
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.swaps import LoadedWeights
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import ModelConfig, check, context_length, load_model
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.models.rope import BY_LENGTH, BY_POSITION, ContextLimit
from headrace.models.settings import read_config
from tests.engine.native.harness import joined, logprobs, request, run
from tests.models.kinds import plain, tiny

LIMIT = 320
"""The longest sequence that is not scaled."""
CLOSE = 2e-5
"""Nats."""
LONGROPE = {
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 6.4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 3.0, 2.0, 8.0],
        "original_max_position_embeddings": LIMIT,
    },
}
DYNAMIC = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
SCALED: dict[tuple[str, str], dict[str, Any]] = {
    ("phi3", "longrope"): {**LONGROPE, "original_max_position_embeddings": LIMIT},
    ("llama", "longrope"): LONGROPE,
    ("llama", "dynamic"): DYNAMIC,
}
PROMPTS = (1, 5, 300, LIMIT - 12, 40)

needs_kernels = pytest.mark.skipif(isinstance(kernels(), Unavailable), reason="no kernels here")
Scaled = Callable[[tuple[str, str]], Path]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    made: dict[tuple[str, str], Path] = {}

    def of(which: tuple[str, str]) -> Path:
        if which not in made:
            made[which] = tiny(tmp_path_factory.mktemp("-".join(which)), which[0], **SCALED[which])
        return made[which]

    return of


def engine_of(directory: Path, *, deterministic: bool = False, max_context: int = LIMIT) -> NativeEngine:
    model = load_model(ModelConfig(path=str(directory), deterministic=deterministic))
    config = EngineConfig(max_sequences=4, max_step_tokens=128)
    engine = NativeEngine(model, config, max_context=max_context, receiver=LoadedWeights(), clock=RealClock())
    engine.commit(0)
    return engine


def learner_of(directory: Path, *, deterministic: bool = False) -> LearnerCore:
    return LearnerCore(
        load_model(ModelConfig(path=str(directory), deterministic=deterministic)),
        LearnerConfig(lr=1e-2),
        Objective.build(AlgoConfig.model_validate({"bundle": "grpo"})),
        LearnerContext(temperature=1.0, total_steps=10, model_dir=directory, clock=RealClock()),
    )


def batch_of(sequences: list[tuple[list[int], Tokens]]) -> Batch:
    samples = [
        TrainSample(
            key=EpisodeKey(0, place),
            spans=(Tokens.observed(prompt) + answer,),
            mask_T=np.arange(len(prompt) + len(answer)) >= len(prompt),
            advantage=1.0,
        )
        for place, (prompt, answer) in enumerate(sequences)
    ]
    return Batch.collate(0, samples)


def sampled_in_one_batch(engine: NativeEngine) -> list[tuple[list[int], Tokens]]:
    """Answers of sequences whose prompts are prefilled in pieces while others decode; the longest fills the context."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 40, length).tolist() for length in PROMPTS]
    prompts.append(prompts[2][:290])  # begins with cached blocks
    asked = [request(number, prompt, max_new_tokens=12, seed=number) for number, prompt in enumerate(prompts)]
    found = run(engine, asked)
    return [(prompt, joined(found[number])) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("which", SCALED, ids="-".join)
def test_mixed_batches_give_what_transformers_gives_each_sequence_alone(which: tuple[str, str], scaled: Scaled) -> None:
    engine, reference = engine_of(scaled(which)), plain(scaled(which))
    sequences = sampled_in_one_batch(engine)
    batch = batch_of(sequences)
    learned = learner_of(scaled(which)).logprobs(batch)[batch.mask_N]
    place = 0
    for prompt, answer in sequences:
        alone_T = logprobs(reference, prompt, answer.ids_T.tolist(), 1.0)
        assert np.abs(answer.logprobs_T - alone_T).max() < CLOSE
        assert np.abs(learned[place : place + len(answer)] - alone_T).max() < CLOSE
        place += len(answer)
        whole_T = np.concatenate([np.array(prompt, np.int32), answer.ids_T])
        scored_T = engine.score(ScoreTokens(call=0, ids_T=whole_T))[len(prompt) :]
        assert np.abs(scored_T - alone_T).max() < CLOSE


@needs_kernels
@pytest.mark.parametrize("which", [("llama", "longrope"), ("llama", "dynamic")], ids="-".join)
def test_deterministic_engine_and_learner_agree_bit_for_bit(which: tuple[str, str], scaled: Scaled) -> None:
    sequences = sampled_in_one_batch(engine_of(scaled(which), deterministic=True))
    batch = batch_of(sequences)
    learned = learner_of(scaled(which), deterministic=True).logprobs(batch)[batch.mask_N]
    assert np.array_equal(learned, np.concatenate([answer.logprobs_T for _, answer in sequences]))
    reference = plain(scaled(which))
    alone = [logprobs(reference, prompt, answer.ids_T.tolist(), 1.0) for prompt, answer in sequences]
    assert np.abs(learned - np.concatenate(alone)).max() < CLOSE


@pytest.mark.parametrize("which", SCALED, ids="-".join)
def test_longer_sequences_are_refused_by_name_wherever_they_come_from(which: tuple[str, str], scaled: Scaled) -> None:
    directory, named = scaled(which), f"rope_type='{which[1]}'"
    assert context_length(str(directory)) == LIMIT
    with pytest.raises(ConfigError, match=named) as refused:
        engine_of(directory, max_context=LIMIT + 1)
    assert f"engine.max_context <= {LIMIT}" in refused.value.remedy
    with pytest.raises(RequestError, match=named):
        engine_of(directory).score(ScoreTokens(call=0, ids_T=np.full(LIMIT + 1, 5, np.int32)))
    answer = Tokens(ids_T=[7], logprobs_T=[-1.0], versions_T=[0])
    long = batch_of([([5, 6], answer), ([5] * LIMIT, answer)])
    with pytest.raises(RunError, match=named):
        learner_of(directory).logprobs(long)


def test_switch_that_a_neighbour_reaches_is_found_when_the_model_is_loaded(
    scaled: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nothing were known of the types."""
    monkeypatch.setattr(check, "context_limit", lambda config: ContextLimit(length=config.max_position_embeddings))
    with pytest.raises(ModelError, match="beside one that reaches position 2047"):
        load_model(ModelConfig(path=str(scaled(("llama", "longrope")))))


def test_unknown_type_is_refused_by_name(tmp_path: Path) -> None:
    path = str(tiny(tmp_path / "model", "llama"))
    config: Any = read_config(path)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    config.to_json_file(tmp_path / "model" / "config.json")
    with pytest.raises(ModelError, match="rope_type='spiral' is unknown"):
        load_model(ModelConfig(path=path))


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([1.0], "short_factor has 4 numbers and long_factor 1"),
        ("1.0", "long_factor=1.0 is no list of positive numbers"),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_name(scaled: Scaled, tmp_path: Path, factors: Any, words: str) -> None:
    file = shutil.copytree(scaled(("llama", "longrope")), tmp_path / "model") / "config.json"
    tree = json.loads(file.read_text())
    tree["rope_parameters"]["long_factor"] = factors
    file.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=words):
        load_model(ModelConfig(path=str(file.parent)))


def test_every_type_that_this_transformers_knows_is_classified() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == BY_POSITION | set(BY_LENGTH)


BY_POSITION_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(BY_POSITION))
def test_types_by_position_do_not_depend_on_the_longest_position_of_a_call(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **BY_POSITION_PARAMETERS[kind]}
    model: Any = plain(tiny(tmp_path / "model", "llama", rope_parameters=rope))
    near_T = torch.arange(20)[None]
    far_T = torch.cat([near_T, torch.tensor([[511]])], 1)
    states = torch.zeros(1, 1, 32)
    turns = model.model.rotary_emb(states, near_T), model.model.rotary_emb(states, far_T)
    for near, far in zip(*turns, strict=True):
        assert torch.equal(near, far[:, :20])
