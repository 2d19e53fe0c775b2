"""Moments of 8 bits: the weights are those of torchao's optimizer, and a snapshot holds its codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch.nn import Parameter

import headrace.learner.parallel.config
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.base.errors import CheckpointError, ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.footprint import levers
from headrace.learner.memory import compute_sizes
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.weights import weight_tensors
from tests.learner.builders import Setup, assert_goes_on, gradients, random_batch, tiny

installed = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao, which has the optimizer, is not installed: pip install torchao"
)
GROUPS = [
    {"names": ["embeddings"], "lr_scale": 0.25, "betas": [0.8, 0.95]},
    {"names": ["*.self_attn.*"], "weight_decay": 0.0},
    {"names": ["vectors"], "lr_scale": 2.0, "weight_decay": 0.3},
]
LOW_BIT: dict[str, Any] = {"optimizer": {"kind": "adamw8bit", "groups": GROUPS}, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with matrices of 64 · 64 and 64 · 96 numbers, which have moments of 8 bits, and smaller weights, which
    have none."""
    return tiny(tmp_path_factory.mktemp("large") / "model", hidden_size=64, intermediate_size=96)


@dataclass(frozen=True, kw_only=True)
class ModelSetup(Setup):
    """A learner of a model with settings of its own."""

    model: ModelConfig

    def learner(self) -> LearnerCore:
        context = LearnerContext(temperature=1.0, total_steps=10, model_dir=self.model_dir, clock=RealClock())
        config = LearnerConfig(lr=1e-2, **self.config)
        return LearnerCore(
            load_model(self.model), config, Objective.build(AlgoConfig.model_validate(self.algo)), context
        )


def expected_group(name: str, weight: Parameter) -> dict[str, Any]:
    if "embed" in name:
        return {"lr": 0.25e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    if ".self_attn." in name:
        return {"lr": 1e-2, "weight_decay": 0.0}
    return {"lr": 2e-2, "weight_decay": 0.3} if weight.ndim < 2 else {"lr": 1e-2, "weight_decay": 0.1}


@installed
def test_five_steps_give_the_weights_of_torchaos_own_optimizer(large_dir):
    learner = Setup(model_dir=large_dir, config={**LOW_BIT, "max_grad_norm": 1e9}).learner()
    from torchao.optim import AdamW8bit

    copies = {name: Parameter(weight.detach().clone()) for name, weight in learner.model.named_parameters()}
    groups = [{"params": [copy], **expected_group(name, copy)} for name, copy in copies.items()]
    reference = AdamW8bit(groups, betas=(0.9, 0.99))
    for step in range(5):
        learner.forward_backward(random_batch(step))
        for name, gradient in gradients(learner).items():
            copies[name].grad = gradient
        learner.optim_step()
        with torch.compiler.set_stance("force_eager"):
            reference.step()
    for name, weight in learner.model.named_parameters():
        assert torch.equal(weight.detach(), copies[name].detach()), name


@installed
def test_weights_differ_from_those_of_moments_in_float32_by_little(large_dir):
    before = {
        name: tensor.clone() for name, tensor in weight_tensors(Setup(model_dir=large_dir).learner().model).items()
    }
    moved = {}
    for kind in ("adamw", "adamw8bit"):
        learner = Setup(model_dir=large_dir, config={"optimizer": {"kind": kind}}).learner()
        for step in range(3):
            learner.train(random_batch(step))
        moved[kind] = {name: tensor - before[name] for name, tensor in weight_tensors(learner.model).items()}
    for name, exact in moved["adamw"].items():
        error = (moved["adamw8bit"][name] - exact).norm() / exact.norm()
        assert error < 0.1, name
        assert error > 1e-3 or exact.numel() < 4096, name


@installed
def test_a_restored_learner_goes_on_bit_for_bit(large_dir, tmp_path):
    assert_goes_on(Setup(model_dir=large_dir, config=LOW_BIT), tmp_path, [random_batch(step) for step in range(4)])


@installed
@pytest.mark.parametrize("memory", [{}, {"offload_optimizer": True}])
def test_a_restored_learner_with_float32_masters_goes_on_bit_for_bit(large_dir, tmp_path, memory):
    setup = ModelSetup(
        model_dir=large_dir,
        model=ModelConfig(path=str(large_dir), dtype="bfloat16"),
        config={**LOW_BIT, "memory": memory},
    )
    first, resumed = setup.learner(), setup.learner()
    first.train(random_batch())
    first.save(tmp_path)
    resumed.restore(tmp_path)
    for learner in (first, resumed):
        for step in (1, 2):
            learner.train(random_batch(step))
    for name, tensor in weight_tensors(first.model).items():
        assert torch.equal(tensor, weight_tensors(resumed.model)[name]), name


@installed
def test_a_restored_adapter_goes_on_bit_for_bit(large_dir, tmp_path):
    setup = ModelSetup(
        model_dir=large_dir,
        model=ModelConfig(path=str(large_dir), lora=LoraConfig(rank=64)),
        config={"optimizer": {"kind": "adamw8bit"}},
    )
    assert_goes_on(setup, tmp_path, [random_batch(step) for step in range(3)])


@installed
def test_a_snapshot_holds_codes_and_scales(large_dir, tmp_path):
    learner = Setup(model_dir=large_dir, config=LOW_BIT).learner()
    learner.train(random_batch())
    learner.save(tmp_path)
    low_bit, whole = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    with safe_open(tmp_path / "optimizer.safetensors", framework="pt") as file:
        keys = {name: {key for key in file.keys() if key.startswith(f"{name}|")} for name in (low_bit, whole)}  # noqa: SIM118 - not a mapping
        for moment in ("exp_avg", "exp_avg_sq"):
            codes, scale = (file.get_tensor(f"{low_bit}|{moment}.{part}") for part in ("codes", "scale"))
            assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (96, 64))
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (96 * 64 // 256,))
    assert len(keys[low_bit]) == 5
    assert keys[whole] == {f"{whole}|{key}" for key in ("step", "exp_avg", "exp_avg_sq")}


@installed
@pytest.mark.parametrize("kinds", [("adamw", "adamw8bit"), ("adamw8bit", "adamw")])
def test_a_snapshot_of_another_kind_is_refused(large_dir, tmp_path, kinds):
    wrote, reads = (Setup(model_dir=large_dir, config={"optimizer": {"kind": kind}}).learner() for kind in kinds)
    wrote.train(random_batch())
    wrote.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"exp_avg.* another optimizer's"):
        reads.restore(tmp_path)


