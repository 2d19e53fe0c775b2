"""Whether a loss keeps the contract, in words: what every loss of this folder is tested by, for the user's own too.

Shape legend: S samples of T positions, N = S·T tokens, K entries of a teacher's top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.algo.base import LossInputs
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.custom import Custom, load
from headrace.algo.objective import Objective
from headrace.algo.registry import named
from headrace.config import Section, validate

STEP = 1e-6
"""Of finite differences, in float64."""
TOLERANCE = 1e-6
"""Greatest relative difference that is still the same number."""


class Broken(Exception):
    """A clause does not hold; the text says what was seen."""


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
        rows = [f"  {'ok  ' if f.holds else 'FAIL'}  {f.clause}: {f.detail}" for f in self.findings]
        return "\n".join([f"{self.ref} {'keeps' if self.ok else 'breaks'} the contract", *rows])


def check_loss(ref: str | Section, seed: int = 0) -> LossReport:
    """Run the contract suite on the loss ``ref``: a name, ``file.py:function`` or a settings record.

    The clauses: finite values; the gradient is the derivative of the value, what is detached held fixed; order and
    packing of samples change nothing, nor does what stands outside the mask; far-off ratios stay finite; an empty mask
    has zero loss and gradient. A formula that raises fails the clause, with its message. Raises :class:`ConfigError`
    for a reference that names nothing.
    """
    table: Any = named(ref) if isinstance(ref, str) else ref
    config = validate(AlgoConfig, {"loss": table, "correction": ()})
    if isinstance(config.loss, Custom):
        load(config.loss.ref)
    objective = Objective.build(config)
    trial = Trial(objective, example(torch.Generator().manual_seed(seed)))
    clauses: dict[str, Callable[[], str]] = {
        "values are finite": trial.finite,
        "the gradient is the derivative of the value": trial.derivative,
        "the order of samples changes nothing": trial.order,
        "cutting the batch changes nothing": trial.cutting,
        "what is outside the mask has no influence": trial.outside,
        "ratios far off stay finite": trial.extremes,
        "an empty mask gives zero": trial.empty,
    }
    findings = tuple(_judge(clause, check) for clause, check in clauses.items())
    return LossReport(ref=ref if isinstance(ref, str) else type(ref).__name__, findings=findings)


def _judge(clause: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(clause=clause, holds=True, detail=check())
    except Broken as broken:
        return Finding(clause=clause, holds=False, detail=str(broken))
    except Exception as error:  # noqa: BLE001 - the user's formula may raise anything; it is told to the user
        return Finding(clause=clause, holds=False, detail=f"{type(error).__name__}: {error}")


def example(generator: torch.Generator, num_samples: int = 4, length: int = 6) -> LossInputs:
    """Random samples in float64, every column there, some tokens outside the mask, neighbours in pairs."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def near(log_p_N: Tensor, spread: float) -> Tensor:
        return (log_p_N + spread * normal(len(log_p_N))).clamp(max=-0.01)

    tokens = num_samples * length
    log_mu_N = -normal(tokens).abs() - 0.1
    mask_N = torch.rand(tokens, generator=generator) < 0.75
    mask_N[::length] = True
    sides_S = 1.0 - 2.0 * (torch.arange(num_samples) % 2)
    return LossInputs(
        log_pi_N=near(log_mu_N, 0.3),
        log_old_N=near(log_mu_N, 0.1),
        log_mu_N=log_mu_N,
        advantages_N=(sides_S * (0.2 + normal(num_samples).abs())).repeat_interleave(length),
        mask_N=mask_N,
        samples_N=torch.arange(num_samples).repeat_interleave(length),
        num_samples=num_samples,
        versions_N=torch.randint(3, 8, (tokens,), generator=generator),
        version_now=7,
        log_ref_N=near(log_mu_N, 0.2),
        entropy_N=normal(tokens).abs(),
        groups_S=torch.arange(num_samples) // 2,
        log_pi_NK=normal(tokens, 5).log_softmax(1)[:, :3],
        log_nu_NK=normal(tokens, 5).log_softmax(1)[:, :3],
    )


