"""The likeliest entries that an engine records at each sampled token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.sampling import Sampling
from tests.engine.native.harness import ready_engine

Dir = Callable[[str], Path]
PROMPT = np.array([5, 9, 2, 7], np.int32)


def test_each_row_records_as_many_entries_as_it_asks_for(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_sequences=3, flush_tokens=4)
    for number, num in enumerate((3, 0, 1)):
        sampling = Sampling(max_new_tokens=9, seed=number, record_top=num, temperature=0.7, logit_bias={4: 3.0})
        engine.add(GenerateRequest(request_id=number, prompt_ids_T=PROMPT, sampling=sampling))
    chunks: list[TokenChunk] = []
    while engine.has_work():
        chunks += engine.step()
    for number, num in enumerate((3, 0, 1)):
        whole = TokenChunk.concat([chunk for chunk in chunks if chunk.request_id == number])
        if not num:
            assert whole.top is None
            continue
        assert whole.top is not None
        assert whole.top.ids_TK.shape == (9, num)
        ids_T = np.concatenate([PROMPT, whole.tokens.ids_T])
        scores = engine.top_scores(ScoreTokens(call=0, ids_T=ids_T, top_k=num))
        np.testing.assert_array_equal(whole.top.ids_TK, scores.ids_TK[4:])
        np.testing.assert_allclose(whole.top.logs_TK, scores.logs_TK[4:], atol=1e-4)
        np.testing.assert_allclose(whole.top.logprobs_T, scores.logprobs_T[4:], atol=1e-4)
        assert not np.allclose(whole.tokens.logprobs_T, whole.top.logprobs_T, atol=1e-2)  # under temperature and bias
