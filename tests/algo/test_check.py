"""The contract suite for the user's own losses: what is right passes, each fault fails the clause that names it."""

import os
from pathlib import Path

import pytest
import torch

from headrace import algo
from headrace.algo.check import check_loss
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.config import validate
from headrace.base.errors import ConfigError, DataError

GOOD = """
from headrace.algo.base import TokenLoss

def reinforce(inputs, cap=2.0):
    ratio = inputs.log_ratio_N("mu").detach().exp().clamp(max=cap)
    return -ratio * inputs.advantages_N * inputs.log_pi_N

def with_metrics(inputs):
    return TokenLoss(tokens_N=-inputs.advantages_N * inputs.log_pi_N)

def under_no_grad(inputs):
    with torch.no_grad():
        weight = inputs.log_ratio_N().exp()
        weight[weight > 2] = 2
        weight.mul_(0.5)
    return -weight * inputs.advantages_N * inputs.log_pi_N

@torch.no_grad()
def weight_of(inputs):
    return inputs.mean_S(inputs.log_ratio_N()).exp()[inputs.samples_N].clamp(max=2)

def by_a_decorated_function(inputs):
    return -weight_of(inputs) * inputs.advantages_N * inputs.log_pi_N

def by_free_detach(inputs):
    return -torch.detach(inputs.log_ratio_N()).exp() * inputs.advantages_N * inputs.log_pi_N

def by_data(inputs):
    return -(inputs.log_pi_N.data - inputs.log_old_N).clamp(-9, 9).exp() * inputs.advantages_N * inputs.log_pi_N

def by_number(inputs):
    weights = [min(max(x, -9), 9) for x in (inputs.log_pi_N - inputs.log_old_N).tolist()]
    return -inputs.log_pi_N.new_tensor(weights).exp() * inputs.advantages_N * inputs.log_pi_N

class Callable_:
    def __call__(self, inputs):
        return -inputs.advantages_N * inputs.log_pi_N

an_object = Callable_()
"""
RIGHT = [
    "reinforce", "with_metrics", "under_no_grad", "by_a_decorated_function", "by_free_detach", "by_data", "by_number",
    "an_object",
]  # fmt: skip

WRONG_BACKWARD = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
"""

FAULTS = {
    "cutting the batch changes nothing": "return (x - x.mean()) * inputs.log_pi_N.mean()",
    "the gradient is the derivative of the value": "return Twice.apply(x)",
    "the gradient is not zero everywhere": "return x.detach() + 0 * x",
    "one value per token": "return x[:, None]",
    "the order of samples changes nothing": "return x * torch.arange(len(x))",
    "ratios far off stay finite": "return (inputs.log_pi_N - inputs.log_old_N).exp()",
    "values are finite": "return x / 0.0",
    "an empty mask gives zero": "return x * (1 if len(x) else 1 / 0)",
}


def write(folder: Path, code: str) -> str:
    path = folder / "my_losses.py"
    path.write_text("import torch\n" + code)
    return str(path)


@pytest.mark.parametrize("name", RIGHT)
def test_right_loss_of_the_user_passes(tmp_path: Path, name: str) -> None:
    report = check_loss(f"{write(tmp_path, GOOD)}:{name}")
    assert report.ok, str(report)
    assert "keeps the contract" in str(report)


@pytest.mark.parametrize("clause", FAULTS)
def test_fault_fails_the_clause_that_names_it(tmp_path: Path, clause: str) -> None:
    code = f"def wrong(inputs):\n    x = -inputs.advantages_N * inputs.log_pi_N\n    {FAULTS[clause]}\n"
    report = check_loss(f"{write(tmp_path, WRONG_BACKWARD + code)}:wrong")
    assert not report.ok
    failed = [finding.clause for finding in report.findings if not finding.holds]
    assert clause in failed, str(report)
    assert "FAIL" in str(report)
    fixed = next(finding.detail for finding in report.findings if finding.clause == clause)
    assert clause != "ratios far off stay finite" or "headrace.algo.base.log_ratio" in fixed
    assert clause != "one value per token" or ("(24, 1)" in fixed and "(24,)" in fixed)


def test_error_of_the_user_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "def wrong(inputs):\n    return inputs.no_such_column\n")
    report = check_loss(f"{path}:wrong")
    assert "AttributeError" in report.findings[0].detail
    assert "at my_losses.py:3" in report.findings[0].detail


def test_loss_says_which_columns_it_reads(tmp_path: Path) -> None:
    path = write(tmp_path, "def near(inputs):\n    return (inputs.log_pi_N - inputs.log_ref_N).clamp(-9, 9).square()\n")
    undeclared = check_loss(f"{path}:near")
    assert not undeclared.ok
    assert "needs = ['log_ref']" in undeclared.findings[0].detail
    assert check_loss(f"{path}:near", options={"needs": ["log_ref"]}).ok
    config = validate(AlgoConfig, {"loss": {"kind": "custom", "ref": f"{path}:near", "needs": ["log_ref", "entropy"]}})
    assert Objective.build(config).columns >= {"log_ref", "entropy"}


def test_gradient_through_the_entropies_is_checked_too(tmp_path: Path) -> None:
    path = write(tmp_path, "def bonus(inputs):\n    return -inputs.entropy_N\n")
    assert check_loss(f"{path}:bonus", options={"needs": "entropy"}).ok


def test_check_takes_options(tmp_path: Path) -> None:
    path = write(tmp_path, "def scaled(inputs, by):\n    return -inputs.advantages_N * inputs.log_pi_N * by\n")
    assert check_loss(f"{path}:scaled", options={"by": 2.0}).ok
    with pytest.raises(ConfigError, match="takes"):
        check_loss(f"{path}:scaled")
    with pytest.raises(ConfigError, match="takes"):
        check_loss(f"{path}:scaled", options={"bye": 2.0})
    assert check_loss("grpo", options={"clip_low": 0.1}).ok
    with pytest.raises(ConfigError, match="no option 'clip_lo'"):
        check_loss("grpo", options={"clip_lo": 0.1})


def test_edited_file_is_read_again(tmp_path: Path) -> None:
    given = {"log_pi": -torch.ones(1, 1), "log_old": -torch.ones(1, 1), "advantages": [1.0], "mask": [[1]]}
    for factor in (2, 3):
        ref = f"{write(tmp_path, f'def f(inputs): return -{factor} * inputs.log_pi_N')}:f"
        os.utime(tmp_path / "my_losses.py", ns=(factor, factor))
        assert float(algo.loss(ref, **given, log_mu=-torch.ones(1, 1)).loss) == factor


@pytest.mark.parametrize(
    ("returned", "problem"),
    [("x.mean()", r"shape \(\), its inputs have \(2,\)"), ("x[None]", r"shape \(1, 2\)"), ("None", "a NoneType")],
)
def test_value_of_another_shape_is_refused_with_both(tmp_path: Path, returned: str, problem: str) -> None:
    path = write(tmp_path, f"def f(inputs):\n    x = -inputs.log_pi_N\n    return {returned}\n")
    column = -torch.ones(1, 2)
    with pytest.raises(DataError, match=problem):
        algo.loss(f"{path}:f", log_pi=column, log_old=column, log_mu=column, advantages=[1.0], mask=[[1, 1]])


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
    with pytest.raises(ConfigError, match=r"cannot be imported: ValueError: oh at broken\.py:1"):
        check_loss(f"{broken}:f").findings[0]
