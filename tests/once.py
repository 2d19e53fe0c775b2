"""What several processes of one test run share: it is made by the first that needs it, and the others wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def shared_directory(factory: pytest.TempPathFactory, name: str) -> Path:
    """The directory ``name`` of this test run, the same in all of its processes."""
    own = factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"once-{name}"
    directory.mkdir(exist_ok=True)
    return directory


def once(directory: Path, name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, called by the first process that asks for ``name`` in this shared directory. Only one
    thing is made there at a time."""
    kept = directory / f"once-{name}"
    with FileLock(directory / "once.lock"):
        if not kept.exists():
            made = make()
            unfinished = kept.with_suffix(".part")
            unfinished.write_bytes(pickle.dumps(made))
            unfinished.rename(kept)
        found: T = pickle.loads(kept.read_bytes())
    return found
