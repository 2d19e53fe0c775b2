from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.learner.parallel.adapt import _refuse_style
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.context import Pieces, _runs
from headrace.models.config import ModelConfig

QWEN = SimpleNamespace(model_type="qwen3", num_attention_heads=8, num_key_value_heads=2)


def test_the_world_is_the_product_of_the_ways() -> None:
    assert ParallelConfig(data=2, replicate=3, context=4, tensor=5).world == 120


def test_a_wrong_number_of_ranks_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="= 4 ranks, but 8 were started") as refused:
        ParallelConfig(data=2, tensor=2).refuse_world(8)
    assert refused.value.remedy == "start 4 ranks, or set learner.parallel.data = 4"


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ({"expert": 3, "tensor": 2, "data": 3}, "expert=3 is not a multiple of tensor=2"),
        ({"expert": 4, "data": 2}, "does not divide data·context·tensor=2"),
    ],
)
def test_experts_that_fit_no_ranks_are_refused(ways: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**ways)


def test_heads_that_cannot_be_parted_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads=2") as refused:
        ParallelConfig(tensor=4).refuse_model("m", QWEN)
    assert refused.value.remedy == "set learner.parallel.tensor to a divisor of 2"


def test_experts_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a qwen3 with num_experts=None") as refused:
        ParallelConfig(expert=2, data=2).refuse_model("m", QWEN)
    assert refused.value.remedy == "set learner.parallel.expert to 1"


def test_a_model_that_fits_is_not_refused() -> None:
    ParallelConfig(tensor=2, data=8).refuse_model("m", QWEN)


@given(num_tokens=st.integers(1, 60), num_ranks=st.integers(1, 5))
def test_every_token_is_computed_on_one_rank(num_tokens: int, num_ranks: int) -> None:
    pieces = Pieces(num_tokens, num_ranks)
    everything = np.concatenate([pieces.get_indices(rank) for rank in range(num_ranks)])
    assert sorted(everything.tolist()) == list(range(num_tokens))
    assert max(len(pieces.get_indices(rank)) for rank in range(num_ranks)) <= pieces.per_rank


@given(num_ranks=st.integers(1, 8), per_piece=st.integers(1, 50))
def test_the_ranks_of_one_long_sequence_attend_to_as_many_tokens(num_ranks: int, per_piece: int) -> None:
    pieces = Pieces(2 * num_ranks * per_piece, num_ranks)
    assert len({int((pieces.get_indices(rank) + 1).sum()) for rank in range(num_ranks)}) == 1


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), num_ranks=st.integers(1, 3))
def test_a_run_is_of_one_sequence_and_knows_its_positions(lengths: list[int], num_ranks: int) -> None:
    lengths_K = np.array(lengths)
    starts_M = np.repeat(np.cumsum(lengths_K) - lengths_K, lengths_K)
    positions = np.arange(lengths_K.sum()) - starts_M
    pieces = Pieces(int(lengths_K.sum()), num_ranks)
    for rank in range(num_ranks):
        mine = pieces.get_indices(rank)
        for run in _runs(mine, starts_M):
            here = mine[run.rows]
            assert positions[here].tolist() == list(range(run.first, run.first + run.length))
            assert set(starts_M[here]) == {run.start}


@pytest.mark.parametrize(
    ("settings", "parallel", "words"),
    [
        ({"deterministic": True}, {"data": 2}, r"2 ranks, and model\.deterministic works in one process only"),
        ({"lora": {"experts": True}}, {"data": 2, "expert": 2}, r"expert=2 with model\.lora\.experts=true: each rank"),
        ({"lora": {"experts": True}}, {"tensor": 2}, r"tensor=2 with model\.lora\.experts=true: each rank"),
        ({"lora": {"use_dora": True}}, {"tensor": 2}, r"tensor=2 with model\.lora\.use_dora=true: each rank"),
    ],
)
def test_what_ranks_do_not_compute_exactly_is_refused(
    settings: dict[str, object], parallel: dict[str, int], words: str
) -> None:
    model = ModelConfig.model_validate({"path": "m", **settings})
    ParallelConfig().refuse_settings(model)
    with pytest.raises(ConfigError, match=words):
        ParallelConfig.model_validate(parallel).refuse_settings(model)
    if "deterministic" not in settings:
        ParallelConfig(data=2, context=2, replicate=2).refuse_settings(model)


def test_a_layer_that_tensor_parallel_ranks_cut_otherwise_has_no_adapter() -> None:
    plan = {"layers.*.q": "colwise", "layers.*.kv": "packed_colwise", "layers.*.head": "colwise_gather_output"}
    model: Any = SimpleNamespace(tp_plan=plan)
    for layer in ("layers.11.q", "layers.11.head", "layers.11.gate"):
        _refuse_style(model, layer, torch.zeros(2), "base")
    with pytest.raises(ConfigError, match=r"adapts layers\.11\.kv of .*tensor cuts that layer as 'packed_colwise'"):
        _refuse_style(model, "layers.11.kv", torch.zeros(2), "base")
