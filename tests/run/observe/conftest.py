"""Runs that never happened, as directories."""

from functools import partial
from pathlib import Path

import pytest

from tests.run.observe.synthetic import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(write_run, tmp_path)
