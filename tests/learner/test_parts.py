"""A step may be added part by part, as groups become ready: the gradient is that of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.learner.packing import ragged_arange
from tests.learner.builders import Setup, assert_close, assert_same_bits, gradients, random_batch


@pytest.fixture
def setup(model_dir):
    return Setup(model_dir=model_dir)


def part(batch: Batch, groups: list[int]) -> Batch:
    samples = np.flatnonzero(np.isin(batch.groups_S, groups))
    lengths = batch.lengths_S.astype(np.int64)
    places = ragged_arange((np.cumsum(lengths) - lengths)[samples], lengths[samples])
    columns = ("ids_N", "mask_N", "logprobs_N", "versions_N", "advantages_N")
    return msgspec.structs.replace(
        batch,
        **{name: getattr(batch, name)[places] for name in columns},
        **{name: getattr(batch, name)[samples] for name in ("lengths_S", "groups_S", "episodes_S")},
    )


@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]
)
def test_parts_of_whole_groups_add_up_to_the_batch(setup, reduction):
    setup = replace(setup, algo={"bundle": "grpo", "reduction": {"kind": reduction}})
    whole, streamed = setup.learner(), setup.learner()
    batch = random_batch(num_samples=12)
    spoiled = batch.logprobs_N.copy()
    spoiled[np.flatnonzero(batch.mask_N)[3]] = np.nan
    batch = msgspec.structs.replace(batch, logprobs_N=spoiled)
    expected = whole.forward_backward(batch)
    came = [part(batch, groups) for groups in ([2], [0, 3], [1])]
    for each in came:
        streamed.add(each)
    found = streamed.finish()
    assert_close(gradients(streamed), gradients(whole))
    assert found.trained_tokens == expected.trained_tokens
    assert found.dropped_tokens == expected.dropped_tokens
    assert sum(found.dropped_tokens.values()) == 1
    log_pi_N = np.concatenate([whole.logprobs(each) for each in came])
    trained_N = np.concatenate([each.mask_N & np.isfinite(each.logprobs_N) for each in came])
    np.testing.assert_allclose(found.log_pi_N, np.where(trained_N, log_pi_N, np.nan), atol=1e-5)
    for name in ("loss", "tokens", "entropy", "mismatch_kl", "age_mean"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), name
    assert streamed.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=1e-4)


def test_a_part_that_cannot_be_trained_is_refused_and_the_others_stay(setup):
    learner, other = setup.learner(), setup.learner()
    batch = random_batch()
    learner.add(part(batch, [0]))
    bad = part(batch, [1])
    with pytest.raises(RunError, match="non-finite advantage"):
        learner.add(msgspec.structs.replace(bad, advantages_N=bad.advantages_N * np.float32(np.nan)))
    other.add(part(batch, [0]))
    assert learner.finish().metrics == other.finish().metrics
    assert_same_bits(gradients(learner), gradients(other))


def test_a_failure_inside_a_part_leaves_no_gradient_of_any(setup, monkeypatch):
    learner = setup.learner()
    batch = random_batch()
    learner.add(part(batch, [0]))
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.add(part(batch, [1]))
    assert gradients(learner) == {}
    with pytest.raises(RunError, match="no token of the batch"):
        learner.finish()


def test_steps_begun_in_parts_are_finished_before_anything_else(setup):
    learner = setup.learner()
    batch = random_batch()
    learner.add(part(batch, [0]))
    with pytest.raises(RunError, match="begun in parts"):
        learner.forward_backward(batch)
    with pytest.raises(RunError, match="begun in parts"):
        learner.optim_step()
    learner.add(part(batch, [1]))
    learner.finish()
    with pytest.raises(RunError, match="already has a gradient"):
        learner.add(part(batch, [0]))


def test_an_objective_that_must_see_the_whole_batch_is_refused(setup):
    learner = replace(setup, algo={"loss": {"kind": "m2po"}}).learner()
    with pytest.raises(ConfigError, match="chooses its tokens from the whole batch"):
        learner.add(random_batch())
