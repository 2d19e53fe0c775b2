"""Control of Python's garbage collector, which traverses every object that it tracks. After the imports of a model
library there are half a million objects, and a collection in the middle of a step takes a quarter of a second. The
contexts in this module exclude the objects that exist before the work begins."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""The number of new objects after which the collector runs. A step creates thousands of objects, and reference counting
frees nearly all of them."""
RARELY = 20
"""The number of collections of young objects between two collections of older ones."""


@contextmanager
def gc_disabled() -> Iterator[None]:
    """A context that disables the garbage collector, and at its end excludes all existing objects from later
    collections. It is meant for imports: nearly all objects that an import creates stay alive, and collections would
    take a fifth of the time of the import."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze_for_triton)


@contextmanager
def gc_frozen(young: int = YOUNG) -> Iterator[None]:
    """A context that excludes the objects that exist at its start from garbage collection. New objects are collected
    after every ``young`` of them, which is more than are usually alive at the same time. Objects that were excluded
    before the context stay excluded after it."""
    before, excluded = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, RARELY, RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not excluded:
            gc.unfreeze()


def _unfreeze_for_triton() -> None:
    """Make all objects visible to the garbage collector again when Python exits, if Triton is loaded: the bindings of
    Triton print a warning for each of their objects that is never collected. Without Triton nothing is done, since this
    takes half a second."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
