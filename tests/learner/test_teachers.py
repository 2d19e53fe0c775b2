"""A teacher: its likeliest entries and what it thinks of each token, exact however the batch is cut."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.types.versions import FROZEN, NOT_SAMPLED
from headrace.learner import forward
from headrace.learner.head import TILES
from tests.learner import reference
from tests.learner.builders import VOCAB_SIZE, Setup, random_batch, tiny

K = 5
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("teacher") / "model", hidden_size=48, num_layers=3, seed=3)


def distiller(model_dir, teacher: dict, divergence: str = "forward", **config: object) -> Setup:
    return Setup(
        model_dir=model_dir,
        temperature=TEMPERATURE,
        algo={"loss": {"kind": "distill", "divergence": divergence}},
        config={"teachers": [teacher], "top_k": K, **config},
    )


def double_loss(student, teacher, batch, divergence: str) -> torch.Tensor:
    """Mean over the tokens of the divergence between ν and π, both lumped into ν's top K and the rest."""
    terms = []
    for part in reference.samples(batch):
        rows = torch.tensor(batch.mask_N[part])[1:]
        log_pi = reference.log_softmax(student, batch, part, TEMPERATURE)[rows]
        log_nu = reference.log_softmax(teacher, batch, part, TEMPERATURE)[rows].detach()
        top = log_nu.topk(K).indices
        pi, nu = log_pi.exp().gather(1, top), log_nu.exp().gather(1, top)
        pi, nu = (torch.cat([p, 1 - p.sum(1, keepdim=True)], 1) for p in (pi, nu))
        p, q = (nu, pi) if divergence == "forward" else (pi, nu)
        terms.append((p * (p.log() - q.log())).sum(1))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("cut", [(15, (512, 2048)), (200, (512, 2048)), (15, (3, 4))])
def test_loss_and_gradient_are_those_of_dense_distributions(model_dir, teacher_dir, monkeypatch, cut, divergence):
    budget, tiles = cut
    monkeypatch.setitem(TILES, "cpu", tiles)
    setup = distiller(model_dir, {"kind": "model", "path": str(teacher_dir)}, divergence, tokens_per_microbatch=budget)
    learner, batch = setup.learner(), random_batch(0)
    found = learner.forward_backward(batch)
    student = reference.double(model_dir)
    loss = double_loss(student, reference.double(teacher_dir), batch, divergence)
    loss.backward()
    assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in learner.model.named_parameters():
        expected = dict(student.named_parameters())[name].grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=0, atol=1e-4 * scale)


def test_a_model_whose_head_is_more_than_a_matrix_is_distilled_alike(tmp_path, teacher_dir, monkeypatch):
    """Chunk by chunk, with all their logits."""
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", 4 * VOCAB_SIZE)
    capped = tiny(tmp_path / "capped", kind="gemma2", extra={"final_logit_softcapping": 3.0})
    learner = distiller(capped, {"kind": "model", "path": str(teacher_dir)}).learner()
    batch = random_batch(0)
    expected = double_loss(reference.double(capped), reference.double(teacher_dir), batch, "forward")
    assert learner.forward_backward(batch).metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    learner = distiller(teacher_dir, {"kind": "model", "path": str(capped)}).learner()
    expected = double_loss(reference.double(teacher_dir), reference.double(capped), batch, "forward")
    assert learner.forward_backward(batch).metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)


def test_a_model_that_distils_its_own_past_is_pulled_back(model_dir):
    """The lagged teacher is the model itself at first: no loss, and none of a gradient; then the step before."""
    learner = distiller(model_dir, {"kind": "lagged"}, "reverse").learner()
    first = learner.forward_backward(random_batch(0)).metrics["loss"]
    assert first == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.02)
    assert learner.forward_backward(random_batch(0)).metrics["loss"] == pytest.approx(0, abs=1e-6)
    learner.optim_step()
    assert learner.forward_backward(random_batch(1)).metrics["loss"] > 1e-6


