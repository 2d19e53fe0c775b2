"""Every correction against an independent float64 reference; what age does; what counts twice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.algo.base import LossInputs
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.config import validate
from headrace.base.errors import ConfigError
from tests.algo import references
from tests.algo.batches import CORRECTIONS, batch, sequences

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CORRECTIONS),
    ("tis", {"cap": 1.1}),
    ("decoupled", {"cap": 1.3}),
    ("sequence_tis", {"level": "geometric", "cap": 1.01}),
    ("icepop", {"low": 0.9, "high": 1.1, "level": "token"}),
    ("icepop", {"low": 0.8, "high": 1.4, "level": "sequence"}),
    ("icepop", {"low": 0.97, "high": 1.03, "level": "geometric"}),
    ("geometric_rejection", {"low": 0.95, "high": 1.05}),
    ("k3_rejection", {"level": "token", "high": 0.002}),
    ("k3_rejection", {"high": 0.004}),
    ("opsm", {"delta": 0.05}),
    ("outlier", {"low": 0.8, "high": 1.2}),
    ("loglinear", {"cap": 1.1}),
    ("trust_region", {"delta": 0.2, "decay": 0.7}),
    ("age", {"decay": 0.5, "max_age": 2}),
    ("top_entropy", {"fraction": 0.5}),
]


def factors(name: str, options: dict[str, Any], inputs: LossInputs) -> torch.Tensor:
    correction = validate(CORRECTIONS[name], options)
    objective = Objective.build(AlgoConfig.model_validate({"loss": "ce", "correction": [correction]}))
    prepared = objective.prepare(inputs)
    return correction(replace(inputs, selected_NP=prepared)).tokens_N[inputs.mask_N]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else str(v))
@pytest.mark.parametrize("spread", [0.3, 1.0, 8.0, 60.0])
def test_correction_equals_its_float64_reference(name: str, options: dict[str, Any], spread: float) -> None:
    inputs = batch(seed=int(spread * 10) + 1, spread=spread)
    rows = sequences(inputs)
    expected = (
        references.top_entropy(rows, **options)
        if name == "top_entropy"
        else [references.FACTORS[name](row, **options) for row in rows]
    )
    flat = torch.tensor([value for row in expected for value in row], dtype=torch.float64)
    torch.testing.assert_close(factors(name, options, inputs), flat, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_reference_case_both_keeps_and_changes_tokens(name: str) -> None:
    """A reference that a correction of ones would pass proves nothing."""
    seen = {float(x) for case, options in CASES if case == name for x in factors(name, options, batch(11))}
    assert len(seen) > 1


def test_correction_multiplies_the_loss_and_carries_no_gradient() -> None:
    inputs = batch(seed=2)
    log_pi = inputs.log_pi_N.clone().requires_grad_()
    weights = inputs.mask_N.double()
    plain = Objective.build(AlgoConfig.model_validate({"loss": "kimi", "correction": []}))
    both = Objective.build(AlgoConfig.model_validate({"loss": "kimi", "correction": ["loglinear", "opsm"]}))
    factor = factors("loglinear", {}, inputs) * factors("opsm", {}, inputs)
    out = both(replace(inputs, log_pi_N=log_pi), weights)
    out.loss.backward()
    moved = replace(inputs, log_old_N=_proximal(inputs))
    expected = plain(replace(moved, log_pi_N=(again := inputs.log_pi_N.clone().requires_grad_())), weights)
    expected.loss.backward()
    assert log_pi.grad is not None
    assert again.grad is not None
    torch.testing.assert_close(out.tokens[inputs.mask_N], factor * expected.tokens[inputs.mask_N])
    torch.testing.assert_close(log_pi.grad[inputs.mask_N], factor * again.grad[inputs.mask_N])


def _proximal(inputs: LossInputs) -> torch.Tensor:
    ages = (inputs.version_now - inputs.versions_N).double()
    alpha = torch.where(ages >= 1, (ages - 1) / ages.clamp(min=1), 0.0)
    return inputs.log_mu_N + alpha * (inputs.log_pi_N - inputs.log_mu_N)


def test_loglinear_gives_the_loss_its_old_policy() -> None:
    objective = Objective.build(AlgoConfig.model_validate({"loss": "grpo", "correction": "loglinear"}))
    assert "log_old" not in objective.columns
    inputs = batch(seed=2)
    garbage = replace(inputs, log_old_N=torch.full_like(inputs.log_old_N, -3.0))
    weights = inputs.mask_N.double()
    torch.testing.assert_close(objective(garbage, weights).tokens, objective(inputs, weights).tokens)


def test_token_of_the_version_before_is_its_own_proximal_policy() -> None:
    inputs = batch(seed=2)
    fresh = replace(inputs, versions_N=torch.full_like(inputs.versions_N, inputs.version_now - 1))
    torch.testing.assert_close(factors("loglinear", {}, fresh), torch.ones(int(inputs.mask_N.sum())).double())


@pytest.mark.parametrize(
    "tree",
    [
        {"loss": {"kind": "cispo", "anchor": "mu"}, "correction": "tis"},
        {"loss": "reinforce", "correction": "icepop"},
        {"loss": "ipo", "correction": {"kind": "decoupled"}},
        {"loss": "grpo", "correction": ["tis", "sequence_tis"]},
        {"loss": "grpo", "correction": ["loglinear", "trust_region"]},
    ],
)
def test_weighing_twice_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="twice"):
        validate(AlgoConfig, tree)


@pytest.mark.parametrize("tree", [
    {"loss": {"kind": "cispo", "anchor": "mu"}, "correction": "outlier"},
    {"loss": "grpo", "correction": ["tis", "opsm", "outlier", "age", "geometric_rejection"]},
])  # fmt: skip
def test_masks_go_with_a_weight(tree: dict[str, Any]) -> None:
    assert validate(AlgoConfig, tree).corrected
