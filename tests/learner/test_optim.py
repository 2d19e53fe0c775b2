"""The learning rate follows its schedule, and decay touches matrices only."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.optim import build_optimizer, learning_rate


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


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"min_lr_frac": 0.5}, "learner.min_lr_frac=0.5 has no effect with learner.schedule='constant'"),
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
