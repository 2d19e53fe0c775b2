"""The objective of one ``forward_backward``, and the linear objective that replaces a user's loss function.

A user's function f of all log π of a batch may combine them in any way. Its gradient is Σ_i ∂f/∂log π_i · ∇ log π_i. So
f is computed once for the whole batch. Its partial derivatives ∂f/∂log π_i, the *slopes*, then are the weights of the
plain sum Σ_i slope_i · log π_i, which has the same gradient as f, however the batch is divided into micro-batches.

π is the policy in training; log π_i is the log-probability of token i. Shape legend: N tokens of all samples in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headrace.algo.base import BatchLayout, Column, LossInputs, LossOutput, Shares, TokenLoss
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.section import LossSection
from headrace.algo.objective import Objective
from headrace.base.config import validate
from headrace.base.errors import ConfigError, DataError
from headrace.base.types.batch import Batch
from headrace.base.types.versions import NOT_SAMPLED
from headrace.learner.config import COLUMNS, SETTINGS

Choice = str | Mapping[str, Any] | AlgoConfig
"""The choice of a loss: its name, the ``[algo]`` table of a run file, or the record of that table."""

Metrics = Mapping[str, Any]
"""Numbers to report, by name."""
Formula = Callable[[LossInputs], Tensor | tuple[Tensor, Metrics]]
"""A user's loss function: it returns the loss of a whole batch as a scalar tensor, alone or with metrics."""


class ReplaceableObjective(Objective):
    """An objective that delegates every call to a current objective, which can be replaced between batches. The learner
    of a policy has this one objective, while each ``forward_backward`` may choose another loss."""

    def __init__(self, first: Objective) -> None:
        """Create the objective. ``first`` is the current objective until :meth:`choose` replaces it."""
        self.choose(first)

    def choose(self, objective: Objective) -> None:
        """Make ``objective`` the current objective."""
        object.__setattr__(self, "_current", objective)  # the base class is frozen

    _current: Objective
    """The objective to which every call is delegated."""

    @property
    def old(self) -> Any:
        """The source of π_old in the current objective, such as ``"learner"`` or ``"engine"``."""
        return self._current.old

    @property
    def critic(self) -> Any:
        """The critic that is trained: ``None``, because the caller computes the advantages."""
        return None

    @property
    def teaching(self) -> Any:
        """The teacher from which advantages are computed: ``None``, because the caller computes the advantages."""
        return None

    @property
    def num_updates(self) -> int:
        """The number of optimizer steps that the current objective makes with one batch."""
        return self._current.num_updates

    @property
    def columns(self) -> frozenset[Column]:
        """The names of the columns that the current objective reads and the learner has to compute."""
        return self._current.columns

    def shares(self, layout: BatchLayout) -> Shares:
        """Return the weights of the tokens of ``layout`` in the current objective, and their contribution to the
        denominator."""
        return self._current.shares(layout)

    def prepare(self, whole: LossInputs) -> Tensor | None:
        """Return the mask of the tokens that the current objective selects from the whole batch (N×P, bool); ``None``
        if it does not select tokens."""
        return self._current.prepare(whole)

    def __call__(self, inputs: LossInputs, weights_N: Tensor) -> LossOutput:
        """Return the loss of a micro-batch in the current objective; ``weights_N`` are the weights of its tokens."""
        return self._current(inputs, weights_N)


class Slopes(LossSection):
    """The loss Σ slope · log π that replaces a user's loss function. The column of advantages contains the slopes. The
    docstring of the module explains why the gradients are equal."""

    kind: Literal["slopes"] = "slopes"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return slope · log π for each token."""
        return TokenLoss(tokens_N=inputs.advantages_N * inputs.log_pi_N)


class Sum:
    """The reduction Σ_tokens x, the plain sum over all tokens with loss, without a denominator."""

    kind: ClassVar[str] = "sum"

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1 for each token with loss and 0 for other tokens, and the denominator 1."""
        return Shares(weights_N=layout.mask_N.float(), mass=torch.ones(()))


