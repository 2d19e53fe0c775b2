"""Gradients are those of the formula, whatever the packing; the same input gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.objective import Objective
from headrace.algo.reductions import TokenMean
from headrace.base.errors import ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.learner.config import LearnerConfig
from headrace.learner.forward import Forward
from headrace.learner.packing import MicroBatch
from headrace.models import ModelConfig, load_model
from tests.learner import reference
from tests.learner.builders import Setup, assert_close, assert_same_bits, gradients, random_batch, weights
from tests.learner.test_prefixes import alike


@pytest.fixture
def setup(model_dir):
    return Setup(model_dir=model_dir)


def with_column(batch: Batch, **columns: np.ndarray) -> Batch:
    return msgspec.structs.replace(batch, **columns)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_gradient_is_the_formulas_one_sample_at_a_time_in_float64(setup, temperature):
    learner = replace(setup, temperature=temperature).learner()
    batch = random_batch()
    gradient = learner.forward_backward(batch)
    model = reference.double(setup.model_dir)
    loss = reference.grpo_loss(model, batch, temperature)
    loss.backward()
    assert gradient.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert gradient.trained_tokens == batch.mask_N.sum()
    assert_close(gradients(learner), {name: p.grad for name, p in model.named_parameters()})


def test_entropy_bonus_has_the_gradient_of_the_entropy(setup):
    learner = replace(setup, algo={"bundle": "grpo", "loss": {"kind": "grpo", "entropy_coef": 0.3}}).learner()
    batch = random_batch()
    learner.forward_backward(batch)
    model = reference.double(setup.model_dir)
    reference.grpo_loss(model, batch, 1.0, entropy_coef=0.3).backward()
    assert_close(gradients(learner), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("algo", [{"bundle": "grpo"}, {"bundle": "dapo"}])
@pytest.mark.parametrize("budget", [13, 20, 37])
def test_result_does_not_depend_on_the_microbatches(setup, algo, budget):
    batch = random_batch(num_samples=12)
    whole, cut = (
        replace(setup, algo=algo, config={"tokens_per_microbatch": size}).learner() for size in (10_000, budget)
    )
    one, many = whole.forward_backward(batch), cut.forward_backward(batch)
    assert_close(gradients(cut), gradients(whole))
    for name in ("loss", "entropy", "mismatch_kl", "ess", "age_mean", "age_max"):
        assert many.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), name


@pytest.mark.parametrize("settings", [{}, {"tokens_per_microbatch": 20}, {"share_prefixes": True}])
def test_a_step_tells_log_pi_of_every_token_that_carried_loss(setup, settings):
    learner = replace(setup, config={"tokens_per_microbatch": 60, **settings}).learner()
    batch = alike()
    spoiled = batch.logprobs_N.copy()
    spoiled[np.flatnonzero(batch.mask_N)[3]] = np.nan
    batch = with_column(batch, logprobs_N=spoiled)
    before = learner.logprobs(batch)
    report = learner.train(batch)
    trained_N = batch.mask_N & np.isfinite(spoiled)
    assert report.log_pi_N.dtype == np.float32
    assert np.isnan(report.log_pi_N[~trained_N]).all()
    np.testing.assert_allclose(report.log_pi_N[trained_N], before[trained_N], atol=1e-5)
    assert np.abs(learner.logprobs(batch) - before).max() > 1e-3


def test_gradients_of_two_calls_add_up(setup):
    batch = random_batch()
    once, twice = setup.learner(), setup.learner()
    once.forward_backward(batch)
    twice.forward_backward(batch)
    twice.forward_backward(batch)
    assert_close(gradients(twice), {name: 2 * grad for name, grad in gradients(once).items()})


def test_same_batches_give_the_same_weights_bit_for_bit(setup):
    one, other = setup.learner(), setup.learner()
    for step in range(3):
        report = one.train(random_batch(step))
        assert report.step == step
        other.train(random_batch(step))
    assert one.version == other.version == 3
    assert_same_bits(weights(one), weights(other))


def test_training_moves_the_weights_and_raises_the_probability_of_what_was_good(setup):
    learner = setup.learner()
    batch = random_batch()
    batch = with_column(batch, advantages_N=np.ones_like(batch.advantages_N))
    before = learner.logprobs(batch)
    learner.train(batch)
    assert learner.logprobs(batch)[batch.mask_N].mean() > before[batch.mask_N].mean()


def test_learning_rate_zero_leaves_every_bit(setup):
    learner = replace(setup, config={"lr": 0.0, "weight_decay": 0.1}).learner()
    with torch.no_grad():
        next(iter(learner.model.parameters()))[0, 0] = -0.0
    before = weights(learner)
    report = learner.train(random_batch())
    assert report.metrics["lr"] == 0
    assert learner.version == 1
    assert_same_bits(weights(learner), before)


def test_report_says_rate_norm_and_seconds(setup):
    learner = replace(setup, config={"lr": 1.0, "schedule": "linear", "warmup_steps": 1}).learner()
    report = learner.train(random_batch())
    assert report.metrics["lr"] == 0.5
    assert report.metrics["grad_norm"] > 0
    assert report.seconds == report.metrics["forward_backward_s"] + report.metrics["optim_s"] > 0
    spans = learner.take_spans()
    assert {(span.lane, span.step) for span in spans} == {("learner", 0)}
    names = [span.name for span in spans]
    assert names == ["pack", *["forward", "backward"] * (names.count("forward")), "forward_backward", "optim_step"]
    whole = spans[-2]
    assert all(whole.start_s <= span.start_s <= span.end_s <= whole.end_s for span in spans[:-1])
    assert learner.take_spans() == ()


def test_update_is_that_of_the_clipped_gradient(setup):
    config = {"lr": 1e-3, "max_grad_norm": 1e-3, "eps": 1.0, "betas": (0.0, 0.0)}
    learner = replace(setup, config=config).learner()
    before = weights(learner)
    learner.forward_backward(random_batch())
    raw = gradients(learner)
    norm = torch.stack([grad.square().sum() for grad in raw.values()]).sum().sqrt()
    update = learner.optim_step()
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, after in weights(learner).items():
        clipped = raw[name] * (1e-3 / norm)
        torch.testing.assert_close(after, before[name] - 1e-3 * clipped / (clipped.abs() + 1.0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_token_without_a_finite_mu_leaves_numerator_and_denominator_and_is_counted(setup, bad):
    batch = random_batch()
    lost = np.flatnonzero(batch.mask_N)[[0, 7, -1]]
    logprobs, mask = batch.logprobs_N.copy(), batch.mask_N.copy()
    logprobs[lost], mask[lost] = bad, False
    spoiled, without = setup.learner(), setup.learner()
    report = spoiled.forward_backward(with_column(batch, logprobs_N=logprobs))
    expected = without.forward_backward(with_column(batch, mask_N=mask))
    assert sum(report.dropped_tokens.values()) == 3
    assert report.trained_tokens == expected.trained_tokens == batch.mask_N.sum() - 3
    assert expected.dropped_tokens == {}
    assert_same_bits(gradients(spoiled), gradients(without))


def test_samples_without_a_loss_token_change_nothing(setup):
    batch = random_batch()
    silent = slice(0, int(batch.lengths_S[0]))
    mask, ids = batch.mask_N.copy(), batch.ids_N.copy()
    mask[silent] = False
    ids[silent] = 0
    one, other = setup.learner(), setup.learner()
    one.forward_backward(with_column(batch, mask_N=mask))
    other.forward_backward(with_column(batch, mask_N=mask, ids_N=ids))
    assert_same_bits(gradients(one), gradients(other))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_plain_model_and_train_nothing(setup, temperature):
    learner = replace(setup, temperature=temperature, config={"tokens_per_microbatch": 20}).learner()
    batch = random_batch()
    before = weights(learner)
    found = learner.logprobs(batch)
    assert found.dtype == np.float32
    assert not found[~batch.mask_N].any()
    with torch.no_grad():
        expected = reference.logprobs(reference.double(setup.model_dir), batch, temperature)
    np.testing.assert_allclose(found[batch.mask_N], expected.numpy(), atol=1e-5)
    assert gradients(learner) == {}
    assert_same_bits(weights(learner), before)


def test_mismatch_is_zero_where_mu_is_the_learners_own(setup):
    learner = setup.learner()
    batch = random_batch()
    report = learner.forward_backward(with_column(batch, logprobs_N=learner.logprobs(batch)))
    assert report.metrics["mismatch_abs"] == 0
    assert report.metrics["mismatch_kl"] == 0
    assert report.metrics["ess"] == pytest.approx(1.0)


def test_ages_are_counted_from_the_step(setup):
    learner = setup.learner()
    for step in range(2):
        learner.train(random_batch(step))
    batch = random_batch(2)
    versions = np.where(batch.mask_N, np.where(np.arange(batch.num_tokens) % 2, 2, 0), -1).astype(np.int32)
    metrics = learner.train(with_column(batch, versions_N=versions)).metrics
    assert metrics["age_max"] == 2
    assert metrics["age_mean"] == pytest.approx(2 - versions[batch.mask_N].mean())


def test_gradient_that_is_not_finite_ends_the_run_before_the_update(setup):
    learner = setup.learner()
    before = weights(learner)
    batch = random_batch()
    huge = np.where(batch.mask_N, np.float32(3e38), 0).astype(np.float32)
    learner.forward_backward(with_column(batch, advantages_N=huge))
    with pytest.raises(RunError, match=r"step 0: the global gradient norm is (inf|nan)"):
        learner.optim_step()
    assert learner.version == 0
    assert gradients(learner) == {}
    assert_same_bits(weights(learner), before)


def test_update_without_a_gradient_is_refused(setup):
    with pytest.raises(RunError, match="no gradient"):
        setup.learner().optim_step()


def test_temperature_zero_is_refused(setup):
    with pytest.raises(ConfigError, match="temperature 0"):
        replace(setup, temperature=0.0).learner()


def test_batch_without_any_sample_is_a_step_that_changes_no_weight(setup):
    learner = setup.learner()
    learner.train(random_batch())
    before = weights(learner)
    report = learner.train(Batch.collate(1, []))
    assert (report.step, report.trained_tokens, report.metrics["grad_norm"]) == (1, 0, 0.0)
    assert learner.version == 2
    assert_same_bits(weights(learner), before)
    assert learner.train(random_batch(2)).trained_tokens > 0


def spoil(batch: Batch, how: str) -> Batch:
    ids, mask, logprobs = batch.ids_N.copy(), batch.mask_N.copy(), batch.logprobs_N.copy()
    match how:
        case "is of step 1, the learner is at step 0":
            return with_column(batch, step=1)
        case "token 3 has id 16, the model knows 0 to 15":
            ids[3] = 16
        case "token 0 has id -1":
            ids[0] = -1
        case "first token of sample 1 carries loss":
            mask[batch.lengths_S[0]] = True
        case "mask_N is 1, expected":
            mask = mask[:1]
        case "lengths_S .* expected":
            return with_column(batch, lengths_S=batch.lengths_S + np.int32(1))
        case "no token .* can carry loss":
            logprobs[:] = np.nan
        case "has a non-finite advantage":
            return with_column(batch, advantages_N=np.full_like(batch.advantages_N, np.nan))
    return with_column(batch, ids_N=ids, mask_N=mask, logprobs_N=logprobs)


@pytest.mark.parametrize(
    "how",
    [
        "is of step 1, the learner is at step 0",
        "token 3 has id 16, the model knows 0 to 15",
        "token 0 has id -1",
        "first token of sample 1 carries loss",
        "mask_N is 1, expected",
        "lengths_S .* expected",
        "no token .* can carry loss",
        "has a non-finite advantage",
    ],
)
def test_batch_that_cannot_be_trained_is_refused_before_anything_changes(setup, how):
    learner = setup.learner()
    with pytest.raises(RunError, match=how):
        learner.train(spoil(random_batch(), how))
    assert gradients(learner) == {}
    assert learner.version == 0


def test_sample_over_the_budget_is_refused_with_the_lever(setup):
    learner = replace(setup, config={"tokens_per_microbatch": 5}).learner()
    with pytest.raises(RunError, match=r"learner.tokens_per_microbatch=5"):
        learner.train(random_batch())


@dataclass(frozen=True)
class TopRequest:
    """A loss over the tokens of the batch whose log π is above the batch's median."""

    reduction: ClassVar[str] = "token_mean"

    def columns(self) -> frozenset[Column]:
        return frozenset({"selected"})

    def corrects(self) -> bool:
        return False

    def select(self, whole: LossInputs) -> torch.Tensor:
        return whole.log_pi_N > whole.log_pi_N[whole.mask_N].median()

    def penalty(self, inputs: LossInputs) -> TokenLoss | None:
        return None

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        assert inputs.selected_NP is not None
        return TokenLoss(tokens_N=-inputs.log_pi_N * inputs.selected_NP[:, 0])


