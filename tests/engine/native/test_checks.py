"""No message can harm anyone but its own request: what does not fit is refused, and the engine continues."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens, StaleFork
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import joined, make_engine, ready_engine, request, run

Dir = Callable[[str], Path]
PROMPT = list(range(3, 23))
INTS = st.one_of(st.integers(-2, 60), st.sampled_from([2**31, 2**32 + 5, 2**40, 2**63 - 1, 2**63, -(2**63)]))
NUMBERS = st.one_of(
    st.floats(0, 2), st.sampled_from([0.0, 1.0, 1e-50, 1e-40, 1e300, -1e300, math.nan, math.inf, -math.inf])
)
IDS = st.one_of(
    st.lists(st.integers(3, 39), min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32)),
    st.lists(INTS, max_size=4).map(np.array),
    st.just(np.zeros((2, 2), np.int32)),
    st.just(np.array([1.5])),
)
SAMPLING = st.builds(
    Sampling,
    max_new_tokens=st.one_of(st.integers(1, 6), INTS),
    temperature=NUMBERS,
    top_k=INTS,
    top_p=NUMBERS,
    min_p=NUMBERS,
    repetition_penalty=NUMBERS,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    logit_bias=st.dictionaries(INTS, NUMBERS, max_size=3),
    stop_ids=st.lists(INTS, max_size=3).map(tuple),
    stop=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    seed=INTS,
    record_kept=st.booleans(),
    record_routing=st.booleans(),
)
SOUND = st.builds(Sampling, max_new_tokens=st.integers(1, 6), top_k=st.integers(0, 9), record_kept=st.booleans())
GENERATE = st.builds(
    GenerateRequest,
    request_id=st.just(1),
    prompt_ids_T=IDS,
    sampling=st.one_of(SAMPLING, SOUND),
    priority=st.one_of(st.just(0), INTS),
    deadline_s=st.one_of(st.none(), NUMBERS),
    fork=st.one_of(st.none(), st.builds(ForkRequest, parent=INTS, at=INTS, stale=st.sampled_from(StaleFork))),
    pinned=st.booleans(),
    answer_ids_T=st.one_of(st.none(), IDS),
)
KEPT = st.builds(KeptSets, ids_E=IDS, sizes_T=IDS)
SCORE = st.builds(
    ScoreTokens,
    call=st.just(0),
    ids_T=IDS,
    temperature=NUMBERS,
    kept=st.one_of(st.none(), KEPT),
    routing=st.one_of(
        st.none(), st.just(Routing(known_T=np.ones(3, bool), experts_RLK=np.full((3, 2, 2), 200, np.uint8)))
    ),
)


@pytest.fixture(scope="module")
def served(model_dir: Dir, tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeEngine, list[int]]:
    engine = ready_engine(model_dir("qwen3_moe"), tmp_path_factory.mktemp("weights") / "buffer", max_sequences=2)
    return engine, joined(run(engine, [healthy()])[0]).ids_T.tolist()


def healthy() -> GenerateRequest:
    return request(0, PROMPT, max_new_tokens=6, seed=1, presence_penalty=0.5)


@settings(max_examples=250, deadline=None)
@given(message=st.one_of(GENERATE, SCORE))
def test_no_message_kills_the_engine_or_changes_another_request(
    served: tuple[NativeEngine, list[int]], message: GenerateRequest | ScoreTokens
) -> None:
    engine, expected = served
    try:
        if isinstance(message, ScoreTokens):
            engine.score(message)
        else:
            engine.add(message)
    except RequestError:
        pass
    run(engine)
    assert joined(run(engine, [healthy()])[0]).ids_T.tolist() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 2**63},
        {"temperature": 1e-50},
        {"temperature": 1e-40},
        {"logit_bias": {5: -1e300}},
        {"presence_penalty": 1e300},
        {"repetition_penalty": 1e-300},
    ],
)
def test_numbers_that_no_column_holds_are_refused(
    served: tuple[NativeEngine, list[int]], changes: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=next(iter(changes))):
        served[0].add(request(1, PROMPT, **changes))


@pytest.mark.parametrize("changes", [{"priority": 2**63}, {"deadline_s": math.nan}, {"deadline_s": -1.0}])
def test_options_that_are_no_order_are_refused(
    served: tuple[NativeEngine, list[int]], changes: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=next(iter(changes))):
        served[0].add(msgspec.structs.replace(request(1, PROMPT), **changes))


def test_a_bias_that_its_caller_has_changed_since_an_equal_request_is_checked_again(
    served: tuple[NativeEngine, list[int]],
) -> None:
    engine, _ = served
    bias = {5: 1.0}
    run(engine, [request(1, PROMPT, logit_bias=bias)])
    bias[2**40] = 1.0
    with pytest.raises(RequestError, match="logit_bias"):
        engine.add(request(2, PROMPT, logit_bias=bias))


@pytest.mark.parametrize("ids", [np.array([2**32 + 5]), np.array([2**63], np.uint64), [2**70], np.array([1.5])])
def test_ids_are_never_wrapped_or_rounded(served: tuple[NativeEngine, list[int]], ids: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        served[0].add(msgspec.structs.replace(request(1, []), prompt_ids_T=ids))


def test_kept_sets_and_experts_outside_the_model_are_not_scored(served: tuple[NativeEngine, list[int]]) -> None:
    ids_T = np.array([3, 4, 5], np.int32)
    experts = Routing(known_T=np.ones(3, bool), experts_RLK=np.full((3, 2, 2), 200, np.uint8))
    for bad in ({"kept": KeptSets.from_spans([[], [4, 100_000], [5]])}, {"routing": experts}):
        with pytest.raises(RequestError, match="tokens to score"):
            served[0].score(ScoreTokens(call=0, ids_T=ids_T, **bad))


def test_nothing_is_scored_before_the_first_weights(model_dir: Dir) -> None:
    engine = make_engine(ModelConfig(path=str(model_dir("qwen3"))))
    with pytest.raises(RequestError, match="first weights"):
        engine.score(ScoreTokens(call=0, ids_T=np.array([3, 4], np.int32)))
