"""A run whose learner is killed continues by itself, where it may: from its last snapshot, each group trained once."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.errors import LearnerLost
from headrace.run.session import training
from tests.run.session.runs import components, make_run, running, verb

FLOW = {"groups_per_step": 2, "group_size": 4, "max_idle_batches": 100_000}


def killed(directory: Path, model_dir: Path, role: str, restarts: int, *more: str) -> tuple[int, str, str]:
    """The exit code of a run whose learner is killed once, and what it said."""
    run = {"dir": "run", "steps": 40, "checkpoint_every": 4}
    path = make_run(directory, model_dir, flow=FLOW, run=run)
    settings = [word for each in (f"launch.learner_restarts={restarts}", *more) for word in ("--set", each)]
    with running("train", path, *settings) as at:
        at.until_step(7)
        os.kill(components(directory / "run")[role], signal.SIGKILL)
        error = at.rest()
        return at.process.returncode, "".join(at.lines), error


def assert_whole(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 40)
    books = json.loads(verb("ledger", run_dir, "--json"))
    assert books["holds"]
    assert books["conservation"]["groups"]["trained"] == 80


def test_a_learner_that_is_killed_costs_no_group_and_no_hand(tmp_path: Path, model_dir: Path) -> None:
    code, said, error = killed(tmp_path, model_dir, "learner", 1)
    assert code == 0, said + error
    assert "was killed by SIGKILL (by hand, or because memory ran out); the run continues from step 4" in said
    assert_whole(tmp_path / "run")


@pytest.mark.slow
def test_without_leave_the_death_of_a_learner_ends_the_run_as_ever(tmp_path: Path, model_dir: Path) -> None:
    code, _, error = killed(tmp_path, model_dir, "learner", 0)
    assert code == 1
    assert "learner (pid" in error
    assert "then --resume" in error


@pytest.mark.slow
@pytest.mark.parametrize(("role", "transport"), [("learner", "shm"), ("learner-1", "shm"), ("learner-1", "group")])
def test_a_rank_that_is_killed_costs_no_group_and_no_hand(
    tmp_path: Path, model_dir: Path, role: str, transport: str
) -> None:
    ranks = ("learner.parallel.data=2", "engine.count=2", f"sync.transport={transport}")
    code, said, error = killed(tmp_path, model_dir, role, 1, *ranks)
    assert code == 0, said + error
    assert f"{role} (pid" in said
    assert_whole(tmp_path / "run")


def test_the_error_of_a_learner_keeps_nothing_of_the_life_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Controller:
        """What a life has in memory, with the files that it has mapped."""

    controllers: list[weakref.ref[Controller]] = []
    alive: list[bool] = []

    async def life(of: training.RunLife, _interrupts: object) -> Any:
        controller = Controller()
        controllers.append(weakref.ref(controller))
        if of.preceding_error is not None:
            gc.collect()
            alive.extend(each() is not None for each in controllers[:-1])
            return "the summary"
        try:
            raise KeyError("killed")
        except KeyError as error:
            raise LearnerLost("the learner has died", remedy="none") from error

    monkeypatch.setattr(training, "_train", life)
    monkeypatch.setattr(training, "has_ledger", lambda _: True)
    config: Any = SimpleNamespace(config=SimpleNamespace(launch=SimpleNamespace(learner_restarts=1)))
    nothing: Any = None
    first = training.RunLife(
        prepared=config, run_dir=tmp_path, locked_dir=nothing, recording=None, forks=None, preceding_error=None
    )  # fmt: skip
    assert training._run_with_restarts(first) == "the summary"
    assert alive == [False]
