"""Random batches, and the way from tensors to the rows of the references."""

from dataclasses import replace

import torch
from torch import Tensor

from headrace.algo.base import BatchLayout, LossInputs
from headrace.algo.check import example
from headrace.algo.corrections import AnyCorrection
from headrace.algo.losses import AnyLoss
from headrace.algo.reductions import AnyReduction
from headrace.algo.registry import classes_by_kind
from tests.algo import references

LOSSES = {name: kind for name, kind in classes_by_kind(AnyLoss).items() if name != "custom"}
CORRECTIONS, REDUCTIONS = classes_by_kind(AnyCorrection), classes_by_kind(AnyReduction)


def batch(seed: int, spread: float = 1.0, num_samples: int = 6, length: int = 7) -> LossInputs:
    """A random batch whose log-ratios are about ``spread`` times 0.3."""
    inputs = example(torch.Generator().manual_seed(seed), num_samples, length)
    log_mu_N = inputs.log_mu_N - 1.0
    near = {name: (log_mu_N + spread * (getattr(inputs, name) - inputs.log_mu_N)).clamp(max=-1e-3)
            for name in ("log_pi_N", "log_old_N", "log_ref_N")}  # fmt: skip
    return replace(inputs, log_mu_N=log_mu_N, **near)


def sequences(inputs: LossInputs) -> list[references.Sequence]:
    """The tokens of the mask, by sample, as plain numbers."""
    names = {"pi": "log_pi_N", "old": "log_old_N", "mu": "log_mu_N", "ref": "log_ref_N", "a": "advantages_N",
             "version": "versions_N", "entropy": "entropy_N"}  # fmt: skip
    out: list[references.Sequence] = [[] for _ in range(inputs.num_samples)]
    for n in inputs.mask_N.nonzero()[:, 0].tolist():
        row = {key: float(getattr(inputs, name)[n]) for key, name in names.items()}
        out[int(inputs.samples_N[n])].append({**row, "now": float(inputs.version_now)})
    return out


def layout(inputs: LossInputs) -> BatchLayout:
    """The masks, each sample its own rollout."""
    episodes_S = torch.arange(inputs.num_samples)
    return BatchLayout(mask_N=inputs.mask_N, samples_N=inputs.samples_N, episodes_S=episodes_S, groups_S=groups(inputs))


def groups(inputs: LossInputs) -> Tensor:
    """The groups of the samples."""
    assert inputs.groups_S is not None
    return inputs.groups_S
