"""The learning rate follows the effective sample size or the mean age of the batch, as computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerCore
from tests.learner import reference
from tests.learner.builders import Setup, assert_same_bits, random_batch, weights

AGE = {"kind": "age", "reference": 0.1, "power": 0.5}
"""A damping that acts on the batches of :func:`random_batch`, whose tokens have the ages 0 and 1."""


def learner_of(model_dir, damping: dict | None, **setup: object) -> LearnerCore:
    config = {"tokens_per_microbatch": 20, "schedule": "linear", "warmup_steps": 2, "damping": damping}
    return Setup(model_dir=model_dir, config=config, **setup).learner()


def log_ratios(model_dir, batch) -> list[np.ndarray]:
    """Return log π/μ of the tokens of each sample that carry loss, in float64."""
    log_pi = reference.logprobs(reference.double(model_dir), batch, 1.0).detach().numpy()
    ratios = log_pi - batch.logprobs_N[batch.mask_N].astype(np.float64)
    owners = np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)[batch.mask_N]
    return [ratios[owners == sample] for sample in range(len(batch.lengths_S))]


def ess(w: np.ndarray) -> float:
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


@pytest.mark.parametrize("of", ["sequences", "tokens"])
def test_rate_is_that_of_the_schedule_times_the_root_of_the_effective_sample_size(model_dir, of):
    batch = random_batch(0)
    by_sample = log_ratios(model_dir, batch)
    sequences = np.array([each.sum() for each in by_sample]).clip(-20, 20)
    share = ess(np.exp(sequences if of == "sequences" else np.concatenate(by_sample)))
    assert share < 0.9
    plain, damped = learner_of(model_dir, None), learner_of(model_dir, {"kind": "ess", "of": of})
    expected, found = plain.train(batch).metrics, damped.train(batch).metrics
    assert found["lr"] == pytest.approx(expected["lr"] * share**0.5, rel=1e-4)
    assert found["lr_damping"] == pytest.approx(share**0.5, rel=1e-4)
    assert "lr_damping" not in expected


def test_batch_above_the_reference_is_trained_at_the_full_rate_bit_for_bit(model_dir):
    plain, damped = learner_of(model_dir, None), learner_of(model_dir, {"kind": "ess", "reference": 1e-6})
    for step in range(3):
        plain.train(random_batch(step))
        assert damped.train(random_batch(step)).metrics["lr_damping"] == 1.0
    assert_same_bits(weights(plain), weights(damped))


def test_factor_of_one_batch_does_not_stay_for_the_next(model_dir):
    once, twice = (learner_of(model_dir, {"kind": "ess"}) for _ in range(2))
    found = once.train(random_batch(0)).metrics["lr_damping"]
    twice.forward_backward(random_batch(0))
    twice._discard_gradients()
    assert twice._damping == 1.0
    assert twice.train(random_batch(0)).metrics["lr_damping"] == found
    assert twice._damping == 1.0


def test_gradient_of_parts_is_damped_as_that_of_the_whole(model_dir):
    whole, parts = (learner_of(model_dir, {"kind": "ess"}) for _ in range(2))
    batch = random_batch(0)
    expected = whole.train(batch).metrics["lr_damping"]
    parts.add(batch)
    parts.finish()
    assert parts.optim_step().damped["lr_damping"] == pytest.approx(expected, rel=1e-6)


def mean_age(batch) -> float:
    return float((batch.step - batch.versions_N[batch.mask_N].astype(np.int64)).mean())


def advanced(model_dir, damping: dict | None, **setup: object) -> LearnerCore:
    """A learner at version 1, for which batches have old tokens."""
    learner = learner_of(model_dir, damping, **setup)
    learner.train(random_batch(0))
    return learner


def test_rate_is_that_of_the_schedule_times_the_power_of_reference_over_mean_age(model_dir):
    batch = random_batch(1)
    assert 0.1 < mean_age(batch) < 1
    expected, found = (advanced(model_dir, damping).train(batch).metrics for damping in (None, AGE))
    factor = (0.1 / mean_age(batch)) ** 0.5
    assert found["lr_damping"] == pytest.approx(factor, rel=1e-12)
    assert found["lr"] == pytest.approx(expected["lr"] * factor, rel=1e-12)


def test_fresh_batch_is_trained_at_the_full_rate_bit_for_bit(model_dir):
    plain, damped = learner_of(model_dir, None), learner_of(model_dir, {"kind": "age"})
    for step in range(3):
        plain.train(random_batch(step))
        assert damped.train(random_batch(step)).metrics["lr_damping"] == 1.0
    assert_same_bits(weights(plain), weights(damped))


def test_each_update_of_a_batch_is_damped_by_the_age_of_its_own_tokens(model_dir):
    batch = random_batch(1)
    algo = {"bundle": "grpo", "minibatches": 2, "old": "engine"}
    found = advanced(model_dir, AGE, algo=algo).train(batch).metrics
    last_group = np.random.default_rng([1, 0]).permutation(2)[-1]
    own = batch.mask_N & (batch.groups_S == last_group).repeat(batch.lengths_S)
    last_age = mean_age(replace(batch, mask_N=own))
    assert 0.1 < last_age != mean_age(batch)
    assert found["lr_damping"] == pytest.approx((0.1 / last_age) ** 0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("table", "problem", "remedy"),
    [
        ({"kind": "old"}, "damping.kind='old' does not exist", "known: age, ess"),
        ({"power": 2.0}, "damping does not say its kind", "age, ess"),
        ({"kind": "age", "of": "tokens"}, "damping.of is not a setting", "known: kind, power, reference"),
        ({"kind": "age", "reference": 0}, "damping.reference=0: input should be greater than 0", ""),
    ],
)
def test_other_dampings_are_refused_with_the_known_ones(table, problem, remedy):
    with pytest.raises(ConfigError) as refused:
        validate(LearnerConfig, {"damping": table})
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy
