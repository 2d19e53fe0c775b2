"""A run that makes several updates of each batch: what its ledger and metrics say of them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.flow.ledger.opening import SQLITE_FILE, open_ledger
from headrace.run.session import load_config, train
from tests.run.session.runs import components, make_run, running, tiny_model, verb
from tests.run.session.serial import same_learner


def test_the_ledger_says_how_many_updates_a_step_made(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run_file = make_run(tmp_path / "all", model, algo={"epochs": 3, "minibatches": 2})
    train(load_config(run_file))
    run_dir = tmp_path / "all/run"
    with closing(sqlite3.connect(run_dir / SQLITE_FILE)) as db:
        assert db.execute("SELECT step, updates FROM steps").fetchall() == [(0, 6), (1, 6), (2, 6)]
    with closing(open_ledger(run_dir)) as ledger:
        kept = ledger.conservation()
        assert kept.holds
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    books = json.loads(verb("ledger", run_dir, "--json"))
    assert (books["steps"], books["updates"]) == (3, 18)
    assert [(step["version"], step["metrics"]["updates"]) for step in steps] == [(1, 6), (2, 6), (3, 6)]
    assert sum(step["trained_tokens"] for step in steps) == kept.tokens.trained


def test_more_parts_than_groups_are_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="some would have no group"):
        load_config({"model": {"path": "m"}}, ["algo.minibatches=9", "flow.groups_per_step=8"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_of_several_updates_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    model, steps = tiny_model(tmp_path / "model"), 12
    several = {
        "algo": {"epochs": 2, "minibatches": 2},
        "flow": {"groups_per_step": 2, "group_size": 4, "max_age": 0},
        "run": {"dir": "run", "steps": steps, "checkpoint_every": 3},
    }
    whole, killed = (make_run(tmp_path / name, model, **several) for name in ("whole", "killed"))
    verb("train", whole)
    for part, step in (("controller", 4), ("learner", 7)):
        with running("train", killed, *(["--resume"] if part == "learner" else [])) as life:
            life.until_step(step)
            os.kill(components(tmp_path / "killed/run")[part], signal.SIGKILL)
            life.rest()
            assert life.process.returncode != 0
    assert "resumed at step" in verb("train", killed, "--resume")
    last = [tmp_path / name / "run/checkpoints" / f"step-{steps:06d}" for name in ("whole", "killed")]
    assert same_learner(*last)
    with closing(open_ledger(tmp_path / "killed/run")) as ledger:
        assert ledger.conservation().holds
    with closing(sqlite3.connect(tmp_path / "killed/run" / SQLITE_FILE)) as db:
        assert db.execute("SELECT step, updates FROM steps").fetchall() == [(step, 4) for step in range(steps)]
