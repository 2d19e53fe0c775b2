"""The learning rate follows the effective sample size of the batch, as computed by hand from its ratios."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.learner.core import LearnerCore
from tests.learner import reference
from tests.learner.builders import Setup, assert_same_bits, random_batch, weights


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
