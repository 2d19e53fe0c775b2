"""Control of Python's garbage collector. It walks every object that it tracks: half a million after the imports of a
model library, which takes a quarter of a second in the middle of a step. These contexts exclude the objects that
exist before the work begins."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""The number of new objects after which the collector runs. A step makes thousands of objects, nearly all of which
reference counting frees."""
RARELY = 20
"""The number of collections of young objects between two collections of older ones."""


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector within this context, and exclude all objects that exist at its end from later
    collections. It is meant for imports: nearly all objects that an import makes stay alive, and collecting among them
    takes a fifth of the time of the import."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze_for_triton)


@contextmanager
def gc_frozen(young: int = YOUNG) -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection within this context. New objects are collected after
    every ``young`` of them, which is more than are usually alive together. Objects that were excluded before the
    context stay excluded after it."""
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
    """Make all objects visible to the garbage collector again when Python exits, if Triton is loaded: its bindings
    print a warning for each of their objects that is never collected. Without Triton this is not done, since it takes
    half a second."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
