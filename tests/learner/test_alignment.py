"""The cosine between the gradients of two updates is bounded, as a second writing in float64 computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.base.config import validate
from headrace.base.errors import CheckpointError, ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.learner.alignment import AlignmentConfig, GradientProducts
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerCore
from headrace.learner.memory import compute_sizes
from headrace.learner.optim import PIECE, inner_product
from headrace.models import ModelConfig, load_model
from tests.learner.builders import Setup, assert_same_bits, random_batch, weights
from tests.learner.test_agents import Build, of_roles

LOW = 0.05
NEVER = {"low": 0.999999}
"""A bound that no two gradients of the tests reach."""
SMALL = {"tokens_per_microbatch": 20, "lr": 1e-3}


def learner_of(model_dir, alignment: dict[str, float] | None, **setup: Any) -> LearnerCore:
    config = {**SMALL, "alignment": alignment, **setup.pop("config", {})}
    return Setup(model_dir=model_dir, config=config, **setup).learner()


def again(step: int, sign: float = 1.0) -> Batch:
    """The batch of step 0 once more: its gradient points where that of step 0 did, or against it."""
    batch = random_batch(0)
    return replace(batch, step=step, advantages_N=(sign * batch.advantages_N).astype(np.float32))


def record_gradients(learner: LearnerCore, monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """Return a list to which each update adds two gradients in float64: as computed, and as it comes to be clipped."""
    found: list[list[np.ndarray]] = []
    optimizer, model = learner._optimizer, learner._auxiliary[-1]
    before_clip, clip_norms = model.before_clip, optimizer.clip_norms

    def flat() -> np.ndarray:
        masters = [one.master for one in optimizer.trained]
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in masters]
        return torch.cat([part.reshape(-1) for part in parts]).double().numpy()

    def record_raw() -> dict[str, float]:
        found.append([flat()])
        return before_clip()

    def record_used(max_norm: float) -> dict[str, float]:
        found[-1].append(flat())
        return clip_norms(max_norm)

    monkeypatch.setattr(model, "before_clip", record_raw)
    monkeypatch.setattr(optimizer, "clip_norms", record_used)
    return found


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def projected(gradient: np.ndarray, earlier: np.ndarray, low: float) -> np.ndarray:
    """The part of a gradient that is orthogonal to the earlier one, and of that one as much as the bound allows."""
    unit = earlier / np.linalg.norm(earlier)
    orthogonal = gradient - (gradient @ unit) * unit
    return orthogonal + np.tan(np.pi / 2 - np.arccos(low)) * np.linalg.norm(orthogonal) * unit


@pytest.mark.parametrize("low", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("common", [0.2, 1.0, 30.0])
def test_projection_is_the_closed_form_and_leaves_the_bound_as_the_cosine(low, common):
    rng = np.random.default_rng(0)
    earlier = rng.normal(size=1000)
    gradient = rng.normal(size=1000) + common * earlier
    config = AlignmentConfig(low=low)
    added = config.decide(GradientProducts(gradient @ gradient, gradient @ earlier, earlier @ earlier)).added
    if cosine(gradient, earlier) <= low:
        assert added == 0
        return
    np.testing.assert_allclose(gradient + added * earlier, projected(gradient, earlier, low), rtol=0, atol=1e-9)
    assert cosine(gradient + added * earlier, earlier) == pytest.approx(low, abs=1e-9)


def test_equal_gradients_leave_nothing_and_zeros_are_not_aligned():
    config = AlignmentConfig()
    assert config.decide(GradientProducts(own=4.0, cross=4.0, earlier=4.0)).added == -1
    for products in ((0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, -1.0, 1.0)):
        decision = AlignmentConfig(low=0.0, high=0.1).decide(GradientProducts(*products))
        assert (decision.added, decision.skipped) == (0, False)


def test_inner_product_of_many_numbers_is_that_of_float64():
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, PIECE // 2 + 3, generator=rng) for _ in range(2))
    expected = float((first.double() * second.double()).sum())
    assert float(inner_product(first, second)) == pytest.approx(expected, rel=1e-12)
    assert float(inner_product(first[:, :0], second[:, :0])) == 0.0


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"config": {"optimizer": {"kind": "muon"}}},
        {"dtype": "bfloat16"},
        {"config": {"memory": {"offload_optimizer": True}}},
        {"lora": {"rank": 4}},
    ],
    ids=["adamw", "muon", "masters", "offload", "lora"],
)
def test_gradient_of_an_update_is_bounded_by_the_raw_one_of_the_update_before(model_dir, monkeypatch, setup):
    learner = learner_of(model_dir, {"low": LOW}, **setup)
    found = record_gradients(learner, monkeypatch)
    metrics = [learner.train(again(step)).metrics for step in range(3)]
    (first, used_first), (second, used_second), (third, used_third) = found
    np.testing.assert_array_equal(used_first, first)
    assert "grad_alignment" not in metrics[0]
    for gradient, used, earlier, measured in (
        (second, used_second, first, metrics[1]),
        (third, used_third, second, metrics[2]),
    ):
        assert cosine(gradient, earlier) > 0.5
        assert measured["grad_alignment"] == pytest.approx(cosine(gradient, earlier), rel=1e-9)
        assert measured["grad_projected"] == 1
        assert measured["grad_skipped"] == 0
        expected = projected(gradient, earlier, LOW)
        np.testing.assert_allclose(used, expected, rtol=0, atol=1e-6 * np.abs(gradient).max())
        assert cosine(used, earlier) == pytest.approx(LOW, abs=1e-5)
        assert measured["grad_norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_below_the_bound_or_against_each_other_are_used_bit_for_bit(model_dir, sign):
    plain = learner_of(model_dir, None)
    watched = learner_of(model_dir, NEVER if sign > 0 else {"low": 0.0, "high": 0.5})
    for step in range(3):
        batch = again(step, sign**step)
        expected, found = plain.train(batch).metrics, watched.train(batch).metrics
        assert found["grad_norm"] == expected["grad_norm"]
        assert found.get("grad_projected", 0) == found.get("grad_skipped", 0) == 0
    assert found["grad_alignment"] * sign > 0.5
    assert_same_bits(weights(plain), weights(watched))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradient_above_the_upper_bound_updates_no_weight_and_is_kept(model_dir, monkeypatch, kind):
    learner = learner_of(model_dir, {"low": 0.1, "high": 0.5}, config={"optimizer": {"kind": kind}})
    found = record_gradients(learner, monkeypatch)
    learner.train(again(0))
    before, updates = weights(learner), learner._optimizer.updates
    metrics = learner.train(again(1)).metrics
    assert (metrics["grad_skipped"], metrics["grad_projected"], metrics["grad_norm"]) == (1, 0, 0)
    assert (learner.version, learner._optimizer.updates) == (2, updates)
    assert_same_bits(weights(learner), before)
    metrics = learner.train(random_batch(2)).metrics
    assert metrics["grad_alignment"] == pytest.approx(cosine(found[2][0], found[1][0]), rel=1e-9)
    assert learner._optimizer.updates == updates + 1


@pytest.mark.parametrize(
    "setup",
    [{}, {"config": {"optimizer": {"kind": "muon"}}}, {"dtype": "bfloat16"}, {"lora": {"rank": 4}}],
    ids=["adamw", "muon", "masters", "lora"],
)
def test_resumed_learner_compares_with_the_gradient_before_the_snapshot(model_dir, tmp_path, setup):
    first, second = (learner_of(model_dir, {"low": LOW}, **setup) for _ in range(2))
    first.train(again(0))
    first.save(tmp_path)
    second.restore(tmp_path)
    for step in (1, 2):
        expected, found = (learner.train(again(step)).metrics for learner in (first, second))
        assert expected["grad_projected"] == 1
        for name in ("grad_alignment", "grad_norm", "loss"):
            assert found[name] == expected[name]
    for name, weight in weights(first).items():
        assert torch.equal(weight, weights(second)[name]), name


def test_snapshot_before_the_first_update_holds_no_gradient(model_dir, tmp_path):
    first, second = (learner_of(model_dir, {"low": LOW}) for _ in range(2))
    first.save(tmp_path)
    second.restore(tmp_path)
    assert "grad_alignment" not in second.train(again(0)).metrics


def test_snapshot_of_a_run_without_these_settings_is_refused(model_dir, tmp_path):
    learner_of(model_dir, None).save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no alignment that these settings can use"):
        learner_of(model_dir, {"low": LOW}).restore(tmp_path)


def test_update_that_failed_is_not_compared_with_itself(model_dir, monkeypatch):
    learner = learner_of(model_dir, {"low": LOW})
    learner.train(again(0))
    allocate = learner._optimizer.allocate
    monkeypatch.setattr(learner._optimizer, "allocate", lambda: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(RunError, match="step 1 does not fit in memory"):
        learner.train(again(1))
    monkeypatch.setattr(learner._optimizer, "allocate", allocate)
    assert "grad_alignment" not in learner.train(again(1)).metrics
    assert "grad_alignment" in learner.train(again(2)).metrics


def test_gradient_that_is_not_finite_is_not_kept(model_dir):
    learner = learner_of(model_dir, {"low": LOW})
    learner.train(again(0))
    learner.forward_backward(again(1))
    learner._optimizer.trained[0].master.grad.fill_(torch.inf)
    with pytest.raises(RunError, match="the global gradient norm is inf"):
        learner.optim_step()
    assert learner.train(again(1)).metrics["grad_alignment"] > 0.5


def test_updates_of_one_batch_are_compared_with_each_other(model_dir):
    algo = {"bundle": "grpo", "epochs": 2, "old": "engine"}
    metrics = learner_of(model_dir, {"low": LOW}, algo=algo).train(again(0)).metrics
    assert metrics["updates"] == 2
    assert metrics["grad_alignment"] > 0.5
    assert metrics["grad_projected"] == 1


def test_each_agent_is_compared_with_its_own_last_gradient(model_dir):
    learner = Build(model_dir)(("proposer", "solver"), lr=1e-4, alignment={"low": LOW})
    first, other = of_roles(0, "", "solver"), of_roles(0, "proposer")
    assert not any("grad_alignment" in name for name in learner.train(first).metrics)
    assert not any("grad_alignment" in name for name in learner.train(replace(other, step=1)).metrics)
    metrics = learner.train(replace(first, step=2)).metrics
    assert metrics["grad_alignment"] > 0.5
    assert metrics["agent/solver/grad_alignment"] > 0.5
    assert metrics["agent/solver/grad_projected"] == 1
    assert "agent/proposer/grad_alignment" not in metrics


def test_kept_gradient_counts_in_the_estimate_of_memory(model_dir):
    model = load_model(ModelConfig(path=str(model_dir)))
    without, compared = (
        compute_sizes(model, LearnerConfig(alignment=alignment)).footprint() for alignment in (None, AlignmentConfig())
    )
    assert compared.total_bytes - without.total_bytes == 4 * sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"low": 0.5, "high": 0.5}, "learner.alignment.high=0.5 is not above learner.alignment.low=0.5: no gradient"),
        ({"low": 1.0}, "alignment.low=1.0: input should be less than 1"),
        ({"low": -0.1}, "alignment.low=-0.1: input should be greater than or equal to 0"),
        ({"most": 0.5}, "alignment.most is not a setting"),
    ],
)
def test_bounds_without_a_meaning_are_refused_by_their_names(table, problem):
    with pytest.raises(ConfigError) as refused:
        validate(LearnerConfig, {"alignment": table})
    assert refused.value.problem.startswith(problem)
