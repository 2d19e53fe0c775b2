"""Python's garbage collector walks every object that it knows: half a million after the imports of a model library,
a quarter of a second at a time, in the middle of a step. What is there when the work begins stays, and is set aside."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""New objects until the collector looks for garbage: a step makes thousands, nearly all of which need no collector to
go."""
RARELY = 20
"""How often it looks at the young ones between two looks at older ones."""


@contextmanager
def growing_heap() -> Iterator[None]:
    """Within this nothing is collected, and what it has made is not walked later: for imports, nearly all of whose
    objects stay, and a fifth of whose time would go into looking for those that do not."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_let_go)


@contextmanager
def settled_heap(young: int = YOUNG) -> Iterator[None]:
    """Within this, what existed before is not walked by the garbage collector, and what is new every ``young`` objects:
    more of them than come and go together."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, RARELY, RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _let_go() -> None:
    """Triton's bindings complain of every object of theirs that is not collected in the end; nobody else minds, and
    collecting takes half a second."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
