"""The contract suite of a loss, which tests every loss of this package and can test a user's own loss. The contract
consists of *clauses*. Each clause is one property that every loss must have, and is tested on random batches.

Shape legend: S samples of T positions, N = S·T tokens, K likeliest entries of a teacher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.algo.base import Column, LossInputs
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.custom import Custom
from headrace.algo.notebook import apply_options
from headrace.algo.objective import Objective
from headrace.algo.registry import settings_table
from headrace.base.config import Section, validate
from headrace.base.config.user_code import where
from headrace.base.errors import HeadraceError

STEP = 1e-6
"""The step of finite differences, in float64."""
TOLERANCE = 1e-6
"""The largest relative difference of two results that are considered equal."""


class ClauseBroken(Exception):
    """The error raised by a test whose clause of the contract is violated. Its text says what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of testing one clause of the contract."""

    clause: str
    """The clause in words, as in :data:`REMEDIES`."""
    holds: bool
    """Whether the loss satisfies the clause."""
    detail: str
    """The measured value, or the violation in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """The result of :func:`check_loss`."""

    ref: str
    """The name of the loss, or ``file.py:function`` for a user's own loss."""
    findings: tuple[Finding, ...]
    """One finding for each clause that was tested. If the first clause is violated, the others are not tested."""

    @property
    def ok(self) -> bool:
        """Return whether the loss satisfies every clause."""
        return all(finding.holds for finding in self.findings)

    def __str__(self) -> str:
        """Return the report as lines of text, one for each clause."""
        rows = [f"  {'ok  ' if f.holds else 'FAIL'}  {f.clause}: {f.detail}" for f in self.findings]
        return "\n".join([f"{self.ref} {'keeps' if self.ok else 'breaks'} the contract", *rows])


REMEDIES = {
    "one value per token": "return a tensor shaped like inputs.log_pi_N, without any mean or sum over tokens",
    "values are finite": "look for divisions and logarithms of 0",
    "the gradient is not zero everywhere": "let log_pi_N (or a ratio of it) enter the value without detach",
    "the gradient is the derivative of the value": "look for a backward pass of its own that is not the value's",
    "the order of samples changes nothing": "tell samples apart by samples_N, not by where they stand",
    "cutting the batch changes nothing": "leave means and counts over the batch to the reduction; sum within samples "
    "by inputs.sum_S and inputs.mean_S",
    "what is outside the mask has no influence": "sum by inputs.sum_S, or multiply by mask_N first",
    "ratios far off stay finite": "take ratios by inputs.log_ratio_N or headrace.algo.base.log_ratio, which clamp",
    "an empty mask gives zero": "let sizes be 0: clamp counts that are divided by",
}
"""The usual remedy for a violation of each clause."""


def check_loss(ref: str | Section, seed: int = 0, options: Mapping[str, Any] | None = None) -> LossReport:
    """Run the contract suite on the loss ``ref``: a name, ``file.py:function`` or a settings record. ``seed`` is the
    seed of the random batches.

    ``options`` are the options of a loss that is given by name, as in :func:`headrace.algo.loss`: settings, or
    arguments of the user's own function. Optional columns are ``None`` unless the loss declares that it reads them
    (``needs``).

    The clauses: the loss has one finite value per token. Its gradient is not zero everywhere, and is the derivative of
    the value if everything without gradient (detached, or computed under ``torch.no_grad``) is held constant. The order
    and packing of samples, and values outside the mask, have no effect. Extreme ratios give finite results. An empty
    mask gives zero loss and gradient. A formula that raises an error violates the clause. Raises :class:`ConfigError`
    for a reference that names no loss, and for unknown options.
    """
    table: Any = apply_options(settings_table(ref), dict(options or {})) if isinstance(ref, str) else ref
    config = validate(AlgoConfig, {"loss": table, "correction": ()})
    source = None
    if isinstance(config.loss, Custom):
        _ = config.loss.function  # an error in the file itself is raised here, and is not a broken clause
        source = str(Path(config.loss.ref.rpartition(":")[0]).resolve())
    objective = Objective.build(config)
    trial = GradientTrial(objective, seed)
    clauses: dict[str, Callable[[], str]] = {
        "values are finite": trial.finite,
        "the gradient is not zero everywhere": trial.gradient,
        "the gradient is the derivative of the value": trial.derivative,
        "the order of samples changes nothing": trial.order,
        "cutting the batch changes nothing": trial.cutting,
        "what is outside the mask has no influence": trial.outside,
        "ratios far off stay finite": trial.extremes,
        "an empty mask gives zero": trial.empty,
    }
    shape = _test_clause("one value per token", trial.shape, source)
    rest = (_test_clause(clause, check, source) for clause, check in clauses.items()) if shape.holds else ()
    return LossReport(ref=ref if isinstance(ref, str) else type(ref).__name__, findings=(shape, *rest))


