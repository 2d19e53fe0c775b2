"""What docs/coming_from.md and the recipes promise: the same numbers as the library whose setting is translated."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import algo
from headrace.algo.config import AlgoConfig
from headrace.base.config import validate
from headrace.run.session.recipes import recipe

B, T = 6, 7
LONGEST = 11
"""``max_completion_length``."""


def columns(seed: int) -> dict[str, torch.Tensor]:
    """Two groups of three answers; their first tokens count, as many as ``mask`` says."""
    drawn = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, T, generator=drawn, dtype=torch.float64)

    log_old = -torch.rand(B, T, generator=drawn, dtype=torch.float64) * 3 - 0.01
    lengths = torch.tensor([7, 1, 4, 6, 3, 5])
    return {
        "log_old": log_old,
        "log_pi": log_old + noise(0.3),
        "log_mu": log_old + noise(0.2),
        "log_ref": log_old + noise(0.4),
        "entropy": torch.rand(B, T, generator=drawn, dtype=torch.float64),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64),
        "mask": (torch.arange(T) < lengths[:, None]).double(),
    }


def prime_rl_default(log_pi: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """PRIME-RL's ``trainer.loss`` of type "default" with its defaults, for all tokens of a step."""
    mask, advantages = given["mask"].bool(), given["advantages"][:, None].expand(B, T)
    log_r = log_pi - given["log_mu"]
    moved = log_pi.exp() - given["log_mu"].exp()
    dropped = torch.where(advantages > 0, moved > 0.2, moved < -0.2)
    gain = torch.where(dropped, torch.zeros_like(log_r), advantages * log_r.exp())
    return ((1e-3 * log_r**2 - gain) * mask).sum() / mask.sum()


def test_the_recipe_prime_rl_has_the_gradient_of_its_default_loss() -> None:
    config = validate(AlgoConfig, recipe("prime-rl").settings["algo"])
    assert (config.loss.kind, config.correction, config.reduction.kind) == ("dppo", (), "token_mean")
    for seed in range(4):
        given = columns(seed)
        given["log_mu"][0, :3] = given["log_pi"][0, :3] + torch.tensor([-0.9, -4.0, 0.5])  # far off, and rare before
        ours, theirs = (given["log_pi"].clone().requires_grad_() for _ in range(2))
        algo.loss(
            "dppo", log_pi=ours, log_mu=given["log_mu"], advantages=given["advantages"], mask=given["mask"],
            **config.loss.model_dump(exclude={"kind"}),
        ).loss.backward()  # fmt: skip
        prime_rl_default(theirs, given).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_advantages_of_the_recipe_prime_rl_are_differences() -> None:
    config = validate(AlgoConfig, recipe("prime-rl").settings["algo"])
    assert algo.advantage(config.advantage.kind, [1, 0, 0, 1], std=config.advantage.std) == [0.5, -0.5, -0.5, 0.5]


class _Accelerator(SimpleNamespace):
    """One process."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values

    def pad_across_processes(self, values: torch.Tensor, **_: Any) -> torch.Tensor:
        return values


def trl_loss(log_pi: torch.Tensor, given: dict[str, torch.Tensor], weights: Any, **settings: Any) -> torch.Tensor:
    """The loss that TRL's own ``GRPOTrainer._compute_loss`` makes of the columns, as with one process."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    config = pytest.importorskip("trl.trainer.grpo_config").GRPOConfig
    args = {name: field.default for name, field in config.__dataclass_fields__.items()} | settings
    args["steps_per_generation"] = 1
    ids = torch.zeros(B, T, dtype=torch.long)
    trainer = SimpleNamespace(
        args=SimpleNamespace(**args), **{name: args[name] for name in args if name not in ("epsilon_high", "epsilon")},
        epsilon_low=args["epsilon"], epsilon_high=args["epsilon_high"] or args["epsilon"],
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True), accelerator=_Accelerator(num_processes=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_pi, given["entropy"], None),
        get_off_policy_mask=grpo.GRPOTrainer.get_off_policy_mask, get_gamma_weights=grpo.GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *values: grpo.GRPOTrainer.get_high_entropy_mask(trainer, *values)
    trainer.use_vllm = weights is not None
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": given["mask"],
        "advantages": given["advantages"], "old_per_token_logps": given["log_old"],
        "ref_per_token_logps": given["log_ref"], "sampling_per_token_logps": given["log_mu"],
        "importance_sampling_ratio": weights, "num_items_in_batch": given["mask"].sum(),
    }  # fmt: skip
    loss: torch.Tensor = grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def sampled_ratio(given: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """``vllm_importance_sampling_mode`` with ``clip_max`` 1.5: the weights that TRL's trainer hands to its loss."""
    log_rho = (given["log_old"] - given["log_mu"]) * given["mask"]
    rho = (log_rho.sum(-1, keepdim=True) if mode.startswith("sequence") else log_rho).exp()
    return rho.clamp(max=1.5) if mode.endswith("truncate") else rho.masked_fill(rho > 1.5, 0.0)


ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"name": "dapo", "clip_high": 0.2}),
    ({"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}, {"name": "grpo", "clip_low": 0.1, "clip_high": 0.3}),
    ({"loss_type": "grpo", "delta": 1.5}, {"name": "grpo", "ratio_cap": 1.5}),
    ({"loss_type": "grpo", "delta": 1.05, "epsilon_high": 0.4}, {"name": "grpo", "ratio_cap": 1.05, "clip_high": 0.4}),
    ({"loss_type": "dr_grpo"}, {"name": "dr_grpo", "normalizer": LONGEST}),
    ({"loss_type": "cispo", "epsilon_high": 1.3}, {"name": "cispo", "clip_high": 0.3}),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo"}),
    ({"loss_type": "sapo"}, {"name": "sapo"}),
    (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
        {"name": "sapo", "tau_pos": 2.0, "tau_neg": 0.5},
    ),
    (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        {"name": "luspo"},
    ),
    ({"loss_type": "vespo"}, {"name": "vespo", "anchor": "old"}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"name": "gspo"},
    ),
    ({"beta": 0.3}, {"name": "dapo", "clip_high": 0.2, "kl_coef": 0.3, "unbiased_kl": True}),
    (
        {"beta": 0.3, "use_bias_correction_kl": False, "loss_type": "grpo"},
        {"name": "grpo", "kl_coef": 0.3},
    ),
    (
        {"off_policy_mask_threshold": 0.02},
        {"name": "dapo", "clip_high": 0.2, "correction": {"kind": "opsm", "delta": 0.02}},
    ),
    (
        {"top_entropy_quantile": 0.27},
        {"name": "dapo", "clip_high": 0.2, "correction": {"kind": "top_entropy", "fraction": 0.27}},
    ),
]  # fmt: skip
MODES = {
    "token_truncate": {"kind": "tis", "cap": 1.5},
    "token_mask": {"kind": "icepop", "low": 0.0, "high": 1.5},
    "sequence_truncate": {"kind": "sequence_tis", "cap": 1.5},
    "sequence_mask": {"kind": "icepop", "level": "sequence", "low": 0.0, "high": 1.5},
}


