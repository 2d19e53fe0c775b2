"""The learning rate follows its schedule, decay touches matrices only, and groups of weights have own settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.optim import build_optimizer, learning_rate, sum_of_squares
from tests.learner.builders import Setup, assert_goes_on, gradients, random_batch, weights


def rates(config: LearnerConfig, total_steps: int) -> list[float]:
    return [learning_rate(config, step, total_steps) for step in range(total_steps + 1)]


def test_constant_rate_rises_through_the_warmup_and_stays():
    config = LearnerConfig(lr=4.0, warmup_steps=3)
    assert rates(config, 5) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_rate_ends_at_its_floor():
    config = LearnerConfig(lr=1.0, schedule="linear", min_lr_frac=0.5)
    assert rates(config, 4) == [1.0, 0.875, 0.75, 0.625, 0.5]


def test_cosine_rate_is_half_way_in_the_middle():
    config = LearnerConfig(lr=2.0, schedule="cosine", min_lr_frac=0.1)
    assert rates(config, 10)[5] == pytest.approx(2.0 * 0.55)
    assert rates(config, 10)[10] == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_no_step_of_a_run_has_rate_zero(schedule):
    config = LearnerConfig(lr=1.0, schedule=schedule, warmup_steps=2)
    assert min(rates(config, 8)[:-1]) > 0


def test_warmup_longer_than_the_run_never_reaches_the_peak():
    assert max(rates(LearnerConfig(lr=1.0, schedule="linear", warmup_steps=50), 10)) < 1.0


def test_decay_shrinks_matrices_and_leaves_vectors():
    matrix, vector = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer = build_optimizer([matrix, vector], LearnerConfig(lr=0.1, weight_decay=0.5))
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert torch.equal(vector.detach(), torch.ones(2))


GROUPS = [
    {"names": ["embeddings"], "lr_scale": 0.25, "betas": [0.8, 0.95]},
    {"names": ["*.self_attn.*"], "weight_decay": 0.0},
    {"names": ["vectors"], "lr_scale": 2.0, "weight_decay": 0.3},
]


def expected_group(name: str, weight: Parameter) -> dict[str, Any]:
    if "embed" in name:
        return {"lr": 0.25e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    if ".self_attn." in name:
        return {"lr": 1e-2, "weight_decay": 0.0}
    return {"lr": 2e-2, "weight_decay": 0.3} if weight.ndim < 2 else {"lr": 1e-2, "weight_decay": 0.1}


def test_each_group_of_weights_has_the_update_of_its_settings(model_dir):
    config = {"optimizer": {"groups": GROUPS}, "weight_decay": 0.1, "max_grad_norm": 1e9}
    learner = Setup(model_dir=model_dir, config=config).learner()
    copies = {name: Parameter(weight.detach().clone()) for name, weight in learner.model.named_parameters()}
    reference = torch.optim.AdamW(
        [{"params": [copy], **expected_group(name, copy)} for name, copy in copies.items()], betas=(0.9, 0.99)
    )
    for step in range(3):
        learner.forward_backward(random_batch(step))
        for name, gradient in gradients(learner).items():
            copies[name].grad = gradient
        learner.optim_step()
        reference.step()
    for name, weight in learner.model.named_parameters():
        torch.testing.assert_close(weight.detach(), copies[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_groups_are_saved_and_go_on_bit_for_bit(model_dir, tmp_path, kind):
    setup = Setup(model_dir=model_dir, config={"optimizer": {"kind": kind, "groups": GROUPS}, "weight_decay": 0.1})
    assert_goes_on(setup, tmp_path, [random_batch(), random_batch(1)])


def test_a_group_of_matrices_scales_the_update_and_the_decay_of_muon(model_dir):
    half = {"names": ["*.mlp.*"], "lr_scale": 0.5}
    plain, scaled = (
        Setup(
            model_dir=model_dir, config={"optimizer": {"kind": "muon", "groups": groups}, "weight_decay": 0.1}
        ).learner()
        for groups in ([], [half])
    )
    before = weights(plain)
    for learner in (plain, scaled):
        learner.train(random_batch())
    for name, weight in weights(scaled).items():
        factor = 0.5 if ".mlp." in name else 1.0
        moved = weights(plain)[name] - before[name]
        torch.testing.assert_close(weight - before[name], factor * moved, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("names", [["head", "lm_head*"], ["*.nothing"], ["vectors", "*norm*"]])
def test_a_name_that_no_weight_is_left_for_is_refused(model_dir, names):
    setup = Setup(model_dir=model_dir, config={"optimizer": {"groups": [{"names": names, "lr_scale": 2.0}]}})
    with pytest.raises(ConfigError, match="and no trained weight that is left has that name"):
        setup.learner()


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"min_lr_frac": 0.5}, "learner.min_lr_frac=0.5 has no effect with learner.schedule='constant'"),
        ({"optimizer": {"groups": [{"names": ["head"]}]}}, "learner.optimizer.groups: the group head changes nothing"),
        ({"optimizer": {"momentum": 0.9}}, "learner.optimizer.momentum=0.9 has no effect"),
        ({"top_k": 5}, "learner.top_k=5 has no effect without learner.teachers"),
        ({"share_prefixes": True, "parallel": {"context": 2}}, "learner.share_prefixes=true with learner.parallel"),
        ({"parallel": {"expert": 2}}, "learner.parallel.expert=2 does not divide"),
        ({"critic": {"clip": 0.2}}, "learner.critic.clip=0.2 bounds"),
    ],
)
def test_settings_without_an_effect_are_refused_by_their_names(tree, problem):
    with pytest.raises(ConfigError) as refused:
        validate(LearnerConfig, tree)
    assert refused.value.problem.startswith(problem)
    assert "learner." in refused.value.remedy


def test_settings_that_act_are_not_refused():
    config = LearnerConfig(schedule="cosine", min_lr_frac=0.5, optimizer={"kind": "muon", "momentum": 0.9})
    assert (config.min_lr_frac, config.optimizer.momentum) == (0.5, 0.9)


def test_the_norm_of_many_numbers_is_exact():
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=rng) for shape in ((3_000_001,), (700, 1000), (5,), (0,))]
    tensors.append(tensors[1].t())
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert sum_of_squares(tensors) == pytest.approx(expected, rel=1e-6)
    assert sum_of_squares([]) == 0.0
