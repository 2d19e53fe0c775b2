"""Every recipe does what its row says: each is run, and its files are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.run.session.recipes import recipes
from headrace.wings.compare.running import ComparisonConfig, compare
from headrace.wings.recipes.demo import build_demo
from tests.wings.compare.rows import (
    BUSY_ENGINE,
    BUSY_LEARNER,
    PROMISES,
    STEPS,
    check_depth,
    check_interrupt,
    check_whatever_is_busy,
)
from tests.wings.compare.seen import Seen


def run(run_file: Path, directory: Path, name: str, settings: tuple[str, ...]) -> Seen:
    terms = ComparisonConfig(
        recipes=[name],
        directory=directory,
        run_file=run_file,
        steps=STEPS,
        overrides=[*settings, "data.eval_path="],
    )
    (row,) = compare(terms).rows
    assert (row.status, row.cause) == ("finished", "")
    return Seen(directory / name)


def bytes_of(directory: Path) -> int:
    from safetensors import safe_open

    with safe_open(directory / "model" / "model.safetensors", "np") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - no mapping


def keeps_its_row(name: str, run_file: Path, directory: Path) -> None:
    promise, size = PROMISES[name], bytes_of(run_file.parent)
    busy_learner = run(run_file, directory / "busy-learner", name, BUSY_LEARNER)
    check_whatever_is_busy(promise, busy_learner, size)
    check_depth(promise, busy_learner)
    busy_engine = run(run_file, directory / "busy-engine", name, BUSY_ENGINE)
    check_whatever_is_busy(promise, busy_engine, size)
    check_interrupt(promise, busy_engine)


def test_every_recipe_has_a_row_that_is_checked() -> None:
    assert set(PROMISES) == set(recipes())


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo(tmp_path_factory.mktemp("demo"), seed=0).run_file


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
@pytest.mark.parametrize("name", PROMISES)
def test_a_recipe_does_what_its_row_says(name: str, demo: Path, tmp_path: Path) -> None:
    keeps_its_row(name, demo, tmp_path)
