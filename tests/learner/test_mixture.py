"""Losses for the balance of experts are those of the whole step, however it is cut into passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from headrace.base.errors import ConfigError
from headrace.base.types.batch import Batch
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from tests.learner.builders import Setup, assert_close, gradients, random_batch, tiny
from tests.learner.test_replay import SPEC, routed

BALANCE, Z = 0.5, 0.25
STEP = 5e-5
"""Of the finite difference: transformers weighs experts in float32, which a smaller step would show."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(model_dir=tiny(tmp_path_factory.mktemp("moe") / "model", kind="qwen3_moe", extra=SPEC))


def with_losses(setup: Setup, **config: object) -> Setup:
    return replace(setup, config={"mixture": {"balance_coef": BALANCE, "z_coef": Z}, **config})


def reference(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The two losses as transformers defines them, over all tokens but the last of each sample."""
    logits: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [router.register_forward_hook(lambda _m, _a, output: logits.append(output[0])) for router in routers]
    ends = np.cumsum(batch.lengths_S)
    kept = np.setdiff1d(np.arange(batch.num_tokens), ends - 1)
    ids = torch.from_numpy(batch.ids_N[kept].astype(np.int64))
    forward(model, ids, PackedPlan(batch.lengths_S - 1))
    for hook in hooks:
        hook.remove()
    balance = load_balancing_loss_func(tuple(logits), SPEC["num_experts"], SPEC["num_experts_per_tok"])
    z = (torch.cat(logits).logsumexp(-1) ** 2).mean()
    return BALANCE * balance + Z * z


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


def test_losses_for_experts_are_refused_where_they_mean_nothing(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="has none"):
        with_losses(Setup(model_dir=model_dir)).learner()
    sigmoid = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ConfigError, match="balanced by a bias"):
        with_losses(Setup(model_dir=tiny(tmp_path / "glm", kind="glm4_moe", extra=sigmoid))).learner()


def test_parts_of_a_batch_are_refused_with_a_balance_loss(setup):
    with pytest.raises(ConfigError, match="whole batch first"):
        with_losses(setup).learner().add(random_batch())
