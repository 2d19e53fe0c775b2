"""A real run that is resumed, whose engine dies when the snapshot it was resumed from has made room for newer ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.run.session.runs import components, make_run, running, verb

STEPS = 200


@pytest.mark.slow
def test_an_engine_starts_again_when_the_snapshot_of_the_beginning_is_gone(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        run={"steps": STEPS, "checkpoint_every": 5, "keep_checkpoints": 1},
        launch={"engine_restarts": 2},
    )
    verb("train", run_file, "--set", "run.steps=5")
    run_dir = tmp_path / "run"
    with running("train", run_file, "--resume") as life:
        life.until_step(11)
        assert not (run_dir / "checkpoints" / "step-000005").exists()
        os.kill(components(run_dir)["engine"], signal.SIGKILL)
        life.until_step(life.until_step() + 3)
        life.process.send_signal(signal.SIGINT)
        said = life.rest()
    assert life.process.returncode == 0, said
    assert any("engine" in line and "serves again" in line for line in life.lines)