def _test_clause(clause: str, check: Callable[[], str], source: str | None) -> Finding:
    """Run ``check``, the test of the clause named ``clause``, and return its finding. Any error of the user's formula
    becomes a finding of a violation. ``source`` is the path of the user's file, so that the finding can name the line;
    ``None`` for a loss of this package."""
    try:
        return Finding(clause=clause, holds=True, detail=check())
    except ClauseBroken as broken:
        detail = f"{broken}; {REMEDIES[clause]}"
    except HeadraceError as error:
        detail = f"{error.problem}; {error.remedy}"
    except Exception as error:  # noqa: BLE001 - the user's formula may raise anything, which is reported
        undeclared = "; a column that is not always there has to be named: needs = ['log_ref']"
        detail = where(error, source) + (undeclared if "NoneType" in str(error) else "")
    return Finding(clause=clause, holds=False, detail=detail)


def example(generator: torch.Generator, num_samples: int = 4, length: int = 6) -> LossInputs:
    """Return a random batch for the tests, drawn from ``generator``: ``num_samples`` samples of ``length`` tokens in
    float64, with all columns and some tokens outside the mask. Each two consecutive samples are a pair with advantages
    of opposite sign."""

    def normal(*shape: int) -> Tensor:
        """Return a tensor of the shape ``shape`` with standard normal random numbers."""
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def near(log_p_N: Tensor, spread: float) -> Tensor:
        """Return log-probabilities that differ from ``log_p_N`` by random amounts of size ``spread``, all below 0."""
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
    """Return the part of the batch ``inputs`` that consists of the samples with the indices ``samples``, in this order
    and numbered from 0. With ``packed``, the tokens outside the mask are left out."""
    at = [(inputs.samples_N == sample).nonzero()[:, 0] for sample in samples]
    if packed:
        at = [rows[inputs.mask_N[rows]] for rows in at]
    order = torch.cat(at) if at else torch.zeros(0, dtype=torch.int64)
    names = [f.name for f in fields(inputs) if f.name.endswith(("_N", "_NK", "_NP"))]
    columns = {name: getattr(inputs, name) for name in names}
    selected: Mapping[str, Any] = {name: None if value is None else value[order] for name, value in columns.items()}
    lengths = torch.tensor([len(rows) for rows in at], dtype=torch.int64)
    samples_N = torch.arange(len(samples)).repeat_interleave(lengths)
    groups_S = None if inputs.groups_S is None else inputs.groups_S[list(samples)]
    return replace(inputs, **{**selected, "samples_N": samples_N, "num_samples": len(samples), "groups_S": groups_S})


CARRIERS = ("log_pi_N", "entropy_N", "log_pi_NK")
"""The columns that carry a gradient."""
OPTIONAL: dict[Column, tuple[str, ...]] = {
    "log_ref": ("log_ref_N",),
    "entropy": ("entropy_N",),
    "pairs": ("groups_S",),
    "top_k": ("log_pi_NK", "log_nu_NK"),
}
"""The optional columns, by the name that a loss declares in order to read them."""


def make_leaves(inputs: LossInputs) -> dict[str, Any]:
    """Return copies of the columns of ``inputs`` that carry a gradient, by name. Each copy is a leaf of autograd, so
    that the loss can be differentiated with respect to it."""
    columns = {name: getattr(inputs, name) for name in CARRIERS if getattr(inputs, name) is not None}
    return {name: column.detach().clone().requires_grad_() for name, column in columns.items()}


