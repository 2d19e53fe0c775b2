from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.models.attention import PackedPlan, forward
from headrace.models.config import ModelConfig
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.deterministic import InvariantPlan, invariant_log_softmax, make_deterministic
from headrace.models.kernels.fuse import fuse, unfuse
from headrace.models.kernels.fused import Fused
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.kernels.panels import PackedProduct
from headrace.models.load import load_model
from headrace.models.paged.base import Geometry, LayerShape, PagedCache
from headrace.models.paged.compiled import maker
from headrace.models.paged.plan import PagedPlan
from tests.models.kinds import KINDS, tiny

Directory = Callable[[str], Path]
IDS = torch.arange(40) * 5 % 37
LENGTHS = [17, 3, 20]

if isinstance(kernels(), Unavailable):
    pytest.skip("no kernels here", allow_module_level=True)


def load(model_dir: Directory, kind: str) -> nn.Module:
    return load_model(ModelConfig(path=str(model_dir(kind))))


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    return forward(model, IDS, PackedPlan(LENGTHS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_model_has_the_models_logits_and_names(
    model_dir: Directory, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, products, computed = load(model_dir, kind), Kernels.linears, list[Tensor]()

    def noted(ops: Kernels, x: Tensor, several: Sequence[PackedProduct]) -> Tensor:
        computed.append(x)
        return products(ops, x, several)

    monkeypatch.setattr(Kernels, "linears", noted)
    names, before = list(model.state_dict()), logits(model)
    report = fuse(model)
    assert report.swapped, str(report)
    assert list(model.state_dict()) == names
    on_kernels = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), Fused)]
    assert len(on_kernels) == sum(report.swapped.values())
    computed.clear()
    after = logits(model)
    assert computed, "the head at least is a product of the kernels'"
    assert float((after - before).abs().max() / before.abs().max()) < 1e-4
    unfuse(model)
    computed.clear()
    assert torch.equal(logits(model), before)
    assert not computed


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_all_of_a_plain_architecture_is_fused(model_dir: Directory, kind: str) -> None:
    report = fuse(load(model_dir, kind))
    assert not report.kept
    assert sum("Attention" in name or "MLP" in name or "DecoderLayer" in name for name in report.swapped) == 3


def test_weights_that_are_exchanged_underneath_take_effect(model_dir: Directory) -> None:
    model, other = load(model_dir, "qwen3"), load(model_dir, "qwen3")
    fuse(model)
    with torch.no_grad():
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            flat = torch.zeros(parameter.numel() + 3)
            flat[3:] = (parameter * 0.5).flatten()
            parameter.data = flat[3:].view(parameter.shape)
            twin.mul_(0.5)
    assert torch.allclose(logits(model), logits(other), rtol=1e-4, atol=1e-4)


