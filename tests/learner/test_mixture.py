"""Losses for the balance of experts are those of the whole step, however it is cut into passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from headrace.base.errors import ConfigError
from headrace.base.types.batch import Batch
from headrace.learner.auxiliary.kept import Copy
from headrace.learner.config import MixtureConfig
from headrace.learner.core import LearnerCore
from headrace.learner.mixture import MixtureBalance
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.mesh import SingleRank
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.config import LoraConfig
from headrace.models.routing import find_routing
from headrace.models.weights import CORRECTION_BIAS, correction_biases, weight_tensors
from tests.learner.builders import Setup, assert_close, gradients, random_batch, tiny
from tests.learner.test_parallel import KINDS
from tests.learner.test_replay import SPEC, routed
from tests.models import kinds
from tools.families.tiny import write_model

BALANCE, Z = 0.5, 0.25
RATE = 0.01
STEP = 5e-5
"""Of the finite difference: transformers weighs experts in float32, which a smaller step would show."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(model_dir=tiny(tmp_path_factory.mktemp("moe") / "model", kind="qwen3_moe", extra=SPEC))


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A model whose routers choose by a correction bias."""
    return Setup(model_dir=tiny(tmp_path_factory.mktemp("biased") / "model", **KINDS["biased"]))


class InTwoParts:
    """Two ranks that hold parts of every tensor."""

    config = ParallelConfig(tensor=2)


def moving(setup: Setup, **config: object) -> LearnerCore:
    """A learner that moves the biases of experts."""
    return replace(setup, config={"mixture": {"bias_rate": RATE}, **config}).learner()


def with_losses(setup: Setup, **config: object) -> Setup:
    return replace(setup, config={"mixture": {"balance_coef": BALANCE, "z_coef": Z}, **config})


def routers_of(model: torch.nn.Module, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
    """What each router returns for all tokens but the last of each sample."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda _m, _a, output: outputs.append(output)) for router in routers]
    ends = np.cumsum(batch.lengths_S)
    kept = np.setdiff1d(np.arange(batch.num_tokens), ends - 1)
    ids = torch.from_numpy(batch.ids_N[kept].astype(np.int64))
    forward(model, ids, PackedPlan(batch.lengths_S - 1))
    for hook in hooks:
        hook.remove()
    return outputs


def reference(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The two losses as transformers defines them, over all tokens but the last of each sample."""
    logits = [output[0] for output in routers_of(model, batch)]
    balance = load_balancing_loss_func(tuple(logits), SPEC["num_experts"], SPEC["num_experts_per_tok"])
    z = (torch.cat(logits).logsumexp(-1) ** 2).mean()
    return BALANCE * balance + Z * z


def draw_biases(path: Path) -> None:
    """Give the routers of a model, where they have correction biases, some that change what they choose."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(CORRECTION_BIAS):
            tensors[name] = torch.linspace(0.5, -0.5, tensor.numel()).reshape(tensor.shape).to(tensor)
    save_file(tensors, file, {"format": "pt"})


def in_float64(setup: Setup) -> torch.nn.Module:
    model = load_model(ModelConfig(path=str(setup.model_dir))).double()
    model.set_experts_implementation("eager")
    return model


def added(setup: Setup, batch: Batch, **config: object) -> dict[str, torch.Tensor]:
    """The gradient of the two losses: with them, less without them."""
    both = [replace(setup, config=config).learner(), with_losses(setup, **config).learner()]
    for learner in both:
        learner.forward_backward(batch)
    without, found = (gradients(learner) for learner in both)
    return {name: gradient - without[name] for name, gradient in found.items()}


@pytest.mark.parametrize("config", [{}, {"tokens_per_microbatch": 20}, {"share_prefixes": True}], ids=str)
def test_gradient_is_that_of_transformers_losses_over_the_whole_step(setup, config):
    batch = random_batch(num_samples=12)
    model = in_float64(setup)
    reference(model, batch).backward()
    for name, gradient in added(setup, batch, **config).items():
        wanted = dict(model.named_parameters())[name].grad
        expected = torch.zeros_like(gradient) if wanted is None else wanted.to(gradient)
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "kind", ["qwen3_5_moe_text", "granitemoe", "flex_olmo", "ernie4_5_moe", "laguna", "minimax_m2"]
)
def test_losses_of_other_families_are_those_of_transformers(kind, tmp_path):
    path = kinds.tiny(tmp_path / "model", kind) if kind in kinds.HYBRIDS else write_model(tmp_path / "model", kind)
    draw_biases(path)
    batch, setup = random_batch(num_samples=12), Setup(model_dir=path)
    model = in_float64(setup)
    reference(model, batch).backward()
    found = added(setup, batch, tokens_per_microbatch=20)
    scale = max(float(each.abs().max()) for each in found.values())
    for name, gradient in found.items():
        wanted = dict(model.named_parameters())[name].grad
        expected = torch.zeros_like(gradient) if wanted is None else wanted.to(gradient)
        torch.testing.assert_close(gradient, expected, atol=1e-5 * max(scale, 1), rtol=1e-3)


