"""What several tests share: it is made once for all processes of a test run, and holds what the selected tests need."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def shared_directory(factory: pytest.TempPathFactory, name: str) -> Path:
    """The directory ``name`` of this test run, the same in all of its processes."""
    own = factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"once-{name}"
    directory.mkdir(exist_ok=True)
    return directory


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of ``parameter`` in those tests of the requesting module that this test run has selected, so that a
    fixture of the module computes no case that nobody looks at."""
    tests = (item.callspec.params for item in request.session.items if item.path == request.path and _has_cases(item))
    return list(dict.fromkeys(params[parameter] for params in tests if parameter in params))


def _has_cases(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


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