def test_tokens_chosen_from_the_whole_batch_do_not_depend_on_the_microbatches(setup):
    setup = replace(setup, objective=Objective(TopRequest(), (), TokenMean()))
    batch = random_batch(num_samples=12)
    whole, cut = (replace(setup, config={"tokens_per_microbatch": size}).learner() for size in (10_000, 20))
    one, many = whole.forward_backward(batch), cut.forward_backward(batch)
    log_pi = whole.logprobs(batch)[batch.mask_N]
    chosen = log_pi[log_pi > np.sort(log_pi)[(len(log_pi) - 1) // 2]]
    assert one.metrics["loss"] == pytest.approx(-chosen.sum() / len(log_pi), rel=1e-5)
    assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-5)
    assert_close(gradients(cut), gradients(whole))


class Failing(TopRequest):
    """A loss that fails in the second micro-batch."""

    calls: ClassVar[list[int]] = []

    def columns(self) -> frozenset[Column]:
        return frozenset()

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        self.calls.append(1)
        if len(self.calls) == 2:
            raise ArithmeticError("the second micro-batch fails")
        return TokenLoss(tokens_N=-inputs.log_pi_N)


def test_failure_between_microbatches_leaves_no_gradient(setup):
    objective = Objective(Failing(), (), TokenMean())
    learner = replace(setup, objective=objective, config={"tokens_per_microbatch": 20}).learner()
    with pytest.raises(ArithmeticError):
        learner.forward_backward(random_batch())
    assert len(Failing.calls) == 2
    assert gradients(learner) == {}


def test_clipping_acts_where_the_engine_is_the_old_policy(setup):
    """One update per batch: against the learner before it, every ratio is 1 and no clip acts."""
    batch = random_batch()
    tables = [{"loss": {"kind": "grpo", "clip_high": high}} for high in (0.01, 0.5)]
    learner_s, engine_s = (
        [replace(setup, algo={**table, "old": old}).learner() for table in tables] for old in ("learner", "engine")
    )
    metrics = {one: one.forward_backward(batch).metrics for one in (*learner_s, *engine_s)}
    assert metrics[learner_s[0]]["clip_frac"] == metrics[learner_s[1]]["clip_frac"] == 0
    assert_close(gradients(learner_s[0]), gradients(learner_s[1]))
    tight, wide = (metrics[one]["clip_frac"] for one in engine_s)
    assert tight > wide > 0
    assert any(not torch.equal(gradients(engine_s[0])[name], grad) for name, grad in gradients(engine_s[1]).items())
    assert metrics[engine_s[0]]["mismatch_kl"] == metrics[learner_s[0]]["mismatch_kl"]
    assert metrics[engine_s[0]]["mismatch_k3"] == pytest.approx(metrics[learner_s[0]]["mismatch_k3"])


def test_engine_as_old_policy_has_the_gradient_of_its_ratio(setup):
    """−A·∇r with r = π/μ where nothing is clipped: the gradient of reinforce against μ, whose weight is r too."""
    batch = random_batch()
    wide = {"kind": "grpo", "clip_low": 1.0, "clip_high": 1e9}
    ours = replace(setup, algo={"loss": wide, "old": "engine", "reduction": "token_mean"}).learner()
    theirs = replace(setup, algo={"loss": {"kind": "reinforce", "ratio_cap": 1e9}}).learner()
    ours.forward_backward(batch)
    theirs.forward_backward(batch)
    assert_close(gradients(ours), gradients(theirs))


def test_an_empty_microbatch_runs_the_model_and_leaves_a_gradient_of_zero(setup):
    """What a rank computes while the others have one sample more."""
    model = load_model(ModelConfig(path=str(setup.model_dir)))
    batch = random_batch()
    run = Forward(model, LearnerConfig(), temperature=1.0, entropy_gradient=False)
    passed = run(batch, batch.mask_N, MicroBatch.from_units([], batch.lengths_S.astype(np.int64)))
    assert passed.log_pi_M.shape == passed.entropy_M.shape == (0,)
    passed.log_pi_M.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
