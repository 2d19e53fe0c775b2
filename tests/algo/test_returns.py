"""GAE and the critic's loss."""

import pytest
import torch
from torch import Tensor

from headrace import algo
from headrace.algo.returns import value_loss
from headrace.base.errors import ConfigError


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_advantages_are_the_discounted_sum_of_errors() -> None:
    rewards, values, gamma, lam = normal(6), normal(7)[:6], 0.9, 0.7
    following = torch.cat([values[1:], torch.zeros(1)])
    errors = rewards + gamma * following - values
    expected = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, 6)) for t in range(6)]
    out = algo.gae(rewards, values, torch.ones(6), gamma, lam)
    torch.testing.assert_close(out.advantages, torch.stack(expected))
    torch.testing.assert_close(out.returns, out.advantages + values)


def test_observations_and_padding_are_no_steps() -> None:
    rewards, values = normal(3), normal(4)[:3]
    plain = algo.gae(rewards, values, torch.ones(3), 0.9, 0.8)
    at = torch.tensor([1, 2, 5])
    mask = torch.zeros(7, dtype=torch.bool)
    mask[at] = True
    wide_rewards, wide_values = torch.full((7,), 1e9).double(), torch.full((7,), -1e9).double()
    wide_rewards[at], wide_values[at] = rewards, values
    wide = algo.gae(wide_rewards, wide_values, mask, 0.9, 0.8)
    torch.testing.assert_close(wide.advantages[at], plain.advantages)
    torch.testing.assert_close(wide.returns[at], plain.returns)
    assert not wide.advantages[~mask].any()
    assert not wide.returns[~mask].any()


def test_whole_numbers_and_lists_give_floats() -> None:
    expected = algo.gae(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.ones(3), 0.5)
    for rewards, values in (([1, 2, 3], [1, 1, 1]), (torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))):
        assert torch.equal(algo.gae(rewards, values, [1, 1, 1], 0.5).advantages, expected.advantages)
    with pytest.raises(ConfigError, match="mask is missing"):
        algo.gae([1.0], [1.0], None)


def test_sequences_of_a_batch_do_not_meet() -> None:
    rewards, values = normal(2, 5), normal(5, 2).T
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]])
    both = algo.gae(rewards, values, mask, 0.95, 0.9)
    for b in range(2):
        torch.testing.assert_close(both.advantages[b], algo.gae(rewards[b], values[b], mask[b], 0.95, 0.9).advantages)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma=1\.5"):
        algo.gae(normal(2), normal(2), torch.ones(2), gamma=1.5)
    with pytest.raises(ConfigError, match="one shape"):
        algo.gae(normal(2), normal(3), torch.ones(2))


def test_critic_learns_no_further_than_its_clip() -> None:
    values = torch.tensor([0.0, 0.5, 2.0], requires_grad=True)
    old, returns = torch.zeros(3), torch.ones(3)
    loss = value_loss(values, old, returns, clip=0.2)
    expected = [max((v - 1) ** 2, (max(-0.2, min(0.2, v)) - 1) ** 2) / 2 for v in (0.0, 0.5, 2.0)]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected))
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [-1.0, 0.0, 1.0]
    free = value_loss(values, old, returns)
    torch.testing.assert_close(free.detach(), (values.detach() - 1) ** 2 / 2)