@pytest.mark.parametrize("size", [10_000, 20])
def test_values_of_the_losses_are_told_before_their_coefficients(setup, size):
    batch = random_batch(num_samples=12)
    logits = [output[0].detach() for output in routers_of(in_float64(setup), batch)]
    metrics = with_losses(setup, tokens_per_microbatch=size).learner().forward_backward(batch).metrics
    balance = load_balancing_loss_func(tuple(logits), SPEC["num_experts"], SPEC["num_experts_per_tok"])
    assert metrics["balance_loss"] == pytest.approx(float(balance), rel=1e-5)
    assert metrics["router_z_loss"] == pytest.approx(float((torch.cat(logits).logsumexp(-1) ** 2).mean()), rel=1e-5)
    only_z = replace(setup, config={"mixture": {"z_coef": Z}}).learner().forward_backward(batch).metrics
    assert "balance_loss" not in only_z
    assert "router_z_loss" not in setup.learner().forward_backward(batch).metrics


def test_gradient_is_the_slope_of_the_losses(setup):
    batch, rng = random_batch(), torch.Generator().manual_seed(0)
    model = in_float64(setup)
    gradient = added(setup, batch)
    direction = {name: torch.randn(tensor.shape, generator=rng).double() for name, tensor in gradient.items()}
    padding = model.get_input_embeddings().padding_idx  # its vector is 0, and its gradient is defined as 0
    direction["model.embed_tokens.weight"][padding] = 0.0
    values = []
    with torch.no_grad():
        for step in (STEP, -2 * STEP):
            for name, parameter in model.named_parameters():
                parameter.add_(step * direction[name])
            values.append(float(reference(model, batch)))
    slope = (values[0] - values[1]) / (2 * STEP)
    assert slope == pytest.approx(sum(float((gradient[n].double() * direction[n]).sum()) for n in gradient), rel=1e-3)


def test_replayed_choices_are_those_that_count_and_cutting_does_not_matter(setup):
    batch = routed(random_batch(num_samples=12))
    whole, cut = (with_losses(setup, tokens_per_microbatch=size).learner() for size in (10_000, 20))
    one, many = whole.forward_backward(batch), cut.forward_backward(batch)
    assert_close(gradients(cut), gradients(whole))
    assert many.metrics["expert_load_max"] == pytest.approx(one.metrics["expert_load_max"])
    live = with_losses(setup).learner()
    assert (
        live.forward_backward(random_batch(num_samples=12)).metrics["expert_load_max"] != one.metrics["expert_load_max"]
    )


def test_load_of_experts_is_measured_without_the_losses(setup, model_dir):
    metrics = setup.learner().forward_backward(random_batch()).metrics
    assert metrics["expert_load_max"] >= 1 >= metrics["expert_load_min"] >= 0
    assert 0 <= metrics["experts_idle"] < 1
    assert "expert_load_max" not in Setup(model_dir=model_dir).learner().forward_backward(random_batch()).metrics


def test_recomputed_layers_count_once(setup):
    batch = random_batch()
    assert_close(added(setup, batch, memory={"recompute": True}), added(setup, batch))


def test_losses_for_experts_are_refused_where_they_mean_nothing(model_dir, biased):
    with pytest.raises(ConfigError, match="has none"):
        with_losses(Setup(model_dir=model_dir)).learner()
    with pytest.raises(ConfigError, match="no balance loss for a Glm4MoeForCausalLM"):
        with_losses(biased).learner()
    model = biased.learner().model
    with pytest.raises(ConfigError, match="context or tensor above 1"):
        MixtureBalance(MixtureConfig(z_coef=0.1), model, find_routing(model), InTwoParts)