def test_distilling_a_teacher_makes_a_model_like_it(model_dir, teacher_dir):
    learner = distiller(model_dir, {"kind": "model", "path": str(teacher_dir)}, lr=3e-3).learner()
    losses = [learner.train(msgspec.structs.replace(random_batch(0), step=step)).metrics["loss"] for step in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_reverse_kl_credits_each_token_with_what_the_teacher_thinks_of_it(model_dir, teacher_dir):
    """As with plain advantages A + β (log ν − log μ), computed independently."""
    algo = {"loss": "grpo", "advantage": {"kind": "reverse_kl", "beta": 0.5}}
    config = {"teachers": [{"kind": "model", "path": str(teacher_dir)}], "tokens_per_microbatch": 20}
    learner = Setup(model_dir=model_dir, algo=algo, config=config).learner()
    batch = random_batch(0)
    gradient = learner.forward_backward(batch)
    found, teacher_scores_N = gradient.metrics, gradient.teacher_scores_N
    log_nu = reference.logprobs(reference.double(teacher_dir), batch, 1.0).detach().numpy()
    gap = log_nu - batch.logprobs_N[batch.mask_N]
    advantages = batch.advantages_N.copy()
    advantages[batch.mask_N] += 0.5 * np.clip(gap, -20, 20).astype(np.float32)
    plain = Setup(model_dir=model_dir, algo={"loss": "grpo"}, config={"tokens_per_microbatch": 20}).learner()
    expected = plain.forward_backward(msgspec.structs.replace(batch, advantages_N=advantages)).metrics
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["kl_teacher"] == pytest.approx(-gap.mean(), rel=1e-4)
    assert teacher_scores_N is not None
    np.testing.assert_array_equal(teacher_scores_N.known_T, batch.mask_N)
    np.testing.assert_allclose(teacher_scores_N.logprobs_T[batch.mask_N], log_nu, atol=1e-5)
    np.testing.assert_array_equal(teacher_scores_N.versions_T, np.where(batch.mask_N, FROZEN, NOT_SAMPLED))


def test_what_it_says_of_each_token_is_told_with_its_version_however_the_step_is_cut(model_dir):
    """Of the steps 3 and 4 of a teacher that is refreshed every second version: 2, and 4, which is π itself."""
    algo = {"loss": "grpo", "advantage": "reverse_kl"}
    config = {"teachers": [{"kind": "refreshed", "every": 2}], "lr": 1e-2}
    learner = Setup(model_dir=model_dir, algo=algo, config=config).learner()
    told = [learner.train(msgspec.structs.replace(random_batch(0), step=step)) for step in range(4)]
    learner.add(msgspec.structs.replace(random_batch(0), step=4))
    told.append(learner.finish())
    mask_N = random_batch(0).mask_N
    assert [set(each.teacher_scores_N.versions_T[mask_N].tolist()) for each in told] == [{0}, {0}, {2}, {2}, {4}]
    apart = [np.abs(each.teacher_scores_N.logprobs_T - each.log_pi_N)[mask_N].max() for each in told]
    assert [gap < 1e-5 for gap in apart] == [True, False, True, False, True]


def test_more_entries_than_the_vocabulary_has_are_all_of_it(model_dir, teacher_dir):
    learner = distiller(model_dir, {"kind": "model", "path": str(teacher_dir)}, top_k=999).learner()
    batch, total = random_batch(0), 0.0
    student, teacher = reference.double(model_dir), reference.double(teacher_dir)
    for part in reference.samples(batch):
        rows = torch.tensor(batch.mask_N[part])[1:]
        pi, nu = (reference.log_softmax(one, batch, part, TEMPERATURE)[rows].detach() for one in (student, teacher))
        total += float((nu.exp() * (nu - pi)).sum())
    assert learner.forward_backward(batch).metrics["loss"] == pytest.approx(total / batch.mask_N.sum(), rel=1e-4)


def test_the_version_of_a_teacher_that_is_the_models_own_past_is_told(model_dir):
    learner = distiller(model_dir, {"kind": "refreshed", "every": 2}, "reverse").learner()
    batches = [msgspec.structs.replace(random_batch(0), step=step) for step in range(5)]
    assert [learner.train(batch).metrics["teacher_version"] for batch in batches] == [0, 0, 2, 2, 4]
