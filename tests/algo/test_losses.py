"""Every loss against an independent float64 reference, near the clip and far outside; and against its contract."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import algo
from headrace.algo.check import check_loss
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.supervised import Distill
from headrace.algo.objective import Objective
from headrace.base.config import Section, validate
from tests.algo import references
from tests.algo.batches import LOSSES, batch, groups, sequences

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 2.0}),
    ("grpo", {"ratio_cap": 1.1}),
    ("grpo", {"ratio_cap": 1.5}),
    ("grpo", {"ratio_cap": 4.0, "dual_clip": 3.0}),
    ("grpo", {"ratio_cap": 0.7}),
    ("grpo", {"ratio_cap": 1.1, "clip_high": 0.9, "dual_clip": 1.5}),
    ("dapo", {"clip_high": 0.5}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("gspo_token", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("cispo", {"anchor": "mu", "clip_high": 0.3}),
    ("cispo", {"two_sided": True, "clip_low": 0.3, "clip_high": 0.2}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("vespo", {"anchor": "old"}),
    ("reinforce", {"ratio_cap": 1.1, "anchor": "old"}),
    ("topr", {"anchor": "old"}),
    ("kimi", {"tau": 1.0}),
    ("dro", {"beta": 1.0}),
    ("dppo", {"anchor": "mu", "delta": 0.05, "ratio_cap": 1.2}),
    ("dppo", {"anchor": "mu", "delta": 0.05, "ratio_cap": 1e9, "kl_tau": 0.3}),
    ("ipo", {"delta": 0.02, "tau": 0.5}),
    ("aspo", {"clip_low": 0.1, "dual_clip": 1.5}),
    ("ref_kl", {"kl": "k1"}),
    ("ref_kl", {"kl": "k2", "unbiased_kl": True}),
    ("m2po", {"threshold": 0.01, "anchor": "old"}),
    ("clip_cov", {"fraction": 0.2}),
    ("kl_cov", {"fraction": 0.3, "beta": 0.7}),
    ("dpo", {"beta": 0.5}),
]
CASES = [(name, {}) for name in LOSSES if name != "distill"] + VARIANTS


def case_id(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def build(name: str, options: dict[str, Any]) -> Section:
    return validate(LOSSES[name], options)


@pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)
@pytest.mark.parametrize("spread", [0.3, 1.0, 8.0, 60.0])
def test_loss_equals_its_float64_reference(name: str, options: dict[str, Any], spread: float) -> None:
    inputs = batch(seed=int(spread * 10), spread=spread)
    objective = Objective.build(AlgoConfig(loss=build(name, options), correction=()))
    tokens = objective(replace(inputs, selected_NP=objective.prepare(inputs)), inputs.mask_N.double()).tokens
    rows = sequences(inputs)
    if name in references.BATCHES:
        expected = references.BATCHES[name](rows, **options)
    else:
        expected = [references.TOKENS[name](row, **options) for row in rows]
    flat = torch.tensor([value for row in expected for value in row], dtype=torch.float64)
    torch.testing.assert_close(tokens[inputs.mask_N], flat, rtol=1e-9, atol=1e-9)


DISTILL: list[tuple[str, dict[str, Any]]] = [("distill", {"divergence": d}) for d in ("reverse", "forward", "jsd")]


@pytest.mark.parametrize(("name", "options"), [*CASES, *DISTILL], ids=case_id)
def test_loss_keeps_its_contract(name: str, options: dict[str, Any]) -> None:
    report = check_loss(build(name, options), seed=3)
    assert report.ok, str(report)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_penalties_are_added_outside_the_correction(kl: str, unbiased: bool) -> None:
    inputs = batch(seed=5)
    plain = AlgoConfig.model_validate({"loss": "kimi", "correction": "tis"})
    terms = {"kind": "kimi", "kl_coef": 0.3, "kl": kl, "unbiased_kl": unbiased, "entropy_coef": 0.2}
    full = AlgoConfig.model_validate({"loss": terms, "correction": "tis"})
    weights = inputs.mask_N.double()
    added = Objective.build(full)(inputs, weights).tokens - Objective.build(plain)(inputs, weights).tokens
    rows = [t for sequence in sequences(inputs) for t in sequence]
    expected = [0.3 * references.ref_kl(t, kl, unbiased) - 0.2 * t["entropy"] for t in rows]
    torch.testing.assert_close(added[inputs.mask_N], torch.tensor(expected, dtype=torch.float64))


def test_penalised_loss_keeps_its_contract() -> None:
    report = check_loss(build("dapo", {"kl_coef": 0.5, "unbiased_kl": True, "entropy_coef": 0.1}))
    assert report.ok, str(report)


def test_entropy_bonus_reaches_the_entropies() -> None:
    inputs = batch(seed=1)
    entropy = inputs.entropy_N.clone().requires_grad_()  # type: ignore[union-attr]
    objective = Objective.build(AlgoConfig.model_validate({"loss": {"kind": "dapo", "entropy_coef": 0.25}}))
    weights = inputs.mask_N.double() / 7
    objective(replace(inputs, entropy_N=entropy), weights).loss.backward()
    torch.testing.assert_close(entropy.grad, -0.25 * weights)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_distillation_measures_the_whole_distribution(divergence: str) -> None:
    torch.manual_seed(0)
    log_pi, log_nu = (torch.randn(4, 9, dtype=torch.float64).log_softmax(1) for _ in range(2))
    beta = 0.3 if divergence == "jsd" else 0.5
    loss = Distill(divergence=divergence, beta=beta)  # type: ignore[arg-type]
    inputs = batch(seed=0, num_samples=2, length=2)
    taken = log_nu.topk(4).indices
    top = {"log_pi_NK": log_pi.gather(1, taken), "log_nu_NK": log_nu.gather(1, taken)}
    value = loss(replace(inputs, **top)).tokens_N
    p, q = ([*row.exp().tolist(), 1 - float(row.exp().sum())] for row in (top["log_nu_NK"][0], top["log_pi_NK"][0]))
    mixed = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    expected = {
        "forward": _kl(p, q), "reverse": _kl(q, p), "jsd": beta * _kl(p, mixed) + (1 - beta) * _kl(q, mixed)
    }  # fmt: skip
    assert float(value[0]) == pytest.approx(expected[divergence], rel=1e-6)


def _kl(p: list[float], q: list[float]) -> float:
    return float(sum(a * (torch.tensor(a).double() / b).log() for a, b in zip(p, q, strict=True)))


def test_distillation_of_a_teacher_by_itself_is_zero() -> None:
    inputs = batch(seed=0)
    same = replace(inputs, log_nu_NK=inputs.log_pi_NK)
    for divergence in ("forward", "reverse", "jsd"):
        tokens = Distill(divergence=divergence)(same).tokens_N
        torch.testing.assert_close(tokens, torch.zeros_like(tokens))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("advantages", [[0.1] * 3, [1.0, -1.0, 1.0]])
def test_tokens_that_would_not_lower_the_entropy_are_not_chosen(name: str, advantages: list[float]) -> None:
    """Neither for lack of another, nor by rounding."""
    log_pi = -0.1 * torch.tensor([[7.0, 5.0], [1.0, 2.0], [6.0, 7.0]])
    given: dict[str, Any] = {"log_pi": log_pi, "log_old": log_pi + 0.3, "mask": torch.ones(3, 2)}
    out = algo.loss(name, **given, advantages=advantages, reduction="token_mean", fraction=0.5)
    plain = algo.loss("grpo", **given, advantages=advantages, reduction="token_mean", clip_low=1.0, clip_high=9.0)
    if name == "kl_cov":
        assert out.loss == plain.loss
    else:
        assert torch.equal(out.tokens, algo.loss("grpo", **given, advantages=advantages).tokens)


def test_pair_that_lost_a_side_is_dropped_and_counted() -> None:
    log_pi = -torch.tensor([[1.0, 2.0], [1.5, 1.0], [0.5, 2.0], [3.0, 1.0]], dtype=torch.float64)
    log_mu = log_pi.clone()
    log_mu[1] = torch.nan
    given: dict[str, Any] = {"log_ref": log_pi - 0.5, "advantages": [1, -1, 1, -1], "mask": torch.ones(4, 2)}
    leaf = log_pi.clone().requires_grad_()
    out = algo.loss("dpo", log_pi=leaf, log_mu=log_mu, **given)
    out.loss.backward()
    assert float(out.metrics["dpo_dropped"]) == 0.5
    assert not out.tokens[:2].any()
    assert leaf.grad is not None
    assert not leaf.grad[:2].any()
    assert leaf.grad[2:].all()


def test_groups_of_the_batch_are_pairs() -> None:
    assert groups(batch(seed=0)).tolist() == [0, 0, 1, 1, 2, 2]
