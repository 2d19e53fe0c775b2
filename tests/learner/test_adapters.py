"""A learner of an adapter trains the adapter only; several on one base are as if each were alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import CheckpointError
from headrace.learner.adapters import Adapters
from headrace.learner.checkpoint import begin
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver
from tests.learner.builders import assert_same_bits, random_batch, tiny
from tests.learner.test_parts import part
from tests.learner.test_replay import SPEC as MIXTURE
from tests.learner.test_replay import routed

CONFIGS = {
    "a": LoraConfig(rank=4, seed=1),
    "b": LoraConfig(rank=2, alpha=3.0, target_modules=["q_proj", "down_proj"], seed=2),
    "c": LoraConfig(rank=3, seed=3, use_dora=True),
}
"""Of different shapes."""


@dataclass(frozen=True)
class Build:
    """Makes learners over one model's directory."""

    model_dir: Path
    lr: float = 1e-2

    def __call__(self, name: str, model: Any) -> LearnerCore:
        return LearnerCore(
            model,
            LearnerConfig(lr=self.lr, schedule="cosine", weight_decay=0.1, tokens_per_microbatch=20),
            Objective.build(AlgoConfig.model_validate({"bundle": "grpo"})),
            LearnerContext(temperature=1.0, total_steps=6, model_dir=self.model_dir, clock=RealClock()),
        )

    def base(self, lora: LoraConfig | None = None) -> Any:
        return load_model(ModelConfig(path=str(self.model_dir), lora=lora))

    def alone(self, lora: LoraConfig) -> LearnerCore:
        return self("", self.base(lora))

    def together(self) -> tuple[Any, Adapters]:
        model = self.base()
        return model, Adapters(model, str(self.model_dir), CONFIGS, self)


@pytest.fixture
def build(model_dir: Path) -> Build:
    return Build(model_dir)


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weight_tensors(model).items()}


