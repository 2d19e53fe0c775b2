"""A loss from a user's own file: a function that receives the columns of a micro-batch and returns one value per
token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss
from headrace.base.config.user_code import load_file
from headrace.base.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Formula = Callable[..., Any]
"""The type of the user's function, which is called with :class:`LossInputs` and its options."""


class Custom(AnchoredLoss):
    """A loss that a function of the user computes: ``f(inputs: LossInputs, **options)``, which returns one value per
    token or a ``TokenLoss``.

    Source: the file that ``ref`` names. ``headrace check loss`` tests whether the loss satisfies the contract.
    """

    kind: Literal["custom"] = "custom"
    """The name that selects this loss."""
    ref: str
    """The function as ``"path/to/file.py:function"``. The path is relative to the run file, or to the working
    directory if there is none."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """The arguments of the function, in addition to the inputs."""
    needs: tuple[Literal["log_ref", "entropy", "pairs", "top_k"], ...] = ()
    """The optional columns that the function reads; optional columns that are not listed may be ``None``. ``"pairs"``
    stands for ``groups_S``, ``"top_k"`` for ``log_pi_NK`` and ``log_nu_NK``."""
    anchor: Anchor = "old"
    """The policy in the denominator of the function's ratio. ``"mu"`` means that the loss needs no correction."""
    reduction: ClassVar[str] = "token_mean"

    @pydantic.field_validator("ref")
    @classmethod
    def _names_a_file(cls, ref: str) -> str:
        """Refuse a reference that does not name a function in an existing Python file."""
        path, colon, name = ref.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise ConfigError(f"algo.loss.ref={ref!r} names no function", remedy="write it as 'my_losses.py:my_loss'")
        if not Path(path).is_file():
            raise ConfigError(
                f"algo.loss.ref={ref!r}: there is no file {path}", remedy="give the path of a Python file"
            )
        return ref

    @pydantic.field_validator("needs", mode="before")
    @classmethod
    def _one_name_or_several(cls, needs: object) -> object:
        """Return a single name as a tuple with one element, so that a run file may contain either form."""
        return (needs,) if isinstance(needs, str) else needs

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the function may read: log π_old, log μ and the columns listed in ``needs``."""
        return frozenset({"log_old", "log_mu", *self.needs})

    @cached_property
    def function(self) -> Formula:
        """The user's function, which :attr:`ref` names. Its file is executed when this attribute is first read. Raises
        :class:`~headrace.base.errors.ConfigError` if the file cannot be executed, defines no function of this name, or
        the function does not accept :attr:`options`."""
        path, _, name = self.ref.rpartition(":")
        module = vars(load_file(Path(path)))
        known = [key for key, value in module.items() if callable(value) and not key.startswith("_")]
        if name not in known:
            raise ConfigError(f"{path} has no function {name!r}", remedy=nearest(name, known))
        function: Formula = module[name]
        try:
            inspect.signature(function).bind(None, **self.options)
        except TypeError as error:
            parameters = ", ".join(inspect.signature(function).parameters)
            raise ConfigError(
                f"{self.ref} takes ({parameters}), and is called with the inputs and options {self.options}: {error}",
                remedy="give the options that it takes",
            ) from None
        return function

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Call the user's function with a micro-batch and the options, and return the loss of every token. Raises
        :class:`DataError` if the function returns anything but one value per token or a ``TokenLoss``."""
        value = self.function(inputs, **self.options)
        loss = value if isinstance(value, TokenLoss) else TokenLoss(tokens_N=value)
        self._refuse_other_shapes(loss.tokens_N, inputs.log_pi_N)
        return loss

    def _refuse_other_shapes(self, tokens_N: Tensor, log_pi_N: Tensor) -> None:
        """Raise :class:`~headrace.base.errors.DataError` unless ``tokens_N``, the result of the user's function, is a
        tensor with the shape of ``log_pi_N``, which means one value per token."""
        if not isinstance(tokens_N, type(log_pi_N)):
            problem = f"{self.ref} returned a {type(tokens_N).__name__}"
        elif tokens_N.shape != log_pi_N.shape:
            problem = f"{self.ref} returned the shape {tuple(tokens_N.shape)}, its inputs have {tuple(log_pi_N.shape)}"
        else:
            return
        raise DataError(problem, remedy="return one value per token, shaped like inputs.log_pi_N, without any mean")
