"""Several updates from one batch: what plain torch makes of the formulas, with π_old of the beginning of the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.base.types.batch import Batch
from headrace.policy.objective import resolve_algo
from tests.learner import reference
from tests.learner.builders import Setup, assert_goes_on, assert_same_bits, random_batch, weights

SEVERAL = {"epochs": 2, "minibatches": 2}
ALGO = {"loss": {"kind": "dapo"}, "correction": {"kind": "tis"}}
"""The mean over tokens of min(π_old/μ, 2) times the clipped surrogate."""
RATES = {"lr": 3e-2, "eps": 1e-3, "max_grad_norm": 1.0}


@pytest.fixture
def setup(model_dir):
    return Setup(model_dir=model_dir, algo={**ALGO, **SEVERAL}, config=RATES)


def batch_of(step: int = 0) -> Batch:
    return random_batch(step, num_samples=12)


def plain_loss(
    model: torch.nn.Module, batch: Batch, log_old: torch.Tensor, groups: np.ndarray
) -> tuple[torch.Tensor, int]:
    """The loss of some groups, and how many of their tokens are clipped."""
    inside = torch.tensor(np.isin(np.repeat(batch.groups_S, batch.lengths_S), groups)[batch.mask_N])
    log_pi = reference.logprobs(model, batch, 1.0)
    log_mu, advantages = (
        torch.tensor(column[batch.mask_N]).double() for column in (batch.logprobs_N, batch.advantages_N)
    )
    ratio = (log_pi - log_old).exp()
    value = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * (log_old - log_mu).exp().clamp(
        max=2.0
    )
    clipped = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & (ratio < 0.8))
    return value[inside].sum() / inside.sum(), int(clipped[inside].sum())


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """The updates of one batch in float64; how many tokens were clipped in all of them."""
    with torch.no_grad():
        log_old = reference.logprobs(model, batch, 1.0)
    num_clipped = 0
    for epoch in range(2):
        dealt = np.random.default_rng([batch.step, epoch]).permutation(np.unique(batch.groups_S))
        for groups in np.array_split(dealt, 2):
            loss, clipped = plain_loss(model, batch, log_old, groups)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_clipped += clipped
    return num_clipped


@pytest.mark.parametrize("budget", [8192, 24])
def test_weights_after_several_updates_are_those_of_plain_torch(setup, budget):
    learner = replace(setup, config={**RATES, "tokens_per_microbatch": budget}).learner()
    model = reference.double(setup.model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)
    clipped = 0
    for step in range(2):
        report = learner.train(batch_of(step))
        clipped += plain_step(model, optimizer, batch_of(step))
        assert report.updates == report.metrics["updates"] == 4
    assert clipped > 0
    expected = dict(model.named_parameters())
    for name, weight in weights(learner).items():
        torch.testing.assert_close(weight.double(), expected[name].detach(), rtol=0, atol=2e-5, msg=name)


def test_a_token_is_told_once_and_as_it_was_before_the_first_update(setup):
    learner, untouched = setup.learner(), setup.learner()
    batch = batch_of()
    report = learner.train(batch)
    before = untouched.logprobs(batch)
    np.testing.assert_allclose(report.log_pi_N[batch.mask_N], before[batch.mask_N], atol=1e-6)
    assert (report.trained_tokens, learner.version) == (batch.mask_N.sum(), 1)
    once = replace(setup, algo=ALGO).learner().train(batch)
    same = ("mismatch_kl", "mismatch_abs", "mismatch_k1", "stale_k3", "staleness_k3", "age_mean", "age_max", "tokens")
    assert {name: report.metrics[name] for name in same if name in once.metrics} == pytest.approx(
        {name: once.metrics[name] for name in same if name in once.metrics}, rel=1e-4
    )
    assert report.metrics["clip_frac"] > once.metrics["clip_frac"] == 0.0


def test_a_run_that_goes_on_between_batches_makes_the_same_bits(setup, tmp_path):
    assert_goes_on(setup, tmp_path, [batch_of(), batch_of(1)])


def test_one_update_is_the_default_and_has_the_bits_of_before(setup):
    plain, named = (replace(setup, algo={**ALGO, **more}).learner() for more in ({}, {"epochs": 1, "minibatches": 1}))
    for learner in (plain, named):
        gradient = learner.forward_backward(batch_of())
        learner.optim_step()
        assert gradient.trained_tokens == batch_of().mask_N.sum()
    assert_same_bits(weights(plain), weights(named))
    assert AlgoConfig.model_validate(ALGO).clip_is_idle
    assert not AlgoConfig.model_validate({**ALGO, **SEVERAL}).clip_is_idle


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ({"advantage": "gae", "epochs": 2}, "the critic learns once of a batch"),
        ({"loss": "m2po", "minibatches": 2}, "a formula chooses its tokens from the whole batch"),
        ({"epochs": 0}, "algo.epochs"),
    ],
)
def test_what_has_no_meaning_for_several_updates_is_refused(algo, words):
    with pytest.raises(ConfigError, match=words):
        validate(AlgoConfig, algo, "algo")


def test_a_loop_of_ones_own_makes_its_updates_itself():
    with pytest.raises(ConfigError, match="are settings of whole runs"):
        resolve_algo({"loss": "dapo", "epochs": 2})


@pytest.mark.parametrize("call", ["forward_backward", "add"])
def test_one_gradient_in_place_of_several_updates_is_refused(setup, call):
    with pytest.raises(ConfigError, match="makes 4 updates of a batch"):
        getattr(setup.learner(), call)(batch_of())
