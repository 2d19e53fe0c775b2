"""Give a layer that is computed again in the backward pass what it had the first time.

    forward: pass sets variables ──▶ layer reads them          backward: other values, or none, by then
                        └── its checkpoint keeps the values ──▶ layer reads those, and computes the same

What belongs to a pass is passed down with the keywords of the model, and a checkpoint keeps those. A router gets no
keywords, nor do the mixers of some families: they read context variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any


class ContextValues(AbstractContextManager[None]):
    """A context manager inside which context variables have these ``values``; it may be entered several times."""

    def __init__(self, values: Mapping[ContextVar[Any], Any]) -> None:
        self._values = values
        self._entered: list[list[tuple[ContextVar[Any], Token[Any]]]] = []

    def __enter__(self) -> None:
        """Set the variables to the values."""
        self._entered.append([(variable, variable.set(value)) for variable, value in self._values.items()])

    def __exit__(self, *_: object) -> None:
        """Restore the values that the variables had before."""
        for variable, token in self._entered.pop():
            variable.reset(token)


def carrying(
    *variables: ContextVar[Any],
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint``, with which a layer that is computed again in the backward
    pass finds the values that ``variables`` had the first time. Torch calls it in each forward pass: it returns a
    context for that pass, which does nothing, and one for the repetition."""
    return lambda: (nullcontext(), ContextValues({variable: variable.get() for variable in variables}))