@dataclass(frozen=True)
class GradientTrial:
    """An objective and the random batches on which its loss is tested. Each test of a clause is a method that returns
    the measured result in words, or raises :class:`ClauseBroken`."""

    objective: Objective
    """The objective that contains the tested loss, without corrections."""
    seed: int
    """The seed of the random batches."""

    @cached_property
    def inputs(self) -> LossInputs:
        """The random batch that :meth:`batch` makes from :attr:`seed`. Most clauses are tested on it."""
        return self.batch(self.seed)

    def batch(self, seed: int) -> LossInputs:
        """Return the batch of :func:`example` for the seed ``seed``. Optional columns that the objective does not
        declare are ``None``."""
        inputs = example(torch.Generator().manual_seed(seed))
        columns = self.objective.columns
        unread = [name for column, names in OPTIONAL.items() if column not in columns for name in names]
        absent: Mapping[str, Any] = dict.fromkeys(unread)
        return replace(inputs, **absent)

    def prepared(self, inputs: LossInputs) -> LossInputs:
        """Return ``inputs`` with the additional column of the tokens that the objective selects from the whole batch;
        ``None`` if it selects none."""
        return replace(inputs, selected_NP=self.objective.prepare(inputs))

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return the weight of each token of ``inputs`` in the loss, in place of a reduction's weights; 0 outside the
        mask. The weights of any two tokens differ and do not depend on the token's index, so that an error in one token
        changes the sum."""
        return (1.5 + (1e4 * inputs.log_mu_N).sin()).masked_fill(~inputs.mask_N, 0.0)

    def run(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return the loss of ``inputs`` and its gradient. The gradient has a row for every token, with one column for
        log π and one for each further entry that carries a gradient."""
        leaves = make_leaves(inputs)
        loss = self.objective(replace(inputs, **leaves), self.weights(inputs)).loss
        grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if loss.requires_grad:
            grads = list(torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True))
        return loss.detach(), torch.cat([grad if grad.ndim == 2 else grad[:, None] for grad in grads], dim=1)

    def shape(self) -> str:
        """Check that the loss has one value per token. Return the shape."""
        tokens_N = self.objective(self.prepared(self.inputs), self.weights(self.inputs)).tokens
        if tokens_N.shape != self.inputs.log_pi_N.shape:
            raise ClauseBroken(f"shape {tuple(tokens_N.shape)} for inputs of shape {tuple(self.inputs.log_pi_N.shape)}")
        return f"shape {tuple(tokens_N.shape)}"

    def gradient(self) -> str:
        """Check that the gradient is not zero everywhere on at least one of five random batches, since a formula may
        clip every token of one batch. Return the largest entry."""
        for seed in range(self.seed, self.seed + 5):
            _, grad = self.run(self.prepared(self.batch(seed)))
            if grad.any():
                return f"largest entry {grad.abs().max().item():.3g}"
        raise ClauseBroken("it is 0 for every token of five batches")

    def finite(self) -> str:
        """Check that loss and gradient are finite. Return the loss."""
        loss, grad = self.run(self.prepared(self.inputs))
        if not (loss.isfinite() and grad.isfinite().all()):
            raise ClauseBroken(f"loss {loss.item()}, gradient {grad.tolist()}")
        return f"loss {loss.item():.6g} over {len(grad)} tokens"

    def derivative(self) -> str:
        """Check that the gradient of autograd is the derivative of the loss, by central differences in which everything
        without gradient is held constant. Return how closely they agree."""
        inputs = self.prepared(self.inputs)
        _, grad = self.run(inputs)
        stop_gradients = StopGradientCache()
        weights_N = self.weights(inputs)

        def value(moved: LossInputs) -> float:
            """Return the loss of ``moved``, the inputs with one changed entry, as a number."""
            with stop_gradients:
                loss = self.objective(replace(moved, **make_leaves(moved)), weights_N).loss
            return float(loss.detach())

        value(inputs)
        numeric = torch.zeros_like(grad)
        entries = [(name, k) for name, leaf in make_leaves(inputs).items() for k in range(leaf[0].numel())]
        for row, (entry, (name, k)) in itertools.product(range(len(grad)), enumerate(entries)):
            change = torch.zeros_like(getattr(inputs, name))
            change.view(len(grad), -1)[row, k] = STEP
            moved: list[Any] = [{name: getattr(inputs, name) + sign * change} for sign in (1, -1)]
            up, down = (stop_gradients.again(value, replace(inputs, **columns)) for columns in moved)
            numeric[row, entry] = (up - down) / (2 * STEP)
        return _same(numeric, grad, "finite differences and autograd", tolerance=1e-5)

    def order(self) -> str:
        """Check that loss and gradients do not change if the samples are in reverse order. Return how closely they
        agree."""
        back = take(self.inputs, range(self.inputs.num_samples - 1, -1, -1))
        (loss, grad), (loss_back, grad_back) = self.run(self.prepared(self.inputs)), self.run(self.prepared(back))
        rows = [(self.inputs.samples_N == s).nonzero()[:, 0] for s in range(self.inputs.num_samples - 1, -1, -1)]
        _same(loss_back, loss, "losses in two orders")
        return _same(grad_back, grad[torch.cat(rows)], "gradients in two orders")

    def cutting(self) -> str:
        """Check that loss and gradients do not change if the batch is divided into parts of two samples, padded and
        packed. Return what was compared."""
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
        """Check that NaN outside the mask has no effect, and that the gradient is zero there. Return how many tokens
        were set to NaN."""
        outside_N = ~self.inputs.mask_N
        names = [f.name for f in fields(self.inputs) if f.name.endswith(("_N", "_NK"))]
        columns = {name: getattr(self.inputs, name) for name in names if getattr(self.inputs, name) is not None}
        dirty: Any = {name: column.clone() for name, column in columns.items() if column.is_floating_point()}
        for column in dirty.values():
            column[outside_N] = torch.nan
        loss, grad = self.run(self.prepared(self.inputs))
        loss_dirty, grad_dirty = self.run(self.prepared(replace(self.inputs, **dirty)))
        _same(loss_dirty, loss, "losses with and without garbage")
        _same(grad_dirty, grad, "gradients with and without garbage")
        if grad_dirty[outside_N].any():
            raise ClauseBroken("tokens outside the mask have a gradient")
        return f"{int(outside_N.sum())} tokens of garbage"

    def extremes(self) -> str:
        """Check that log-ratios of ±60 and ±1000 in float32 give a finite loss and gradient. Return the tested
        range."""
        columns: Any = {name: getattr(self.inputs, name).float() for name in ("log_old_N", "log_mu_N", "advantages_N")}
        for value, name in itertools.product((-60.0, -1000.0), ("log_pi_N", "log_old_N", "log_mu_N")):
            moved: Any = {**columns, "log_pi_N": self.inputs.log_pi_N.float()}
            moved[name] = torch.full_like(moved[name], value)
            loss, grad = self.run(self.prepared(replace(self.inputs, **moved)))
            if not (loss.isfinite() and grad.isfinite().all()):
                raise ClauseBroken(f"not finite where {name.removesuffix('_N')} is {value}")
        return "log-ratios to ±1000"

    def empty(self) -> str:
        """Check that a batch without a token that carries loss, and a batch without tokens, have zero loss and
        gradient. Return this result in words."""
        nothing = replace(self.inputs, mask_N=torch.zeros_like(self.inputs.mask_N))
        for inputs in (nothing, take(self.inputs, [])):
            loss, grad = self.run(self.prepared(inputs))
            if loss != 0 or grad.any():
                raise ClauseBroken(f"loss {loss.item()}, largest gradient {grad.abs().max().item()}")
        return "zero loss, zero gradient"


