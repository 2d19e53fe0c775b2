"""A run of every family that people bring is killed at once and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, FAST, family
from tests.run.session.runs import make_run, running, verb

STEPS = 4
NOT_REPLAYED = ("llama4", "llama4_text")


@pytest.mark.parametrize("name", [FAST[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])])
def test_run_that_is_killed_at_once_resumes_and_trains_every_group_once(name: str, tmp_path: Path) -> None:
    run_file = make_run(
        tmp_path,
        family(tmp_path / "tiny", name),
        engine={"max_new_tokens": 4, "max_sequences": 8, "max_context": 64},
        learner={"lr": 1e-3, "keep_routing": name not in NOT_REPLAYED},
        run={"dir": "run", "steps": STEPS, "checkpoint_every": 1},
    )
    with running("train", run_file) as life:
        life.until_step(2)
        life.process.kill()
        life.process.wait()
    assert "resumed at step" in verb("train", run_file, "--resume")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["ledger"]["groups"] == {"submitted": 8, "trained": 8, "dropped": {}, "in_flight": 0}
    assert not [warning for warning in summary["warnings"] if "other weights" in warning]