def batch(name: str, step: int) -> Any:
    return random_batch(step, seed=ord(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_training_an_adapter_leaves_every_weight_of_the_base_as_it_was(build: Build, name: str) -> None:
    learner, plain = build.alone(CONFIGS[name]), build.base()
    before = bits(learner.model)
    reports = [learner.train(batch(name, step)) for step in range(2)]
    assert all(report.metrics["grad_norm"] > 0 for report in reports)
    after = bits(learner.model)
    assert sum(not torch.equal(after[key], before[key]) for key in after) == len(after)
    frozen = {key.replace(".base_layer", ""): tensor for key, tensor in learner.model.named_parameters()}
    assert_same_bits(
        {key: frozen[key].detach() for key, _ in plain.named_parameters()},
        {key: tensor.detach() for key, tensor in plain.named_parameters()},
    )


def test_the_optimizer_holds_moments_of_the_adapter_only(build: Build, tmp_path: Path) -> None:
    learner = build.alone(CONFIGS["a"])
    learner.train(batch("a", 0))
    learner.save(begin(tmp_path, 1))
    (directory,) = tmp_path.iterdir()
    moments = load_file(directory / "optimizer.safetensors")
    assert {key.partition("|")[0] for key in moments} - {"random_state.cpu"} == set(weight_tensors(learner.model))


def test_training_one_adapter_leaves_the_others_bitwise_unchanged(build: Build) -> None:
    model, adapters = build.together()
    kept = {}
    for name in ("b", "c"):
        with adapters.on(name) as learner:
            learner.train(batch(name, 0))
            kept[name] = bits(model)
    with adapters.on("a") as learner:
        for step in range(2):
            learner.train(batch("a", step))
    for name, before in kept.items():
        with adapters.on(name) as learner:
            assert_same_bits(bits(model), before)
            assert learner.version == 1


def test_adapters_trained_in_turns_equal_each_trained_alone(build: Build) -> None:
    model, adapters = build.together()
    for step in range(3):
        for name in adapters.names:
            with adapters.on(name) as learner:
                learner.train(batch(name, step))
    for name in adapters.names:
        alone = build.alone(CONFIGS[name])
        for step in range(3):
            alone.train(batch(name, step))
        with adapters.on(name) as learner:
            assert_same_bits(bits(model), bits(alone.model))
            assert learner.version == 3


def test_a_gradient_waits_while_another_adapter_trains(build: Build) -> None:
    model, adapters = build.together()
    with adapters.on("a") as learner:
        learner.forward_backward(batch("a", 0))
    with adapters.on("b") as learner:
        learner.train(batch("b", 0))
    with adapters.on("a") as learner:
        learner.optim_step()
        found = bits(model)
    alone = build.alone(CONFIGS["a"])
    alone.train(batch("a", 0))
    assert_same_bits(found, bits(alone.model))


def test_steps_in_parts_of_several_adapters_may_be_interleaved(build: Build) -> None:
    whole = {"a": batch("a", 0), "b": batch("b", 0)}
    _, adapters = build.together()
    for name, group in (("a", 0), ("b", 0), ("a", 1), ("b", 1)):
        with adapters.on(name) as learner:
            learner.add(part(whole[name], [group]))
    updates = {}
    for name in whole:
        with adapters.on(name) as learner:
            updates[name] = (learner.finish().metrics, learner.optim_step().grad_norm)
    for name, (metrics, grad_norm) in updates.items():
        alone = build.alone(CONFIGS[name])
        alone.add(part(whole[name], [0]))
        alone.add(part(whole[name], [1]))
        assert alone.finish().metrics == metrics
        assert alone.optim_step().grad_norm == grad_norm


def test_routing_mismatch_is_counted_whichever_of_several_adapters_trains(tmp_path: Path) -> None:
    build = Build(tiny(tmp_path / "mixture", kind="qwen3_moe", extra=MIXTURE))
    recorded = routed(random_batch())
    model = build.base()
    adapters = Adapters(model, str(build.model_dir), {name: CONFIGS[name] for name in "ac"}, build)
    for name in "ac":
        with adapters.on(name) as learner:
            found = learner.forward_backward(recorded).metrics["routing_differs"]
        assert found == build.alone(CONFIGS[name]).forward_backward(recorded).metrics["routing_differs"] > 0.3


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_saved_and_restored_goes_on_bit_for_bit(build: Build, tmp_path: Path, name: str) -> None:
    unbroken, first = build.alone(CONFIGS[name]), build.alone(CONFIGS[name])
    for step in range(2):
        unbroken.train(batch(name, step))
        first.train(batch(name, step))
    unfinished = begin(tmp_path, 2)
    first.save(unfinished)
    resumed = build.alone(CONFIGS[name])
    resumed.restore(unfinished)
    assert resumed.version == 2
    for step in (2, 3):
        unbroken.train(batch(name, step))
        resumed.train(batch(name, step))
    assert_same_bits(bits(resumed.model), bits(unbroken.model))


def test_a_snapshot_of_one_adapter_restores_into_one_among_several(build: Build, tmp_path: Path) -> None:
    alone = build.alone(CONFIGS["b"])
    alone.train(batch("b", 0))
    unfinished = begin(tmp_path, 1)
    alone.save(unfinished)
    model, adapters = build.together()
    with adapters.on("b") as learner:
        learner.restore(unfinished)
        learner.train(batch("b", 1))
        found = bits(model)
    alone.train(batch("b", 1))
    assert_same_bits(found, bits(alone.model))


def test_a_snapshot_is_an_adapter_with_its_tokenizer_and_no_model(build: Build, tmp_path: Path) -> None:
    learner = build.alone(CONFIGS["a"])
    unfinished = begin(tmp_path, 0)
    learner.save(unfinished)
    names = {path.name for path in unfinished.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    tree = json.loads((unfinished / "adapter_config.json").read_text())
    assert (tree["r"], tree["base_model_name_or_path"]) == (4, str(build.model_dir))


def test_a_snapshot_of_another_adapter_or_of_a_model_is_refused(build: Build, tmp_path: Path) -> None:
    learner = build.alone(CONFIGS["a"])
    before = bits(learner.model)
    for number, other in enumerate((build.alone(CONFIGS["b"]), build("", build.base()))):
        unfinished = begin(tmp_path / str(number), 0)
        other.save(unfinished)
        with pytest.raises(CheckpointError, match="no adapter of this run"):
            learner.restore(unfinished)
    unfinished = begin(tmp_path / "adapter", 0)
    learner.save(unfinished)
    with pytest.raises(CheckpointError, match="holds an adapter, and no model"):
        build("", build.base()).restore(unfinished)
    assert_same_bits(bits(learner.model), before)


def test_only_the_adapter_is_published_and_the_engine_then_computes_the_same(tmp_path: Path) -> None:
    build = Build(tiny(tmp_path / "model", hidden_size=64, num_layers=4))
    model, adapters = build.together()
    engine = build.base(CONFIGS["a"])
    ids, plan = torch.arange(3, 12), PackedPlan([4, 5])
    with adapters.on("a") as learner:
        learner.train(batch("a", 0))
        trained = weight_tensors(model)
        publisher = make_publisher(Route(address=str(tmp_path / "buffer")), trained)
        receiver = make_receiver(Route(), weight_tensors(engine))
        publisher.copy(0)
        receiver.stage(publisher.announce(1, 0))
        receiver.commit(1)
        with torch.no_grad():
            expected = forward(model, ids, plan)
    with torch.no_grad():
        assert torch.equal(forward(engine, ids, plan), expected)
    everything = sum(parameter.numel() for parameter in build.base().parameters()) * 4
    adapter = sum(tensor.numel() for tensor in trained.values()) * 4
    assert adapter <= publisher.manifest.total_bytes < 0.3 * everything
    publisher.close()
