"""Layers that attend to the tokens of an indexer's choice, which is one within each sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.base.errors import ModelError
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from tests.models.kinds import plain, tiny

LENGTHS = [1, 37, 5, 120]


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tiny(tmp_path_factory.mktemp(request.param) / "model", request.param)


def sequences() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 39, (length,), generator=draw) for length in LENGTHS]


@torch.no_grad()
def test_packed_sequences_attend_to_what_each_chooses_alone(directory: Path) -> None:
    model, own = load_model(ModelConfig(path=str(directory))), plain(directory)
    packed = forward(model, torch.cat(sequences()), PackedPlan(LENGTHS)).log_softmax(-1).split(LENGTHS)
    for ids_T, found in zip(sequences(), packed, strict=True):
        wanted = own(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@torch.no_grad()
def test_what_the_indexer_chooses_matters(directory: Path) -> None:
    model = load_model(ModelConfig(path=str(directory)))
    ids_T = sequences()[1]
    few = forward(model, ids_T, PackedPlan([len(ids_T)]))
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 1000
    assert (few - forward(model, ids_T, PackedPlan([len(ids_T)]))).abs().max() > 0.01


def test_gradient_of_what_attends_is_that_of_transformers_and_the_indexer_gets_none(directory: Path) -> None:
    model, own = load_model(ModelConfig(path=str(directory))), plain(directory)
    parts = sequences()
    forward(model, torch.cat(parts), PackedPlan(LENGTHS)).log_softmax(-1)[:, 5].sum().backward()
    sum(own(input_ids=each[None], use_cache=False).logits[0].log_softmax(-1)[:, 5].sum() for each in parts).backward()
    wanted = dict(own.named_parameters())
    for name, parameter in model.named_parameters():
        if "indexer" in name:
            assert parameter.grad is None
        elif wanted[name].grad is not None:
            scale = max(1.0, float(wanted[name].grad.abs().max()))
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=0, atol=2e-5 * scale)


def test_indexer_whose_scores_tie_is_refused_by_its_number_of_heads(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="index_n_heads=2 tie"):
        load_model(ModelConfig(path=str(tiny(tmp_path / "model", "deepseek_v32", index_n_heads=2))))


def test_deterministic_mode_is_refused_by_name(directory: Path) -> None:
    with pytest.raises(ModelError, match="the choices of its indexers"):
        load_model(ModelConfig(path=str(directory), deterministic=True))


@torch.no_grad()
def test_paths_of_a_tree_attend_to_what_each_chooses_alone(directory: Path) -> None:
    model = load_model(ModelConfig(path=str(directory)))
    ids = torch.randint(3, 39, (60,), generator=torch.Generator().manual_seed(5))
    paths = [[*range(25)], [*range(18), *range(25, 40)], [*range(18), *range(25, 31), *range(40, 60)]]
    rows = [row for path in paths for row in path]
    shared = forward(model, ids, PackedPlan([len(path) for path in paths], rows_T=rows))[rows].log_softmax(-1)
    for path, found in zip(paths, shared.split([len(path) for path in paths]), strict=True):
        alone = forward(model, ids[path], PackedPlan([len(path)])).log_softmax(-1)
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)
