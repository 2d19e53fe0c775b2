"""π_old of each token's own version: bit for bit what the learner of that version would have computed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.learner.core import LearnerCore
from headrace.learner.packing import MicroBatch
from headrace.learner.work import StepWork
from headrace.run.session import load_config
from tests.learner.builders import Setup, assert_same_bits, random_batch, weights

ALGO = {"bundle": "grpo", "old": "sampled"}


def learner_of(model_dir, versions: int = 3, **config: object) -> LearnerCore:
    old = {"kind": "sampled", "versions": versions}
    return Setup(model_dir=model_dir, config={"tokens_per_microbatch": 20, "old": old, **config}, algo=ALGO).learner()


def mixed(step: int, most: int = 2) -> Batch:
    """A batch whose answers begin under older weights and go on under newer ones."""
    batch = random_batch(step)
    ages_N = np.random.default_rng(step).integers(0, min(step, most) + 1, batch.num_tokens)
    return msgspec.structs.replace(batch, versions_N=np.where(batch.mask_N, step - ages_N, -1).astype(np.int32))


def work_of(learner: LearnerCore, batch: Batch) -> StepWork:
    work, _, _ = learner._prepare(batch)
    return learner.add_columns(work)


def test_every_token_gets_log_pi_of_the_weights_of_its_version(model_dir):
    learner, other = learner_of(model_dir), Setup(model_dir=model_dir, config={"tokens_per_microbatch": 20}).learner()
    history = [weights(learner)]
    for step in range(4):
        learner.train(mixed(step))
        history.append(weights(learner))
    batch = mixed(4)
    work = work_of(learner, batch)
    ages_N = np.where(batch.mask_N, batch.step - batch.versions_N, 0)
    assert work.log_old_N[torch.from_numpy(ages_N == 0)].isnan().all()
    for age in (1, 2):
        mask_N = ages_N == age
        assert mask_N.any()
        with torch.no_grad():
            for name, weight in other.model.named_parameters():
                weight.copy_(history[4 - age][name])
        expected = other._forward.logprobs(batch, mask_N)[mask_N]
        assert np.array_equal(work.log_old_N.numpy()[mask_N], expected)
    assert_same_bits(weights(learner), history[-1])


def test_tokens_of_the_present_version_have_the_learner_itself_as_old(model_dir):
    learner = learner_of(model_dir)
    for step in range(2):
        learner.train(mixed(step))
    batch = mixed(2)
    log_pi_N = torch.from_numpy(learner.logprobs(batch)).requires_grad_()
    inputs = work_of(learner, batch).inputs(MicroBatch.whole(batch.lengths_S), log_pi_N)
    fresh_N = torch.from_numpy(batch.mask_N & (batch.versions_N == 2))
    assert torch.equal(inputs.log_old_N[fresh_N], log_pi_N.detach()[fresh_N])
    assert not inputs.log_old_N.requires_grad
    assert not inputs.log_old_N.isnan().any()


def test_clip_acts_on_what_the_updates_have_changed_and_on_nothing_else(model_dir):
    moved, still = learner_of(model_dir, lr=3e-2), learner_of(model_dir, lr=0.0)
    for step in range(3):
        found = [learner.train(mixed(step)).metrics["clip_frac"] for learner in (moved, still)]
    assert found[0] > 0.0
    assert found[1] == 0.0


def test_resumed_run_goes_on_bit_for_bit(model_dir, tmp_path):
    unbroken, first = learner_of(model_dir), learner_of(model_dir)
    for step in range(4):
        unbroken.train(mixed(step))
        first.train(mixed(step))
    first.save(tmp_path)
    resumed = learner_of(model_dir)
    resumed.restore(tmp_path)
    for step in range(4, 6):
        unbroken.train(mixed(step))
        resumed.train(mixed(step))
    assert_same_bits(weights(resumed), weights(unbroken))


def test_token_older_than_the_kept_versions_is_refused_by_name(model_dir):
    learner = learner_of(model_dir, versions=1)
    for step in range(2):
        learner.train(mixed(step, most=0))
    before = weights(learner)
    with pytest.raises(RunError, match=r"step 2 has tokens of version 0, and the weights of the last 1 versions"):
        learner.train(mixed(2))
    assert_same_bits(weights(learner), before)


def test_objective_without_its_copies_is_refused(model_dir):
    with pytest.raises(ConfigError, match="log_old of each token's version"):
        replace(Setup(model_dir=model_dir), algo=ALGO).learner()


def test_run_keeps_as_many_versions_as_tokens_may_be_old():
    run = {"model": {"path": "m"}, "algo": {"old": "sampled"}, "flow": {"max_age": 3}}
    config = load_config(run)
    assert config.learner.old is not None
    assert (config.learner.old.kind, config.learner.old.num_copies) == ("sampled", 3)
    assert load_config(run, ["learner.old.device=cpu"]).learner.old.device == "cpu"
    for settings, found in {
        "flow.max_age=0": "has no effect with flow.max_age=0",
        "flow.max_age=1000": "for each of 1000 versions, and 0 are kept",
        "learner.old.versions=2": "for each of 3 versions, and 2 are kept",
        "learner.old.kind=frozen": "belong to 'sampled'",
    }.items():
        with pytest.raises(ConfigError, match=found):
            load_config(run, [settings])


def test_learner_says_that_the_model_holds_other_weights_for_a_while(model_dir):
    assert learner_of(model_dir).swaps_weights