def take(inputs: LossInputs, samples: Sequence[int], *, packed: bool = False) -> LossInputs:
    """These samples, in this order; ``packed`` leaves out the tokens outside the mask."""
    at = [(inputs.samples_N == sample).nonzero()[:, 0] for sample in samples]
    if packed:
        at = [rows[inputs.mask_N[rows]] for rows in at]
    order = torch.cat(at) if at else torch.zeros(0, dtype=torch.int64)
    names = [f.name for f in fields(inputs) if f.name.endswith(("_N", "_NK", "_NP"))]
    columns = {name: getattr(inputs, name) for name in names}
    taken: Mapping[str, Any] = {name: None if value is None else value[order] for name, value in columns.items()}
    lengths = torch.tensor([len(rows) for rows in at], dtype=torch.int64)
    samples_N = torch.arange(len(samples)).repeat_interleave(lengths)
    groups_S = None if inputs.groups_S is None else inputs.groups_S[list(samples)]
    return replace(inputs, **{**taken, "samples_N": samples_N, "num_samples": len(samples), "groups_S": groups_S})


@dataclass(frozen=True, slots=True)
class Trial:
    """An objective and a batch to try it on. Every clause says what it measured, or raises what broke it."""

    objective: Objective
    inputs: LossInputs

    def prepared(self, inputs: LossInputs) -> LossInputs:
        """The inputs with the tokens chosen from them as a whole batch."""
        return replace(inputs, selected_NP=self.objective.prepare(inputs))

    def weights(self, inputs: LossInputs) -> Tensor:
        """A weight for each token that is its own, wherever it stands: what makes sums tell tokens apart."""
        return (1.5 + (1e4 * inputs.log_mu_N).sin()).masked_fill(~inputs.mask_N, 0.0)

    def run(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Loss, and gradient with respect to log π of every token (and of every entry of the teacher's top)."""
        leaves = [inputs.log_pi_N.clone().requires_grad_()]
        inputs = replace(inputs, log_pi_N=leaves[0])
        if inputs.log_pi_NK is not None:
            leaves.append(inputs.log_pi_NK.clone().requires_grad_())
            inputs = replace(inputs, log_pi_NK=leaves[1])
        loss = self.objective(inputs, self.weights(inputs)).loss
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return loss.detach(), torch.cat([grad if grad.ndim == 2 else grad[:, None] for grad in grads], dim=1)

    def finite(self) -> str:
        """Finite values."""
        loss, grad = self.run(self.prepared(self.inputs))
        if not (loss.isfinite() and grad.isfinite().all()):
            raise Broken(f"loss {loss.item()}, gradient {grad.tolist()}")
        return f"loss {loss.item():.6g} over {len(grad)} tokens"

    def derivative(self) -> str:
        """Central differences against autograd."""
        inputs = self.prepared(self.inputs)
        _, grad = self.run(inputs)
        held = Held()
        weights_N = self.weights(inputs)
        with held:
            self.objective(inputs, weights_N)

        def value(moved: LossInputs) -> float:
            held.rewind()
            with held:
                return float(self.objective(moved, weights_N).loss)

        columns = ["log_pi_N"] if inputs.log_pi_NK is None else ["log_pi_N", "log_pi_NK"]
        numeric = torch.zeros_like(grad)
        for place in range(grad.numel()):
            row, entry = divmod(place, grad.shape[1])
            name, at = (columns[0], (row,)) if entry == 0 else (columns[1], (row, entry - 1))
            column = getattr(inputs, name)
            moves = [column.index_put(tuple(map(torch.tensor, at)), column[at] + step) for step in (STEP, -STEP)]
            up, down = (value(replace(inputs, **{name: move})) for move in moves)
            numeric[row, entry] = (up - down) / (2 * STEP)
        return _same(numeric, grad, "finite differences and autograd", tolerance=1e-5)

    def order(self) -> str:
        """A batch with its samples the other way round."""
        back = take(self.inputs, range(self.inputs.num_samples - 1, -1, -1))
        (loss, grad), (loss_back, grad_back) = self.run(self.prepared(self.inputs)), self.run(self.prepared(back))
        rows = [(self.inputs.samples_N == s).nonzero()[:, 0] for s in range(self.inputs.num_samples - 1, -1, -1)]
        _same(loss_back, loss, "losses in two orders")
        return _same(grad_back, grad[torch.cat(rows)], "gradients in two orders")

    def cutting(self) -> str:
        """Pairs of samples one after the other, and packed, against all at once."""
        whole = self.prepared(self.inputs)
        loss, grad = self.run(whole)
        pairs = [range(start, start + 2) for start in range(0, whole.num_samples, 2)]
        for packed in (False, True):
            parts = [self.run(take(whole, pair, packed=packed)) for pair in pairs]
            rows_N = whole.mask_N if packed else torch.ones_like(whole.mask_N)
            _same(torch.stack([part for part, _ in parts]).sum(), loss, "losses of parts and whole")
            _same(torch.cat([part for _, part in parts]), grad[rows_N], "gradients of parts and whole")
        return f"{len(pairs)} parts, padded and packed"

    def outside(self) -> str:
        """Garbage outside the mask."""
        outside_N = ~self.inputs.mask_N
        names = [f.name for f in fields(self.inputs) if f.name.endswith(("_N", "_NK"))]
        floats = {name: getattr(self.inputs, name) for name in names if getattr(self.inputs, name).is_floating_point()}
        dirty: Any = {name: column.clone() for name, column in floats.items()}
        for column in dirty.values():
            column[outside_N] = torch.nan
        loss, grad = self.run(self.prepared(self.inputs))
        loss_dirty, grad_dirty = self.run(self.prepared(replace(self.inputs, **dirty)))
        _same(loss_dirty, loss, "losses with and without garbage")
        _same(grad_dirty, grad, "gradients with and without garbage")
        if grad_dirty[outside_N].any():
            raise Broken("tokens outside the mask have a gradient")
        return f"{int(outside_N.sum())} tokens of garbage"

    def extremes(self) -> str:
        """log-ratios of ±60 and ±1000 in float32."""
        columns: Any = {name: getattr(self.inputs, name).float() for name in ("log_old_N", "log_mu_N", "advantages_N")}
        for far in (-60.0, -1000.0):
            swings = [("log_pi_N", far), ("log_old_N", far), ("log_mu_N", far)]
            for name, value in swings:
                moved: Any = {**columns, "log_pi_N": self.inputs.log_pi_N.float()}
                moved[name] = torch.full_like(moved[name], value)
                loss, grad = self.run(self.prepared(replace(self.inputs, **moved)))
                if not (loss.isfinite() and grad.isfinite().all()):
                    raise Broken(f"not finite where {name.removesuffix('_N')} is {value}")
        return "log-ratios to ±1000"

    def empty(self) -> str:
        """A batch without a token that carries loss, and one without a token."""
        nothing = replace(self.inputs, mask_N=torch.zeros_like(self.inputs.mask_N))
        for inputs in (nothing, take(self.inputs, [])):
            loss, grad = self.run(self.prepared(inputs))
            if loss != 0 or grad.any():
                raise Broken(f"loss {loss.item()}, greatest gradient {grad.abs().max().item()}")
        return "zero loss, zero gradient"


class Held(TorchFunctionMode):
    """Keeps what was detached at its first value: so a difference quotient sees a stop-gradient as autograd does."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self.place: int | None = None

    def rewind(self) -> None:
        """From here on, give the first values again, in order."""
        self.place = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.detach:
            return func(*args, **(kwargs or {}))
        if self.place is None:
            self.values.append(func(*args, **(kwargs or {})))
            return self.values[-1]
        self.place += 1
        return self.values[self.place - 1]


def _same(ours: Tensor, theirs: Tensor, what: str, tolerance: float = TOLERANCE) -> str:
    scale = theirs.abs().max().clamp(min=1.0) if theirs.numel() else theirs.new_ones(())
    gap = ((ours - theirs).abs().max() / scale).item() if theirs.numel() else 0.0
    if not gap <= tolerance:
        raise Broken(f"{what} differ by {gap:.3g}")
    return f"{what} agree to {gap:.1e}"
