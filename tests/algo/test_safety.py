"""What is not finite, not there, or beyond measure."""

from dataclasses import replace

import pytest
import torch

from headrace import algo
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective, usable
from headrace.base.errors import ConfigError
from tests.algo.batches import LOSSES, REDUCTIONS, batch, layout

ONES = torch.ones(2, 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_token_without_a_finite_mu_leaves_numerator_and_denominator(reduction: str, bad: float) -> None:
    log_pi = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.0, -1.5]])
    given = {"log_pi": log_pi, "log_old": log_pi + 0.1, "advantages": [1.0, -2.0], "reduction": reduction}
    broken = (log_pi + 0.2).clone()
    broken[0, 1] = bad
    mask = ONES.clone()
    mask[0, 1] = 0
    out = algo.loss("grpo", **given, log_mu=broken, mask=ONES, correction="tis")
    dropped = algo.loss("grpo", **given, log_mu=log_pi + 0.2, mask=mask, correction="tis")
    assert out.loss == dropped.loss
    assert float(out.metrics["dropped/nonfinite_logprob"]) == 1
    assert out.tokens[0, 1] == 0


def test_dropped_tokens_are_counted_within_the_mask_only() -> None:
    log_mu = torch.tensor([-1.0, float("nan"), float("inf"), float("nan")])
    mask, dropped = usable(torch.tensor([True, True, True, False]), log_mu)
    assert mask.tolist() == [True, False, False, False]
    assert {reason: int(count) for reason, count in dropped.items()} == {"nonfinite_logprob": 2}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_empty_mask_gives_zero_loss_and_gradient(loss: str, reduction: str) -> None:
    inputs = batch(seed=1)
    empty = replace(inputs, mask_N=torch.zeros_like(inputs.mask_N))
    log_pi = inputs.log_pi_N.clone().requires_grad_()
    top = inputs.log_pi_NK.clone().requires_grad_()  # type: ignore[union-attr]
    what = Objective.build(AlgoConfig.model_validate({"loss": loss, "correction": [], "reduction": reduction}))
    whole = replace(empty, log_pi_N=log_pi, log_pi_NK=top, selected_NP=what.prepare(empty))
    out = what(whole, what.weights(layout(empty)))
    out.loss.backward()
    assert out.loss == 0
    assert not any(leaf.grad is not None and leaf.grad.any() for leaf in (log_pi, top))


def test_log_ratios_are_clamped_before_they_are_exponentiated() -> None:
    out = algo.loss("grpo", log_pi=torch.zeros(1, 1), log_old=torch.full((1, 1), -1e4), advantages=[-1.0], mask=[[1]])
    assert float(out.loss) == pytest.approx(float(torch.tensor(20.0).exp()))


def test_selection_that_was_not_prepared_is_refused() -> None:
    inputs = replace(batch(seed=1), selected_NP=None)
    what = Objective.build(AlgoConfig.model_validate({"loss": "m2po"}))
    with pytest.raises(ConfigError, match="'selected', which is missing"):
        what(inputs, inputs.mask_N.float())
