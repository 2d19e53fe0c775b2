"""Published reference values of losses, gradients, weights and advantages, to the digits that they are given in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import algo
from headrace.algo.corrections import Tis

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
BATCH, SINGLE = GOLDEN["fixture_2x4"], GOLDEN["fixture_3"]
WHOLE = {"rtol": 0.0, "atol": 1e-6}
SIX_DIGITS = {"rtol": 1e-6, "atol": 5e-6}


def wide(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in case.items() if key not in ("loss", "grad", "tokens", "note"))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=name_of)
def test_loss_and_gradient_of_a_batch_are_the_published_ones(case: dict[str, Any]) -> None:
    options = {key: value for key, value in case.items() if key not in ("name", "loss", "grad", "note")}
    log_pi = wide(BATCH["log_pi"]).requires_grad_()
    columns = {key: BATCH[key] for key in ("log_old", "log_ref", "advantages", "mask")}
    out = algo.loss(case["name"], log_pi=log_pi, **columns, **options)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), wide(case["loss"]), **WHOLE)
    torch.testing.assert_close(log_pi.grad, wide(case["grad"]), **WHOLE)


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases_3_token_sum"] if "name" in c], ids=name_of)
def test_values_and_gradients_of_single_tokens_are_the_published_ones(case: dict[str, Any]) -> None:
    options = {key: value for key, value in case.items() if key not in ("name", "tokens", "grad")}
    log_pi = wide([SINGLE["log_pi"]]).requires_grad_()
    columns = {"log_old": [SINGLE["log_old"]], "advantages": [SINGLE["advantages"]], "mask": [[1, 1, 1]]}
    out = algo.loss(case["name"], log_pi=log_pi, reduction="sequence_mean_token_sum", **columns, **options)
    out.loss.backward()
    torch.testing.assert_close(out.tokens, wide([case["tokens"]]), **SIX_DIGITS)
    if "grad" in case:
        torch.testing.assert_close(log_pi.grad, wide([case["grad"]]), **SIX_DIGITS)


def test_truncated_weights_are_the_published_ones() -> None:
    case = next(c["weights_for_log_old_minus_log_mu"] for c in GOLDEN["cases_3_token_sum"] if "correction" in c)
    log_pi = torch.zeros(1, 3, dtype=torch.float64)
    out = algo.loss(
        "reinforce", log_pi=log_pi - 1, log_old=[case["log_ratio"]], log_mu=log_pi, advantages=[1.0],
        mask=[[1, 1, 1]], anchor="old", ratio_cap=1e9, correction=Tis(cap=2),
    )  # fmt: skip
    uncorrected = algo.loss(
        "reinforce", log_pi=log_pi - 1, log_old=[case["log_ratio"]], advantages=[1.0], mask=[[1, 1, 1]],
        anchor="old", ratio_cap=1e9,
    )  # fmt: skip
    torch.testing.assert_close(out.tokens / uncorrected.tokens, wide([case["weights"]]), **SIX_DIGITS)


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases_3_token_sum"] if "kl" in c], ids=lambda c: c["kl"])
def test_divergences_are_the_published_ones(case: dict[str, Any]) -> None:
    values = algo.kl(case["kl"], wide(SINGLE["log_pi"]), wide(SINGLE["log_old"]))
    torch.testing.assert_close(values, wide(case["tokens"]), **SIX_DIGITS)


def test_advantages_are_the_published_ones() -> None:
    first, second = GOLDEN["advantages"]
    forms = {
        "centered": ("grpo", {"std": "none"}),
        "std_ddof0": ("grpo", {"std": "ddof0"}),
        "std_ddof1_eps1e-6": ("grpo", {"std": "ddof1", "eps": 1e-6}),
        "rloo": ("rloo", {}),
    }
    for key, (name, options) in forms.items():
        right, wrong = first[key]
        expected = [right if reward else wrong for reward in first["group"]]
        assert algo.advantage(name, first["group"], **options) == pytest.approx(expected, abs=1e-6), key
    assert algo.advantage("maxrl", second["group"]) == second["maxrl"]


def test_returns_are_the_published_ones() -> None:
    case = GOLDEN["gae"]
    for gamma, lam, key in ((1, 1, "returns_g1_l1"), (0.5, 1, "returns_g.5_l1"), (1, 0.5, "returns_g1_l.5")):
        returns = algo.gae(wide(case["rewards"]), wide(case["values"]), torch.ones(3), gamma, lam).returns
        torch.testing.assert_close(returns, wide(case[key]), **WHOLE)


def test_reductions_are_the_published_ones() -> None:
    case = GOLDEN["reductions"]
    for name in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        out = algo.loss("ce", log_pi=-wide(case["x"]), advantages=[0, 0], mask=case["mask"], reduction=name)
        torch.testing.assert_close(out.loss, wide(case[name]), **WHOLE)
