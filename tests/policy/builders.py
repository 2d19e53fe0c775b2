"""A tiny model, a policy over it, samples as an engine would have made them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.models.tiny import TinySpec, make_tiny
from headrace.policy import Policy, Sample, Tokens

T = TypeVar("T")

VOCAB = "abcdefgh"
VOCAB_SIZE = len(VOCAB) + 3


def tiny(directory: Path, vocab: str = VOCAB, **spec: Any) -> Path:
    settings = {"hidden_size": 32, "intermediate_size": 48, "init_std": 0.2, **spec}
    return make_tiny(directory, TinySpec(vocab=vocab, **settings))


def load(directory: Path, **settings: Any) -> Policy:
    return Policy.load(directory, **{"lr": 1e-2, **settings})


def opened(policy: Policy, work: Callable[[Policy], Awaitable[T]]) -> T:
    """What ``work`` returns with the policy open."""

    async def run() -> T:
        async with policy:
            return await work(policy)

    return asyncio.run(run())


def made_up(num_groups: int = 3, size: int = 3, version: int = 0, seed: int = 0) -> list[list[Sample]]:
    """Samples with prompts of 1 to 4 tokens and answers of 1 to 9."""
    rng = np.random.default_rng(seed)
    return [[_made_up(rng, group, version) for _ in range(size)] for group in range(num_groups)]


def _made_up(rng: np.random.Generator, group: int, version: int) -> Sample:
    length = int(rng.integers(1, 10))
    return Sample(
        prompt=Tokens.observed(rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 5)))),
        tokens=Tokens(
            ids_T=rng.integers(3, VOCAB_SIZE, length),
            logprobs_T=-rng.uniform(0.5, 4.0, length),
            versions_T=np.full(length, version),
        ),
        group=group,
    )


def numbers_for(groups: list[list[Sample]], seed: int = 1) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(group)).tolist() for group in groups]


def get_model(policy: Policy) -> torch.nn.Module:
    return policy._learner.model


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in get_model(policy).named_parameters()}


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in get_model(policy).named_parameters() if p.grad is not None}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.int32), second[name].view(torch.int32)), name


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """1e-5 relative to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5 * scale, msg=name)
