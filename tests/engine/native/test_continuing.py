"""A sequence continues from what it had sampled before, on any engine, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import RequestError
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, make_engine, ready_engine, request, run

PROMPT = [3, 9, 4, 11]
SAMPLINGS = {
    "plain": {},
    "truncated and recorded": {"top_k": 5, "top_p": 0.9, "record_kept": True},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "most likely": {"temperature": 0.0},
}


def begun(asked: GenerateRequest, ids: list[int]) -> GenerateRequest:
    return msgspec.structs.replace(asked, answer_ids_T=np.array(ids, np.int32))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_continued_answer_is_the_one_it_would_have_been(
    model_dir: Callable[[str], Path], tmp_path: Path, name: str, at: int
) -> None:
    asked = request(0, PROMPT, max_new_tokens=20, seed=5, **SAMPLINGS[name])
    whole = joined(run(ready_engine(model_dir("qwen3"), tmp_path / "one"), [asked])[0])
    neighbours = [request(number, [7, number], max_new_tokens=6, seed=number) for number in (1, 2)]
    other = ready_engine(model_dir("qwen3"), tmp_path / "other", flush_tokens=3)
    chunks = run(other, [neighbours[0], begun(asked, whole.ids_T[:at].tolist()), neighbours[1]])[0]
    rest = joined(chunks)
    assert rest.ids_T.tolist() == whole.ids_T[at:].tolist()
    np.testing.assert_allclose(rest.logprobs_T, whole.logprobs_T[at:], atol=1e-5)
    assert (rest.versions_T == 0).all()
    assert not any(chunk.lost for chunk in chunks)
    if whole.kept is not None:
        assert [span.tolist() for span in rest.kept.spans()] == [span.tolist() for span in whole.kept.spans()][at:]


def test_stop_string_that_began_in_what_was_sampled_before_ends_the_answer(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model_config = ModelConfig(path=str(model_dir("qwen3")), dtype="float32")

    def engine(name: str) -> NativeEngine:
        made = make_engine(model_config, decode=lambda ids: "".join(chr(97 + token % 26) for token in ids))
        Weights(model_config, tmp_path / name).send(made, 0)
        return made

    free = joined(run(engine("free"), [request(0, PROMPT, max_new_tokens=20, seed=5)])[0]).ids_T.tolist()
    stop = "".join(chr(97 + token % 26) for token in free[8:12])
    asked = request(0, PROMPT, max_new_tokens=20, seed=5, stop=(stop,))
    whole = joined(run(engine("whole"), [asked])[0]).ids_T.tolist()
    rest = joined(run(engine("rest"), [begun(asked, whole[:-2])])[0]).ids_T.tolist()
    assert rest == whole[-2:]


def test_continued_answer_that_must_begin_again_says_so(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Its reader holds tokens of it, though this engine has sent none."""
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    weights = Weights(ModelConfig(path=str(model_dir("qwen3")), dtype="float32"), tmp_path / "more")
    engine.add(begun(request(0, PROMPT, max_new_tokens=6), [5, 6]))
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.ABORT_RETRY)
    chunks = run(engine)[0]
    assert chunks[0].lost
    assert len(joined(chunks)) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer_ids_T": np.array([5, 6, 7], np.int32)}, "an answer of 3 tokens has reached max_new_tokens=3"),
        ({"answer_ids_T": np.array([999_999], np.int32)}, "answer"),
        ({"answer_ids_T": np.array([1], np.int32), "fork": ForkRequest(parent=8, at=0)}, "none of its own"),
    ],
)
def test_answer_that_cannot_go_on_is_refused(
    model_dir: Callable[[str], Path], tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    engine.add(request(8, PROMPT))
    asked = request(0, [] if "fork" in changes else PROMPT, max_new_tokens=3)
    with pytest.raises(RequestError, match=words):
        engine.add(msgspec.structs.replace(asked, **changes))
