"""A run directory with everything a page can show, and one asked over HTTP without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headrace.base.clock import RealClock
from headrace.wings.view.app import make_app
from headrace.wings.view.run import OpenRun
from tests.wings.view.browsing import LET_IN, TOKEN
from tests.wings.view.synthetic import branching_episode, write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("view") / "additions", extra=[branching_episode(0, 0)])


@pytest.fixture
def client(run_dir: Path) -> Iterator[TestClient]:
    run = OpenRun(run_dir, RealClock())
    with TestClient(make_app([run], clock=RealClock(), token=TOKEN, ending=lambda: True), headers=LET_IN) as asked:
        yield asked
    run.close()
