"""The contract suite for the user's own losses: what is right passes, each fault fails the clause that names it."""

from pathlib import Path

import pytest
import torch

from headrace import algo
from headrace.algo.check import check_loss
from headrace.algo.config import AlgoConfig
from headrace.config import validate
from headrace.errors import ConfigError

GOOD = """
from headrace.algo.base import TokenLoss

def reinforce(inputs, cap=2.0):
    ratio = inputs.log_ratio_N("mu").detach().exp().clamp(max=cap)
    return -ratio * inputs.advantages_N * inputs.log_pi_N

def with_metrics(inputs):
    return TokenLoss(tokens_N=-inputs.advantages_N * inputs.log_pi_N)
"""

FAULTS = {
    "cutting the batch changes nothing": "return (x - x.mean()) * inputs.log_pi_N.mean()",
    "the gradient is the derivative of the value": "with torch.no_grad(): y = x.exp()\n    return y * x",
    "the order of samples changes nothing": "return x * torch.arange(len(x))",
    "ratios far off stay finite": "return (inputs.log_pi_N - inputs.log_old_N).exp()",
    "values are finite": "return x / 0.0",
    "an empty mask gives zero": "return x * (1 if len(x) else 1 / 0)",
}


def write(folder: Path, code: str) -> str:
    path = folder / "my_losses.py"
    path.write_text("import torch\n" + code)
    return str(path)


@pytest.mark.parametrize("name", ["reinforce", "with_metrics"])
def test_right_loss_of_the_user_passes(tmp_path: Path, name: str) -> None:
    report = check_loss(f"{write(tmp_path, GOOD)}:{name}")
    assert report.ok, str(report)
    assert "keeps the contract" in str(report)


@pytest.mark.parametrize("clause", FAULTS)
def test_fault_fails_the_clause_that_names_it(tmp_path: Path, clause: str) -> None:
    code = f"def wrong(inputs):\n    x = -inputs.advantages_N * inputs.log_pi_N\n    {FAULTS[clause]}\n"
    report = check_loss(f"{write(tmp_path, code)}:wrong")
    assert not report.ok
    failed = [finding.clause for finding in report.findings if not finding.holds]
    assert clause in failed, str(report)
    assert "FAIL" in str(report)


def test_error_of_the_user_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "def wrong(inputs):\n    return inputs.no_such_column\n")
    report = check_loss(f"{path}:wrong")
    assert "AttributeError" in report.findings[0].detail


def test_custom_loss_runs_with_its_options(tmp_path: Path) -> None:
    ref = f"{write(tmp_path, GOOD)}:reinforce"
    given = {
        "log_pi": -torch.ones(1, 2),
        "log_old": torch.tensor([[-2.0, -1.0]]),
        "log_mu": torch.tensor([[-3.0, -1.0]]),
    }
    ours = algo.loss(ref, **given, advantages=[1.0], mask=[[1, 1]], options={"cap": 1.5})
    theirs = algo.loss("reinforce", **given, advantages=[1.0], mask=[[1, 1]], ratio_cap=1.5)
    assert ours.loss == theirs.loss
    config = validate(AlgoConfig, {"loss": {"kind": "custom", "ref": ref, "anchor": "mu", "options": {"cap": 1.5}}})
    assert config.correction == ()
    assert [part.kind for part in validate(AlgoConfig, {"loss": ref}).correction] == ["tis"]


def test_reference_that_names_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="no function 'reinforse'"):
        algo.loss(
            f"{path}:reinforse", log_pi=-torch.ones(1, 1), log_old=-torch.ones(1, 1), advantages=[1.0], mask=[[1]]
        )
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('oh')")
    with pytest.raises(ConfigError, match="cannot be loaded: ValueError: oh"):
        check_loss(f"{broken}:f").findings[0]