@installed
def test_a_model_without_a_large_weight_is_refused(model_dir):
    with pytest.raises(ConfigError, match="adamw8bit' has no effect: no trained weight has 4096 numbers") as refused:
        Setup(model_dir=model_dir, config={"optimizer": {"kind": "adamw8bit"}}).learner()
    assert refused.value.remedy == "set learner.optimizer.kind = 'adamw'"


def test_without_the_package_the_kind_is_refused_with_the_command_that_installs_it(large_dir, monkeypatch):
    monkeypatch.setattr(headrace.learner.parallel.config, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="'adamw8bit' needs the package torchao, which is not installed") as refused:
        Setup(model_dir=large_dir, config=LOW_BIT).learner()
    assert "pip install 'headrace[low-bit]'" in refused.value.remedy


def test_a_learner_without_memory_is_told_what_the_kind_would_free(large_dir):
    model = load_model(ModelConfig(path=str(large_dir)))
    of_kind = {
        kind: compute_sizes(model, validate(LearnerConfig, {"optimizer": {"kind": kind}}))
        for kind in ("adamw", "adamw8bit")
    }
    low_bit, ranks = "learner.optimizer.kind = 'adamw8bit' (headrace[low-bit])", "learner.parallel.data = 2"
    freed = levers(of_kind["adamw"])[low_bit]
    assert freed == pytest.approx(6 * sum(weight.numel() for weight in model.parameters()), rel=0.02)
    for kind, sizes in of_kind.items():
        deep = msgspec.structs.replace(sizes.shape, params=10**9, layers=100)
        named = levers(replace(sizes, shape=deep))
        assert any(setting.startswith(ranks) for setting in named) == (low_bit in named) == (kind == "adamw")


def test_several_ranks_are_refused():
    with pytest.raises(ConfigError) as refused:
        validate(LearnerConfig, {"optimizer": {"kind": "adamw8bit"}, "parallel": {"data": 2}})
    assert refused.value.problem.startswith("learner.optimizer.kind='adamw8bit' with learner.parallel of 2 ranks")
    assert "learner.optimizer.kind = 'adamw'" in refused.value.remedy
