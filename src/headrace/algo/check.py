"""Whether a loss keeps the contract, in words: what every loss of this folder is tested by, for the user's own too.

Shape legend: S samples of T positions, N = S·T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.algo.base import LossInputs
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.algo.registry import named
from headrace.config import Section, validate

STEP = 1e-6
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One clause of the contract."""

    clause: str
    holds: bool
    detail: str
    """What was measured, or what broke it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """What :func:`check_loss` found."""

    ref: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every clause holds."""
        return all(finding.holds for finding in self.findings)

    def __str__(self) -> str:
        rows = [f"{'ok  ' if f.holds else 'FAIL'} {f.clause}: {f.detail}" for f in self.findings]
        return "\n".join([f"{self.ref}: {'keeps' if self.ok else 'breaks'} the contract", *rows])


def check_loss(ref: str | Section, seed: int = 0) -> LossReport:
    """Runs the contract suite on the loss ``ref``: a name, ``file.py:function`` or a settings record.

    The clauses: one finite value per token; the gradient is the derivative of the value, what was detached held
    fixed; order and packing of samples change nothing; neither do tokens outside the mask; far-off ratios stay finite;
    an empty mask has zero loss and gradient. A formula that raises fails its clause, with its message. Raises
    :class:`ConfigError` for a reference that names nothing.
    """
    table: Any = named(ref) if isinstance(ref, str) else ref
    objective = Objective.build(validate(AlgoConfig, {"loss": table, "correction": ()}))
    generator = torch.Generator().manual_seed(seed)
    sample = Trial(objective, example(generator))
    clauses: dict[str, Callable[[], str]] = {
        "one finite value per token": sample.one_value_per_token,
        "the gradient is the derivative": sample.gradient,
        "the order of samples changes nothing": sample.permutation,
        "cutting the batch changes nothing": sample.cutting,
        "tokens outside the mask have no influence": sample.masked,
        "ratios far outside stay finite": sample.extremes,
        "an empty mask gives zero": sample.empty,
    }
    findings = tuple(_judge(clause, check) for clause, check in clauses.items())
    return LossReport(ref=ref if isinstance(ref, str) else type(ref).__name__, findings=findings)


def _judge(clause: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(clause=clause, holds=True, detail=check())
    except Exception as error:  # noqa: BLE001 - the user's formula may raise anything; it is told to the user
        return Finding(clause=clause, holds=False, detail=f"{type(error).__name__}: {error}".rstrip(": "))


def example(generator: torch.Generator, num_samples: int = 4, length: int = 6) -> LossInputs:
    """Random samples in float64, every column there, some tokens outside the mask, the samples in pairs."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = num_samples * length
    log_mu_N = -normal(tokens).abs() - 0.1
    mask_N = torch.rand(tokens, generator=generator) < 0.75
    mask_N[::length] = True
    sides_S = torch.where(torch.arange(num_samples) % 2 == 0, 1.0, -1.0).double()
    return LossInputs(
        log_pi_N=(log_mu_N + 0.3 * normal(tokens)).clamp(max=-0.01),
        log_old_N=(log_mu_N + 0.1 * normal(tokens)).clamp(max=-0.01),
        log_mu_N=log_mu_N,
        advantages_N=(sides_S * (0.2 + normal(num_samples).abs())).repeat_interleave(length),
        mask_N=mask_N,
        samples_N=torch.arange(num_samples).repeat_interleave(length),
        num_samples=num_samples,
        versions_N=torch.randint(3, 8, (tokens,), generator=generator),
        version_now=7,
        log_ref_N=(log_mu_N + 0.2 * normal(tokens)).clamp(max=-0.01),
        entropy_N=normal(tokens).abs(),
        groups_S=torch.arange(num_samples) // 2,
        log_pi_NK=normal(tokens, 5).log_softmax(1)[:, :3],
        log_nu_NK=normal(tokens, 5).log_softmax(1)[:, :3],
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """An objective and a batch to try it on. Every method says what it measured, or raises."""

    objective: Objective
    inputs: LossInputs

    def tokens(self, inputs: LossInputs) -> Tensor:
        """The value of every token, with gradient, after the whole batch was prepared."""
        selected_NP = self.objective.prepare(replace(inputs, log_pi_N=inputs.log_pi_N.detach()))
        return self._run(replace(inputs, selected_NP=selected_NP))

    def _run(self, inputs: LossInputs) -> Tensor:
        kept_N = inputs.mask_N.to(inputs.log_pi_N.dtype)
        total = self.objective(inputs, kept_N).loss
        value_N = self.objective(inputs, kept_N).tokens
        return _Valued.apply(value_N, total)  # type: ignore[no-any-return,no-untyped-call]

    def one_value_per_token(self) -> str:
        """A finite value for each token."""
        raise NotImplementedError

    def gradient(self) -> str:
        raise NotImplementedError
