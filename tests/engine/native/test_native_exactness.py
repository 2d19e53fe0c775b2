"""The engine samples what transformers would have sampled, and records the logprobs transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.types.messages.engine import GenerateRequest
from headrace.models import ModelConfig, load_model
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from tests.engine.native.harness import alone, joined, logprobs, ready_engine, request, run
from tests.models.kinds import KINDS, VOCAB, plain

IDS = range(3, 3 + len(VOCAB))


def mixed_requests() -> list[GenerateRequest]:
    """Prompts and completions of many lengths, greedy and sampled, some with stop tokens."""
    rng = np.random.default_rng(5)
    return [
        request(
            number,
            rng.integers(IDS.start, IDS.stop, rng.integers(1, 30)),
            max_new_tokens=int(rng.integers(1, 25)),
            temperature=(0.0, 1.0, 0.6, 1.4)[number % 4],
            seed=number,
            stop_ids=(1, 7, 9) if number % 3 == 0 else (),
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_busy_batch_gets_what_it_gets_alone(
    kind: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = ready_engine(model_dir(kind), tmp_path / "buffer", max_sequences=5, max_step_tokens=40)
    reference = plain(model_dir(kind))
    requests = mixed_requests()
    results = run(engine, requests)
    for asked in requests:
        tokens = joined(results[asked.request_id])
        sampled = tokens.ids_T.tolist()
        assert sampled == alone(reference, asked)
        assert set(tokens.versions_T) == {0}
        if asked.sampling.temperature:
            expected = logprobs(reference, asked.prompt_ids_T.tolist(), sampled, asked.sampling.temperature)
            assert np.abs(tokens.logprobs_T - expected).mean() < 1e-5
        else:
            assert not tokens.logprobs_T.any()


def test_bfloat16_engine_stays_near_float32(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    directory = model_dir("qwen3")
    engine = ready_engine(directory, tmp_path / "buffer", dtype="bfloat16")
    if not isinstance(kernels(torch.bfloat16), Unavailable):
        facts = engine.facts()
        assert facts["attention"] == "compiled"
        assert "DecoderLayer" in str(facts["kernels"])
        assert facts["packed_bytes"]
    tokens = joined(run(engine, [request(0, range(3, 20), max_new_tokens=20)])[0])
    reference = load_model(ModelConfig(path=str(directory), dtype="bfloat16"))
    reference.set_attn_implementation("eager")
    expected = logprobs(reference, list(range(3, 20)), tokens.ids_T.tolist(), 1.0)
    assert np.abs(tokens.logprobs_T - expected).mean() < 0.1


def test_same_calls_give_the_same_bits(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    columns = []
    for name in ("one", "two"):
        engine = ready_engine(model_dir("qwen3"), tmp_path / name, max_sequences=4)
        results = run(engine, mixed_requests())
        columns.append(
            [(joined(chunks).ids_T.tobytes(), joined(chunks).logprobs_T.tobytes()) for chunks in results.values()]
        )
    assert columns[0] == columns[1]


def test_a_request_continued_from_its_own_tokens_goes_on_alike(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = ready_engine(model_dir("llama"), tmp_path / "buffer")
    whole = joined(run(engine, [request(0, [5, 6], max_new_tokens=20, seed=9)])[0]).ids_T.tolist()
    rest = joined(run(engine, [request(1, [5, 6, *whole[:8]], max_new_tokens=12, seed=9)])[1]).ids_T.tolist()
    assert whole == whole[:8] + rest