def test_models_that_do_not_fit_are_left_alone_with_a_reason(model_dir: Directory) -> None:
    model = load(model_dir, "llama")
    assert "no compiler" in fuse(model, Unavailable(reason="no compiler")).kept["model"]
    assert "training mode" in fuse(model.train()).kept["model"]
    assert "float64" in fuse(model.eval().double()).kept["model"]
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_fused_model_still_has_gradients(model_dir: Directory) -> None:
    model = load(model_dir, "qwen3")
    fuse(model)
    forward(model, IDS, PackedPlan(LENGTHS)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_that_does_more_than_its_modules_is_not_one_call(model_dir: Directory) -> None:
    model = load(model_dir, "llama")
    layer = model.model.layers[0]
    plain = type(layer).forward

    class Doubling(type(layer)):
        def forward(self, *args, **kwargs):
            return plain(self, *args, **kwargs) * 2

    layer.__class__ = Doubling
    report = fuse(model)
    assert report.swapped
    assert not any("DecoderLayer" in name or "Doubling" in name for name in report.swapped)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_exchanged_underneath_take_effect_in_whole_layers(model_dir: Directory, assign: bool) -> None:
    model, other = load(model_dir, "qwen3"), load(model_dir, "qwen3")
    fuse(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        if assign:
            model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
        else:
            for parameter in model.parameters():
                parameter.data = parameter * 0.5
    fuse(other)
    with torch.inference_mode():
        for one, two in zip(decode(model, 0), decode(other, 0), strict=True):
            assert torch.equal(one, two)


def decode(model: nn.Module, seed: int) -> list[Tensor]:
    """Logits of every token, computed in random batches: some decode, some prefill a chunk."""
    rng, make = np.random.default_rng(seed), maker()
    assert make is not None
    config = model.config
    shape = LayerShape(heads=config.num_key_value_heads, key_size=config.head_dim, value_size=config.head_dim)
    cache = PagedCache([shape] * config.num_hidden_layers, 6, dtype=torch.float32, device="cpu")
    tables, lengths, done = np.array([[4, 1], [0, 5], [2, 3]], np.int32), np.array(LENGTHS), np.zeros(3, np.int64)
    begins, found = np.cumsum(LENGTHS) - LENGTHS, [[] for _ in LENGTHS]
    while (done < lengths).any():
        rows = rng.permutation(np.flatnonzero(done < lengths))[: rng.integers(1, 4)]
        counts = np.minimum(np.where(rng.random(len(rows)) < 0.7, 1, 6), lengths[rows] - done[rows])
        geometry = Geometry(tables_RB=tables[rows], starts_R=done[rows], counts_R=counts, num_decode=0)
        spans = [torch.arange(begins[r] + done[r], begins[r] + done[r] + c) for r, c in zip(rows, counts, strict=True)]
        plan = PagedPlan(cache, geometry, make, torch.device("cpu"))
        out = forward(model, IDS[torch.cat(spans)], plan)
        for row, part in zip(rows, out.split(counts.tolist()), strict=True):
            found[row].append(part)
        done[rows] += counts
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_the_learners_logits_are_the_engines_bit_for_bit(model_dir: Directory, kind: str) -> None:
    engine, learner = load(model_dir, kind), load(model_dir, kind)
    fuse(engine)
    make_deterministic(learner)
    trained = forward(learner, IDS, InvariantPlan(LENGTHS))
    for seed in range(3):
        with torch.inference_mode():
            sampled = torch.cat(decode(engine, seed))
            assert torch.equal(sampled, trained)
            assert torch.equal(
                torch.cat([invariant_log_softmax(row[None]) for row in sampled]), (invariant_log_softmax(trained))
            )


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_gradients_of_the_deterministic_model_are_those_of_torch(model_dir: Directory, kind: str) -> None:
    plain, learner = load(model_dir, kind), load(model_dir, kind)
    make_deterministic(learner)
    forward(plain, IDS, PackedPlan(LENGTHS)).log_softmax(-1)[:, 3].sum().backward()
    invariant_log_softmax(forward(learner, IDS, InvariantPlan(LENGTHS)))[:, 3].sum().backward()
    for (name, one), two in zip(plain.named_parameters(), learner.parameters(), strict=True):
        assert float((one.grad - two.grad).abs().max()) <= 1e-5 * float(one.grad.abs().max()) + 1e-7, name


def test_attention_whose_queries_depend_on_their_position_is_left_to_the_module(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    extra = {"rope_parameters": {**rope, "llama_4_scaling_beta": 0.5}, "max_position_embeddings": 32}
    model = load_model(ModelConfig(path=str(tiny(tmp_path / "model", "ministral3", **extra))))
    before = logits(model)
    report = fuse(model)
    assert report.kept["model.layers.0.self_attn"] == "the kernels do not compute what it computes"
    assert report.swapped["Linear"]
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "granite_swa"])  # the last has sinks in attention that is fused
def test_kernels_chosen_while_blocks_are_zero_compute_what_is_trained_later(model_dir: Directory, kind: str) -> None:
    model = load(model_dir, kind)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "o_proj" in name or "down_proj" in name:  # as blocks begin that are added later
                parameter.fill_(float(parameter.ndim == 1))
    given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = fuse(model)
    assert all(torch.equal(parameter, given[name]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained[name] + 0.1 * (parameter.ndim == 1) * torch.randn(parameter.shape))
    on_kernels = logits(model)
    unfuse(model)
    wanted = logits(model)
    assert float((on_kernels - wanted).abs().max() / wanted.abs().max()) < 1e-4, str(report)
