"""Context variables of a layer that is computed again in the backward pass.

    forward: pass sets variables ──▶ layer reads them          backward: the variables have other values, or none
                        └── its checkpoint stores the values ──▶ layer reads these, and computes the same

Values that belong to a pass are usually passed as keyword arguments of the model, which a checkpoint stores. Routers,
and the mixers of some families, receive no keyword arguments: they read context variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any


class ContextValues(AbstractContextManager[None]):
    """A context manager that sets context variables to given values. It may be entered several times."""

    def __init__(self, values: Mapping[ContextVar[Any], Any]) -> None:
        """Store ``values``, the value of each variable inside the context."""
        self._values = values
        self._entered: list[list[tuple[ContextVar[Any], Token[Any]]]] = []
        """For each entry that has not been left, the tokens that restore the variables."""

    def __enter__(self) -> None:
        """Set the variables to their values."""
        self._entered.append([(variable, variable.set(value)) for variable, value in self._values.items()])

    def __exit__(self, *_: object) -> None:
        """Restore the previous values of the variables."""
        for variable, token in self._entered.pop():
            variable.reset(token)


def carrying(
    *variables: ContextVar[Any],
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint``. When a layer is computed again in the backward pass,
    ``variables`` have the same values as in the forward pass. Torch calls the function in each forward pass. It returns
    a context for that pass, which does nothing, and a context for the recomputation."""
    return lambda: (nullcontext(), ContextValues({variable: variable.get() for variable in variables}))
