"""A policy whose engine does not compute its learner's model is not opened."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

from headrace.base.errors import RunError
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.policy import Policy


def spoil(policy: Policy, factor: float) -> None:
    """The engine's last norm gives more than the learner's: after the engine has shown itself right."""
    norm: Any = policy._core._model.get_submodule("model.norm")
    inner = norm.forward
    norm.forward = lambda x: inner(x) * factor


async def opened(policy: Policy) -> int:
    async with policy:
        (group,) = await policy.sample(["ab"], max_new_tokens=3)
    return len(group)


@pytest.mark.parametrize("deterministic", [False, True])
def test_engine_with_another_norm_is_refused(model_dir: Any, deterministic: bool) -> None:
    if deterministic and isinstance(kernels(), Unavailable):
        pytest.skip("no kernels here")
    policy = Policy.load(model_dir, model={"deterministic": deterministic}, device="cpu")
    spoil(policy, 1.2)
    with pytest.raises(RunError, match="do not compute the same model") as refused:
        asyncio.run(opened(policy))
    assert re.search(r"largest is \S+ at token \d+ of a sequence of \d+", refused.value.problem)
    assert "kernels" in refused.value.remedy


@pytest.mark.skipif(isinstance(kernels(), Unavailable), reason="no kernels here")
def test_deterministic_policy_allows_no_gap_at_all(model_dir: Any) -> None:
    healthy = Policy.load(model_dir, model={"deterministic": True}, device="cpu")
    assert asyncio.run(opened(healthy)) == 1
    policy = Policy.load(model_dir, model={"deterministic": True}, device="cpu")
    spoil(policy, 1 + 2e-6)
    with pytest.raises(RunError, match="rounding explains 0;"):
        asyncio.run(opened(policy))


def test_healthy_policy_in_bfloat16_is_opened(model_dir: Any) -> None:
    assert asyncio.run(opened(Policy.load(model_dir, model={"dtype": "bfloat16"}, device="cpu"))) == 1


def test_policy_that_trained_before_it_was_opened_is_compared_with_the_weights_it_has(model_dir: Any) -> None:
    policy = Policy.load(model_dir, lr=1e-1, device="cpu")
    samples = policy.demonstrations(["ab"], ["ba"])
    policy.forward_backward(samples, [1.0], loss="ce")
    policy.optim_step()
    assert asyncio.run(opened(policy)) == 1
    assert torch.isfinite(next(iter(policy._learner.model.parameters()))).all()
