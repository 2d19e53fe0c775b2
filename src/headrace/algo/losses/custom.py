"""A loss from the user's own file."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss
from headrace.errors import ConfigError, nearest

Formula = Callable[..., Any]


class Custom(AnchoredLoss):
    """What ``ref`` returns: a function ``f(inputs: LossInputs, **options)`` to one value per token, or a ``TokenLoss``.

    Source: the file it names. ``headrace check loss`` says whether it keeps the contract.
    """

    kind: Literal["custom"] = "custom"
    """Selects this loss."""
    ref: str
    """``"path/to/file.py:function"``; the path is taken from where the run is started."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments that the function is called with, beside the inputs."""
    anchor: Anchor = "old"
    """``"mu"`` says that the function takes its own ratio against μ, so that no correction is laid on top."""
    reduction: ClassVar[str] = "token_mean"

    @pydantic.field_validator("ref")
    @classmethod
    def _names_a_file(cls, ref: str) -> str:
        path, colon, name = ref.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise ConfigError(f"algo.loss.ref={ref!r} names no function", remedy="write it as 'my_losses.py:my_loss'")
        if not Path(path).is_file():
            raise ConfigError(
                f"algo.loss.ref={ref!r}: there is no file {path}", remedy="give the path of a Python file"
            )
        return ref

    def columns(self) -> frozenset[Column]:
        """π_old and μ."""
        return frozenset({"log_old", "log_mu"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        value = load(self.ref)(inputs, **self.options)
        return value if isinstance(value, TokenLoss) else TokenLoss(tokens_N=value)


@cache
def load(ref: str) -> Formula:
    """The function that ``ref`` names; runs the file. :class:`ConfigError` says what is wrong with either."""
    path, _, name = ref.rpartition(":")
    functions = inspect.getmembers(_module(path), inspect.isfunction)
    found = dict(functions).get(name)
    if found is None:
        raise ConfigError(f"{path} has no function {name!r}", remedy=nearest(name, [known for known, _ in functions]))
    return found


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file", remedy="give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}", remedy="mend the file"
        ) from error
    return module
