"""The tensors that travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.weights import weight_tensors
from tests.models.kinds import tiny


def test_tied_parameter_travels_once_and_moves_everywhere(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(tiny(tmp_path, "qwen3", tie_word_embeddings=True))))
    tensors = weight_tensors(model)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors

    fresh = torch.full_like(tensors["model.embed_tokens.weight"], 0.5)
    tensors["model.embed_tokens.weight"].data = fresh
    assert model.lm_head.weight.data_ptr() == fresh.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_two_loads_name_the_same_tensors_in_the_same_order(model_dir: Callable[[str], Path]) -> None:
    one, other = (weight_tensors(load_model(ModelConfig(path=str(model_dir("qwen3_moe"))))) for _ in range(2))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_model_pointed_at_other_weights_is_the_other_model(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    ids, plan = torch.arange(3, 12), PackedPlan([4, 5])
    model, other = (load_model(ModelConfig(path=str(model_dir("qwen3_moe")))) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    assert not torch.equal(forward(model, ids, plan), forward(other, ids, plan))
    for tensor, view in zip(weight_tensors(model).values(), weight_tensors(other).values(), strict=True):
        tensor.data = view.data
    assert torch.equal(forward(model, ids, plan), forward(other, ids, plan))