class StopGradientCache(TorchFunctionMode):
    """A mode of torch that records the results of stop-gradients, so that a difference quotient treats them as
    constants, as autograd does.

    A stop-gradient is ``detach``, ``.data``, a plain number read from a tensor, or any function under
    ``torch.no_grad``, if its argument is a tensor that carries a gradient. In the first run the results are recorded.
    In later runs, which :meth:`again` makes, the recorded results are returned in the same order.
    """

    _CUTS = (
        torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.item, torch.Tensor.tolist,
        torch.Tensor.__float__,
    )  # fmt: skip

    def __init__(self) -> None:
        """Start in the recording mode, without recorded results."""
        super().__init__()
        self._values: list[Any] = []
        """The results of the stop-gradients of the first run, in order."""
        self._place: int | None = None
        """The index in ``_values`` of the next result to return; ``None`` in the first run, which records."""

    def again(self, run: Callable[[LossInputs], float], inputs: LossInputs) -> float:
        """Call ``run`` with the changed ``inputs`` and return its result. Every stop-gradient returns the result of the
        first run."""
        self._place = 0
        return run(inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute one function of torch. For a stop-gradient, record its result in the first run, and return the
        recorded result in later runs. Torch calls this method for every function while the mode is active."""
        given = [*args, *(kwargs or {}).values()]
        carries = any(isinstance(value, Tensor) and value.requires_grad for value in given)
        result = func(*args, **(kwargs or {}))
        if not carries or (torch.is_grad_enabled() and func not in self._CUTS) or isinstance(result, bool | int):
            return result
        if self._place is None:
            self._values.append(_copy(result))
            return result
        self._place += 1
        first = _copy(self._values[self._place - 1])
        return result.copy_(first) if args and result is args[0] else first  # an in-place function returns its argument


def _copy(value: Any) -> Any:
    """Return a copy of a tensor; return any other value unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def _same(actual: Tensor, expected: Tensor, description: str, tolerance: float = TOLERANCE) -> str:
    """Return a sentence that says how closely two tensors agree, relative to the largest entry of ``expected`` if it is
    above 1. Raises :class:`ClauseBroken` if they differ by more than ``tolerance``."""
    scale = expected.abs().max().clamp(min=1.0) if expected.numel() else expected.new_ones(())
    gap = ((actual - expected).abs().max() / scale).item() if expected.numel() else 0.0
    if not gap <= tolerance:
        raise ClauseBroken(f"{description} differ by {gap:.3g}")
    return f"{description} agree to {gap:.1e}"