@pytest.mark.parametrize("config", [{}, {"tokens_per_microbatch": 20}, {"share_prefixes": True}], ids=str)
def test_bias_of_each_expert_moves_by_the_sign_of_what_its_choices_are_short_of_the_mean(biased, config):
    learner = moving(biased, **config)
    wanted = {name: torch.zeros(4) for name in correction_biases(learner.model)}
    for step in range(3):
        batch = random_batch(step=step, num_samples=12)
        for bias, (_, _, experts_NK) in zip(wanted.values(), routers_of(learner.model, batch), strict=True):
            chosen = torch.bincount(experts_NK.flatten(), minlength=4).double()
            bias.add_((chosen.mean() - chosen).sign().float(), alpha=RATE)
        metrics = learner.train(batch).metrics
        found = correction_biases(learner.model)
        assert {name: bias.tolist() for name, bias in found.items()} == {n: b.tolist() for n, b in wanted.items()}
    assert metrics["expert_bias_spread"] == pytest.approx(max(float(b.max() - b.min()) for b in wanted.values()))
    assert metrics["expert_bias_spread"] > 0


@pytest.mark.parametrize("kind", ["laguna", "ernie4_5_moe"])
def test_biases_that_are_parameters_move_too(kind, tmp_path):
    setup = Setup(model_dir=write_model(tmp_path / "model", kind))
    learner = moving(setup, keep_routing=False)
    before = {name: bias.clone() for name, bias in correction_biases(learner.model).items()}
    assert all(name in dict(learner.model.named_parameters()) for name in before)
    learner.train(random_batch(num_samples=12))
    moved = correction_biases(learner.model)
    assert before
    for name, bias in moved.items():
        assert bias is weight_tensors(learner.model)[name]
        step = (bias - before[name]).abs().flatten()
        assert torch.allclose(step[step != 0], torch.tensor(RATE))
        assert step.any()
    copy = Copy(learner.model, [], "cpu")
    assert {name for name, _ in copy.state()} >= set(moved)


def test_moved_biases_are_published_saved_and_restored_with_the_weights(biased, tmp_path):
    learner = moving(biased)
    learner.train(random_batch())
    moved = correction_biases(learner.model)
    assert all(moved[name] is weight_tensors(learner.model)[name] for name in moved)
    tmp_path.joinpath("saved").mkdir()
    learner.save(tmp_path / "saved")
    fresh = moving(biased)
    fresh.restore(tmp_path / "saved")
    for name, bias in correction_biases(fresh.model).items():
        assert bias.any()
        assert torch.equal(bias, moved[name])


def test_kept_policy_computes_with_the_biases_that_it_was_kept_with(biased):
    learner = moving(replace(biased, algo={"loss": {"kind": "grpo", "kl_coef": 0.1}}))
    first = random_batch(num_samples=12)
    before = learner.logprobs(first)
    for bias in correction_biases(learner.model).values():
        bias.add_(torch.tensor([3.0, 0.0, 0.0, 0.0]))
    assert np.abs(learner.logprobs(first) - before).max() > 1e-3
    (reference_policy,) = learner._auxiliary
    with reference_policy._source.computing() as kept, torch.no_grad():
        np.testing.assert_array_equal(kept.logprobs(first, first.mask_N), before)


def test_biases_stay_where_no_weight_changes_and_where_the_gradient_is_discarded(biased):
    still = moving(biased, lr=0.0)
    still.train(random_batch())
    assert not any(bias.any() for bias in correction_biases(still.model).values())
    learner, plain = moving(biased), moving(biased)
    learner.forward_backward(random_batch(seed=5))
    learner._discard_gradients()
    for each in (learner, plain):
        each.train(random_batch())
    for name, bias in correction_biases(plain.model).items():
        assert torch.equal(bias, correction_biases(learner.model)[name])


def test_moving_biases_are_refused_where_there_are_none_or_an_adapter_is_trained(setup, biased):
    with pytest.raises(ConfigError, match="choose without a correction bias") as refused:
        moving(setup)
    assert "balance_coef" in refused.value.remedy
    adapted = load_model(ModelConfig(path=str(biased.model_dir), lora=LoraConfig(rank=2)))
    with pytest.raises(ConfigError, match="part of the base model"):
        MixtureBalance(MixtureConfig(bias_rate=RATE), adapted, find_routing(adapted), SingleRank(adapted.device))


def test_parts_of_a_batch_are_refused_with_a_balance_loss(setup):
    with pytest.raises(ConfigError, match="whole batch first"):
        with_losses(setup).learner().add(random_batch())


def test_a_copy_of_a_snapshot_from_before_biases_were_moved_is_read(biased):
    model = biased.learner().model
    copy = Copy(model, [], "model")
    held = {name: tensor.clone() for name, tensor in copy.state()}
    assert held
    copy.set_state({})
    for name, tensor in copy.state():
        assert torch.equal(tensor, held[name])
