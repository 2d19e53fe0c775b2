"""What is reported about the distance between what sampled and what is trained."""

import math
from dataclasses import replace

import pytest
import torch

from headrace import algo
from headrace.algo.config import AlgoConfig
from headrace.algo.metrics import add, means
from headrace.algo.objective import Objective
from tests.algo.batches import batch, sequences


def measured(seed: int = 0, **tree: object) -> dict[str, float]:
    inputs = batch(seed)
    out = Objective.build(AlgoConfig.model_validate(tree))(inputs, inputs.mask_N.float())
    return means(add([out.metrics]))


def test_distance_from_the_sampling_policy_is_split_by_cause() -> None:
    metrics = measured()
    rows = [t for sequence in sequences(batch(0)) for t in sequence]
    stale = [t["now"] > t["version"] for t in rows]
    by_cause = {"mismatch": [not old for old in stale], "stale": stale, "kl_mu": [True] * len(rows)}
    k1 = {
        name: [t["mu"] - t["pi" if name == "kl_mu" else "old"] for t, mine in zip(rows, picked, strict=True) if mine]
        for name, picked in by_cause.items()
    }
    for name, values in k1.items():
        assert metrics[f"{name}_k1"] == pytest.approx(sum(values) / len(values))
    assert metrics["staleness_k1"] == pytest.approx(metrics["stale_k1"] - metrics["mismatch_k1"])
    assert metrics["staleness_k3"] == pytest.approx(metrics["stale_k3"] - metrics["mismatch_k3"])


def test_effective_sample_size_and_chi_squared() -> None:
    metrics = measured()
    w = torch.tensor([t["pi"] - t["mu"] for s in sequences(batch(0)) for t in s]).exp().double()
    assert metrics["ess"] == pytest.approx(float(w.sum() ** 2 / (len(w) * (w**2).sum())))
    assert metrics["chi2"] == pytest.approx(float((w**2).mean() / w.mean() ** 2 - 1))


def test_staleness_is_told_only_beside_a_mismatch() -> None:
    given = {"log_pi": -torch.ones(1, 2), "log_old": -torch.ones(1, 2), "log_mu": -1.2 * torch.ones(1, 2)}
    both, stale = (
        means(algo.loss("grpo", **given, advantages=[1.0], mask=[[1, 1]], versions=[ages], version_now=3).metrics)
        for ages in ([3, 1], [2, 1])
    )
    assert both["staleness_k1"] == pytest.approx(0.0)
    assert "stale_k1" in stale
    assert "staleness_k1" not in stale


def test_mismatch_is_the_learners_and_not_that_of_the_step() -> None:
    log_pi = -torch.ones(1, 2)
    out = algo.loss("grpo", log_pi=log_pi, log_old=log_pi - 0.1, log_mu=log_pi - 0.1, advantages=[1.0], mask=[[1, 1]])
    assert float(out.metrics["mismatch_k1"]) == 0
    assert float(out.metrics["kl_mu_k1"]) == pytest.approx(-0.1)


def test_every_metric_of_a_notebook_is_a_number() -> None:
    out = algo.loss("grpo", log_pi=-torch.ones(1, 2), log_old=-torch.ones(1, 2), advantages=[1.0], mask=[[0, 0]])
    assert math.isnan(float(out.metrics["clip_frac"]))
    full = algo.loss("grpo", log_pi=-torch.ones(1, 2), log_old=-torch.ones(1, 2), advantages=[1.0], mask=[[1, 1]])
    assert (float(full.metrics["ess"]), float(full.metrics["chi2"])) == (1.0, 0.0)
    assert all(isinstance(float(metric), float) for metric in full.metrics.values())


def test_clip_fraction_is_told_by_age() -> None:
    log_pi = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    log_old = torch.tensor([[-1.0, 0.0, -1.0, -1.0]])
    out = algo.loss(
        "grpo", log_pi=log_pi, log_old=log_old, advantages=[1.0], mask=[[1, 1, 1, 1]],
        versions=[[9, 9, 5, 0]], version_now=9,
    )  # fmt: skip
    numbers = means(out.metrics)
    assert numbers["clip_frac"] == 0.75
    assert (numbers["clip_frac/age_0"], numbers["clip_frac/age_3-4"], numbers["clip_frac/age_9+"]) == (0.5, 1.0, 1.0)
    assert "clip_frac/age_1" not in numbers


def test_what_a_correction_did_is_told() -> None:
    metrics = measured(loss="grpo", correction={"kind": "icepop", "low": 0.9, "high": 1.1})
    assert 0 < metrics["correction_rejected"] < 1
    assert 0 < metrics["correction_weight"] < 1.1


def test_entropy_is_told_where_it_is_known() -> None:
    inputs = batch(0)
    assert inputs.entropy_N is not None
    assert measured()["entropy"] == pytest.approx(float(inputs.entropy_N[inputs.mask_N].mean()))
    without = Objective.build(AlgoConfig())(replace(inputs, entropy_N=None), inputs.mask_N.float())
    assert "entropy" not in without.metrics


def test_reference_divergence_is_told() -> None:
    rows = [t for s in sequences(batch(0)) for t in s]
    metrics = measured(loss={"kind": "grpo", "kl_coef": 0.1, "kl": "k1"})
    assert metrics["kl_ref"] == pytest.approx(sum(t["pi"] - t["ref"] for t in rows) / len(rows))


def test_effective_sample_size_and_divergence_are_told_by_age_and_for_sequences() -> None:
    metrics = measured()
    rows = [t for s in sequences(batch(0)) for t in s]
    for age in sorted({t["now"] - t["version"] for t in rows} & {0, 1, 2}):
        x = torch.tensor([t["pi"] - t["mu"] for t in rows if t["now"] - t["version"] == age]).double()
        w = x.exp()
        assert metrics[f"ess/age_{age}"] == pytest.approx(float(w.sum() ** 2 / (len(w) * (w**2).sum())))
        assert metrics[f"kl_mu_k3/age_{age}"] == pytest.approx(float((w - 1 - x).mean()), rel=1e-5)
    sums = [sum(t["pi"] - t["mu"] for t in s) for s in sequences(batch(0)) if s]
    w = torch.tensor(sums).double().clamp(-20, 20).exp()
    assert metrics["ess_sequences"] == pytest.approx(float(w.sum() ** 2 / (len(w) * (w**2).sum())), rel=1e-5)