LINEAR = Objective(Slopes(), (), Sum())
"""The objective that replaces a user's loss function: Σ slope · log π, without corrections and without a
denominator."""


def resolve_algo(choice: Choice) -> AlgoConfig:
    """Return the settings of the algorithm for ``choice``: the name of a loss (all other settings have their defaults),
    an ``[algo]`` table, or a record, which is returned unchanged.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name or key, and for a loss that reads a column
    that the learner does not compute.

    >>> resolve_algo("gspo").correction[0].kind
    'tis'
    """
    if isinstance(choice, AlgoConfig):
        algo = choice
    elif isinstance(choice, str | Mapping):
        algo = validate(AlgoConfig, {"loss": choice} if isinstance(choice, str) else choice)
    else:
        raise ConfigError(f"loss={choice!r} names no loss", remedy="give a name, or the table or record of [algo]")
    if algo.epochs * algo.minibatches > 1:
        raise ConfigError(
            f"algo.epochs={algo.epochs} and algo.minibatches={algo.minibatches} are settings of whole runs",
            remedy="call forward_backward and optim_step as often as there are to be updates",
        )
    missing = sorted(Objective.build(algo).columns - COLUMNS - SETTINGS.keys())
    if missing:
        raise ConfigError(
            f"loss={algo.loss.kind!r} with its corrections reads {', '.join(missing)}, which the learner does not "
            "compute",
            remedy="choose another, or write it with forward_backward_custom",
        )
    return algo


def compute_slopes(fn: Formula, inputs: LossInputs) -> tuple[Tensor, dict[str, float]]:
    """Call the user's loss function ``fn`` once with ``inputs``. Return its slopes ∂fn/∂log π, ``[N]`` in float32, 0
    for tokens without loss; and its metrics by name, to which ``loss``, the value of the function, is added.

    Raises :class:`~headrace.base.errors.DataError` if ``fn`` returns no scalar tensor, does not depend on log π, or has
    slopes that are not finite.
    """
    with torch.enable_grad():
        returned = fn(inputs)
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(f"the loss function returned {shape}", remedy="return one number as a tensor: sum or mean")
    if not loss.requires_grad:
        raise DataError(
            "the loss does not depend on log_pi_N: there is no gradient",
            remedy="compute it from inputs.log_pi_N, without .detach(), .item() or numpy",
        )
    (slopes_N,) = torch.autograd.grad(loss.sum(), inputs.log_pi_N, allow_unused=True)
    if slopes_N is None:
        raise DataError("the loss does not depend on log_pi_N: there is no gradient", remedy="use inputs.log_pi_N")
    slopes_N = slopes_N.masked_fill(~inputs.mask_N, 0.0)
    if not (loss.isfinite().all() and slopes_N.isfinite().all()):
        raise DataError(
            f"the loss is {_number(loss):g} and its slopes are not all finite",
            remedy="clamp log-ratios before exp (inputs.log_ratio_N does), and do not divide by 0",
        )
    return slopes_N, {name: _number(value) for name, value in {**metrics, "loss": loss}.items()}


def _number(value: Any) -> float:
    """Return ``value``, a number or a tensor with one element, as a float."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def refuse_uncorrected(batch: Batch, algo: AlgoConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``batch`` has tokens that older weights sampled, and the
    settings ``algo`` neither correct for the difference nor allow it (``algo.allow_uncorrected``)."""
    sampled_N = batch.mask_N & (batch.versions_N != NOT_SAMPLED)
    ages = batch.ages()[sampled_N[batch.mask_N]]
    oldest = int(ages.max(initial=0))
    if oldest > 0 and not algo.corrected and not algo.allow_uncorrected:
        raise ConfigError(
            f"samples are up to {oldest} versions old, and loss={algo.loss.kind!r} corrects for none of it",
            remedy="give it a correction ('tis'), algo.old = 'engine', or samples of the present version; to insist, "
            "algo.allow_uncorrected = true",
        )
