"""What an engine says of given tokens, and what it would rather have said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.base.errors import RequestError
from headrace.base.types.messages.engine import ScoreTokens
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, make_engine, ready_engine

Dir = Callable[[str], Path]
IDS = np.array([5, 9, 2, 7, 3, 3, 8, 11, 4, 6] * 4, np.int32)


def distributions(directory: Path, temperature: float) -> torch.Tensor:
    """(T - 1, V) in float64, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(IDS[None].astype(np.int64)), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("below", [0, 7])
def test_the_likeliest_entries_are_those_of_the_whole_distribution(model_dir: Dir, tmp_path: Path, below: int) -> None:
    directory = model_dir("qwen3")
    engine = ready_engine(directory, tmp_path / "buffer", max_sequences=1)
    scores = engine.top_scores(ScoreTokens(call=0, ids_T=IDS, temperature=0.7, top_k=4, top_below=below))
    expected = distributions(directory, 0.7)
    best = expected[:, : below or None].topk(4)
    np.testing.assert_array_equal(scores.ids_TK[1:], best.indices.numpy())
    np.testing.assert_allclose(scores.logs_TK[1:], best.values.numpy(), atol=1e-4)
    own = expected.gather(1, torch.tensor(IDS[1:, None].astype(np.int64)))[:, 0]
    np.testing.assert_allclose(scores.logprobs_T[1:], own.numpy(), atol=1e-4)
    assert scores.logprobs_T[0] == 0
    assert not scores.ids_TK[0].any()
    plainly = engine.score(ScoreTokens(call=0, ids_T=IDS, temperature=0.7))
    np.testing.assert_array_equal(plainly, scores.logprobs_T)


def test_without_entries_there_are_only_log_probabilities(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    scores = engine.top_scores(ScoreTokens(call=0, ids_T=IDS))
    assert scores.ids_TK.shape == scores.logs_TK.shape == (len(IDS), 0)


def test_where_sums_are_the_same_everywhere_entries_and_tokens_agree_bit_for_bit(
    model_dir: Dir, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")), deterministic=True)
    engine = make_engine(config, max_sequences=2)
    Weights(config, tmp_path / "buffer").send(engine, 0)
    scores = engine.top_scores(ScoreTokens(call=0, ids_T=IDS, top_k=8))
    for place in range(1, len(IDS)):
        at = np.flatnonzero(scores.ids_TK[place] == IDS[place])
        assert not len(at) or scores.logs_TK[place, at[0]] == scores.logprobs_T[place]


def test_more_entries_than_there_are_cannot_be_asked_for(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    for asked in ({"top_k": 10_000}, {"top_k": 8, "top_below": 7}, {"top_k": -1}):
        with pytest.raises(RequestError, match="tokens to score: top_k="):
            engine.top_scores(ScoreTokens(call=0, ids_T=IDS, **asked))