def agree(
    settings: dict[str, Any], options: dict[str, Any], given: dict[str, torch.Tensor], weights: Any = None
) -> None:  # fmt: skip
    """Both gradients are the same; values may differ by what has no gradient (CISPO's and VESPO's are surrogates)."""
    ours, theirs = (given["log_pi"].clone().requires_grad_() for _ in range(2))
    trl_loss(theirs, given, weights, max_completion_length=LONGEST, **settings).backward()
    options = {"log_ref": given["log_ref"], "entropy": given["entropy"], **options}
    told = {name: given[name] for name in ("log_old", "log_mu", "advantages", "mask")}
    out = algo.loss(options.pop("name"), log_pi=ours, **told, **options)
    out.loss.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("settings", "options"), ROWS, ids=str)
def test_a_loss_of_trl_and_its_translation_have_the_same_gradient(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    for seed in range(3):
        agree(settings, options, columns(seed))


@pytest.mark.parametrize(("mode", "correction"), MODES.items())
def test_a_correction_of_trl_and_its_translation_have_the_same_gradient(mode: str, correction: dict[str, Any]) -> None:
    for seed in range(3):
        given = columns(seed)
        options = {"name": "dapo", "clip_high": 0.2, "correction": correction}
        agree({"vllm_importance_sampling_mode": mode}, options, given, sampled_ratio(given, mode))


@pytest.mark.parametrize("kind", ["sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_sequences_without_loss_tokens_are_in_no_mean(kind: str) -> None:
    """verl counts S so; TRL counts every sequence of its batch: its loss is smaller by the share of the rest."""
    given = columns(1)
    given["mask"][[1, 4]] = 0.0
    value, tokens = -given["log_pi"], given["mask"].sum(-1)
    sums = (value * given["mask"]).sum(-1)
    each = {
        "sequence_mean_token_mean": sums / tokens.clamp(min=1),
        "sequence_mean_token_sum": sums,
        "constant": sums / 5,
    }
    out = algo.loss(
        "ce", log_pi=given["log_pi"], advantages=given["advantages"], mask=given["mask"],
        reduction={"kind": kind, **({"normalizer": 5.0} if kind == "constant" else {})},
    )  # fmt: skip
    verl = each[kind][tokens > 0].mean()
    torch.testing.assert_close(out.loss, verl)
    trl = each[kind].mean()
    torch.testing.assert_close(out.loss * 4 / 6, trl)


def test_advantages_of_trl_and_their_translations() -> None:
    rewards = np.array([[1.0, 0.2, 0.5, 0.0], [0.0, 0.9, 0.9, 0.1]])
    centered = rewards - rewards.mean(1, keepdims=True)
    flat, labels = rewards.ravel().tolist(), np.repeat([0, 1], 4).tolist()
    group = centered / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    assert algo.advantage("grpo", flat, groups=labels, eps=1e-4) == pytest.approx(group.ravel().tolist())
    assert algo.advantage("grpo", flat, groups=labels, std="none") == pytest.approx(centered.ravel().tolist())
    parts = np.stack([rewards, 1 - rewards**2], axis=-1)
    normal = (parts - parts.mean(1, keepdims=True)) / (parts.std(1, ddof=1, keepdims=True) + 1e-4)
    summed = (normal * [1.0, 0.5]).sum(-1).ravel()
    whitened = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)
    ours = algo.advantage("gdpo", parts.reshape(8, 2).tolist(), groups=labels, weights=(1.0, 0.5), eps=1e-4)
    assert ours == pytest.approx((whitened * math.sqrt(8 / 7)).tolist(), rel=1e-3)
