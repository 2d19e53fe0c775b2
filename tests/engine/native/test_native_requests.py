"""One bad request is refused or ends on its own; the others never notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, RequestError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import GenerateRequest
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_receiver
from tests.engine.native.harness import MAX_CONTEXT, Weights, alone, joined, make_engine, ready_engine, request, run
from tests.models.kinds import VOCAB, plain
from tools.families.tiny import write_model

OUTSIDE = 3 + len(VOCAB)


@pytest.fixture
def engine(model_dir: Callable[[str], Path], tmp_path: Path) -> NativeEngine:
    return ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_sequences=4)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request(1, []), "empty prompt"),
        (request(1, [3] * 90, max_new_tokens=7), f"exceed max_context={MAX_CONTEXT}"),
        (request(1, [3, OUTSIDE]), f"token {OUTSIDE}"),
        (request(1, [3, -1]), "token -1"),
        (request(1, [3], stop_ids=(OUTSIDE,)), "stop_ids"),
        (request(1, [3], max_new_tokens=0), "max_new_tokens=0"),
        (request(1, [3], temperature=-1.0), "temperature=-1.0"),
        (request(1, [3], temperature=float("nan")), "temperature=nan"),
        (request(1, [3], temperature=float("inf")), "temperature=inf"),
        (request(7, [3]), "request 7 is already in the engine"),
    ],
)
def test_request_that_can_never_be_served_is_refused_and_the_rest_goes_on(
    engine: NativeEngine, bad: GenerateRequest, reason: str
) -> None:
    engine.add(request(7, [3, 4], max_new_tokens=5))
    engine.step()
    with pytest.raises(RequestError, match=reason):
        engine.add(bad)
    results = run(engine)
    assert list(results) == [7]
    assert len(joined(results[7])) == 5


def test_longest_request_that_fits_is_served_to_its_last_token(engine: NativeEngine) -> None:
    results = run(engine, [request(0, [3] * (MAX_CONTEXT - 10), max_new_tokens=10), request(1, [3])])
    assert len(joined(results[0])) == 10


def test_request_before_the_first_weights_is_refused(model_dir: Callable[[str], Path]) -> None:
    engine = make_engine(ModelConfig(path=str(model_dir("qwen3"))))
    with pytest.raises(RequestError, match="before the first rollout"):
        engine.add(request(0, [3]))
    assert engine.stats().version == -1


def test_context_beyond_the_models_own_is_refused(model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(path=str(model_dir("qwen3"))))
    receiver = make_receiver(Route(), weight_tensors(model))
    with pytest.raises(ConfigError, match="max_context=513"):
        NativeEngine(model, EngineConfig(), max_context=513, receiver=receiver, clock=RealClock())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_logits_end_one_request_and_leave_nothing_behind(
    model_dir: Callable[[str], Path], tmp_path: Path, poison: float
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, max_sequences=3), Weights(config, tmp_path / "buffer")
    with torch.no_grad():
        weights.model.get_input_embeddings().weight[20] = poison
    weights.send(engine, 0)

    healthy = [request(number, [3, 4 + number], max_new_tokens=12, seed=number) for number in (1, 2)]
    results = run(engine, [request(0, [5] * 30 + [20], max_new_tokens=12), *healthy])
    assert "NaN or infinity" in results[0][-1].error
    assert "version 0" in results[0][-1].error
    assert len(joined(results[0])) == 0

    # its row goes to a shorter sequence, which decodes beside a longer one
    later = [request(number, [6] * length, max_new_tokens=12, seed=number) for number, length in ((3, 2), (4, 50))]
    results |= run(engine, later)
    reference = plain(model_dir("qwen3"))
    for asked in [*healthy, *later]:
        expected = alone(reference, asked)
        upto = expected.index(20) if 20 in expected else len(expected)
        assert joined(results[asked.request_id]).ids_T.tolist()[:upto] == expected[:upto]


def test_tokens_sampled_before_the_logits_broke_are_kept(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    engine.add(request(0, [3, 4], max_new_tokens=12))
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        weights.model.get_output_embeddings().weight[7] = float("nan")
    weights.send(engine, 1)
    chunk = engine.step()[-1]
    assert "version 1" in chunk.error
    assert chunk.tokens.versions_T.tolist() == [0] * 5
    assert engine.stats().generated_tokens == 5


def test_aborted_requests_give_back_what_was_sampled(engine: NativeEngine) -> None:
    for number in range(6):
        engine.add(request(number, [3, 4], max_new_tokens=20))
    for _ in range(3):
        engine.step()
    chunks = {chunk.request_id: chunk for chunk in engine.abort([1, 5, 99])}
    assert sorted(chunks) == [1, 5]
    assert [len(chunks[number].tokens) for number in (1, 5)] == [3, 0]
    assert {chunk.stop_reason for chunk in chunks.values()} == {StopReason.ABORTED}
    results = run(engine)
    assert sorted(results) == [0, 2, 3, 4]
    assert engine.abort([0, 1]) == []


def test_penalised_answers_of_any_length_come_and_go(engine: NativeEngine) -> None:
    asked = [request(one, [3 + one], max_new_tokens=70 + 4 * one, seed=one, presence_penalty=0.7) for one in range(6)]
    together = run(engine, asked)  # more answers than rows, each longer than the columns that its penalties begin with
    for one in asked:
        by_itself = joined(run(engine, [one])[one.request_id])
        assert joined(together[one.request_id]).ids_T.tolist() == by_itself.ids_T.tolist()


def test_step_without_work_does_nothing(engine: NativeEngine) -> None:
    assert engine.step() == []
    assert engine.stats().steps == 0


def test_counters_say_what_was_done(engine: NativeEngine) -> None:
    run(engine, [request(0, [3, 4, 5], max_new_tokens=4), request(1, [3], max_new_tokens=6)])
    stats = engine.stats()
    assert (stats.steps, stats.generated_tokens, stats.prompt_tokens, stats.version) == (6, 10, 4, 0)
    assert stats.busy_s > 0


def test_prompt_may_be_read_only_and_of_any_integer_width(engine: NativeEngine) -> None:
    asked = request(0, [3, 4], max_new_tokens=3)
    asked.prompt_ids_T.setflags(write=False)
    wide = GenerateRequest(request_id=1, prompt_ids_T=np.array([3, 4]), sampling=asked.sampling)
    results = run(engine, [asked, wide])
    assert joined(results[0]).ids_T.tolist() == joined(results[1]).ids_T.tolist()


def test_tokens_that_only_the_embedding_knows_are_refused_by_name(tmp_path: Path) -> None:
    # the embedding has 128 more entries than the head
    config = ModelConfig(path=str(write_model(tmp_path / "model", "molmo2_text")))
    engine, weights = make_engine(config, max_sequences=3), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    with pytest.raises(RequestError, match="token 122, outside the vocabulary of 64"):
        run(engine, [request(0, [5, 122], max_new_tokens=2)])
    assert len(joined(run(engine, [request(1, [5, 6], max_new_tokens=2)])[1])) == 2
