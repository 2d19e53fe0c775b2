"""One run that is stopped and killed in every way, and continues each time."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.run.session import load_config, train
from tests.run.session.runs import components, first_words, make_run, running, shared_buffers, verb, wait_gone
from tests.run.session.serial import SerialLoop, same_learner

STEPS = 14
SLOW_REWARD = """
    import time

    def reward(completion):
        time.sleep(0.03)
        return sum(character in "01234" for character in completion) / 4
"""


def test_a_run_that_is_stopped_and_killed_in_every_way_ends_with_the_weights_of_a_serial_loop(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 0},
        launch={"engine_restarts": 0},
        run={"dir": "run", "steps": STEPS, "checkpoint_every": 3},
    )
    run_dir = tmp_path / "run"
    steps = stop_by_ctrl_c(run_file, run_dir)
    kill_a_part(run_file, run_dir, "engine", begins_at=steps + 1)
    kill_a_part(run_file, run_dir, "learner")
    left = kill_the_controller(run_file, run_dir)

    printed = verb("train", run_file, "--resume")
    assert "resumed at step" in printed
    assert re.search(r"\ncontinued at step \d+: times, tokens, ages and mismatch are those since then\n", printed)
    assert not shared_buffers(left)
    summary = ended(run_dir, "finished")
    assert summary["steps"] == STEPS
    assert summary["ledger"]["groups"] == {"submitted": 28, "trained": 28, "dropped": {}, "in_flight": 0}
    assert summary["ledger"]["episodes"] == {"submitted": 112, "trained": 112, "dropped": {}, "in_flight": 0}
    assert not [warning for warning in summary["warnings"] if "other weights" in warning]

    SerialLoop(load_config(run_file), tmp_path / "buffer").train(tmp_path / "serial")
    last = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    assert same_learner(last, tmp_path / "serial")
    with pytest.raises(ConfigError, match="cannot be replayed: it has 5 lives"):
        train(run_file, overrides=[f"run.dir={tmp_path / 'again'}"], replay=run_dir)


def stop_by_ctrl_c(run_file: Path, run_dir: Path) -> int:
    """The first life, and a second program that wants its directory; the steps that were made."""
    with running("train", run_file) as life:
        life.until_step(3)
        with pytest.raises(ConfigError, match="is in use by another process"):
            train(run_file, resume=True)
        life.process.send_signal(signal.SIGINT)
        assert life.rest() == first_words(run_file)
        assert life.process.returncode == 0
        assert f"continue headrace train {run_file} --resume\n" in life.lines
    steps = ended(run_dir, "stopped")["steps"]
    assert 3 <= steps < STEPS
    assert f"step-{steps:06d}" in os.listdir(run_dir / "checkpoints")
    return steps


def kill_a_part(run_file: Path, run_dir: Path, role: str, begins_at: int | None = None) -> None:
    """The run must say so within 5 seconds, and leave nothing behind."""
    clock = RealClock()
    with running("train", run_file, "--resume") as life:
        first = life.until_step()
        assert begins_at in (None, first)
        pids = components(run_dir)
        killed_s = clock.now()
        os.kill(pids[role], signal.SIGKILL)
        words = life.rest()
        assert clock.now() - killed_s < 5.0
        assert life.process.returncode == 1
    assert f"error: {role} (pid {pids[role]}) was killed by SIGKILL" in words
    assert "remedy: fix the cause, then --resume" in words
    assert "Traceback" not in words
    assert f"{role} (pid {pids[role]}) was killed by SIGKILL" in ended(run_dir, "failed")["cause"]
    assert wait_gone(list(pids.values()), timeout_s=0.0) == []
    assert not shared_buffers(life.process.pid)


def kill_the_controller(run_file: Path, run_dir: Path) -> int:
    """Its parts must end by themselves, within 2 seconds; its process id."""
    with running("train", run_file, "--resume") as life:
        life.until_step()
        parts = [pid for role, pid in components(run_dir).items() if role != "controller"]
        assert len(parts) == 3
        life.process.kill()
        life.process.wait()
        assert wait_gone(parts, timeout_s=2.0) == []
    status = json.loads(verb("status", run_dir, "--json"))
    assert status["state"] == "killed"
    assert {part["state"] for part in status["components"]} == {"ended"}
    return life.process.pid  # whose weight buffer nobody was left to remove: the next start does, of any run


def ended(run_dir: Path, status: str) -> dict:
    """The summary, if it says ``status``; the books must balance."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == status
    for unit, fates in summary["ledger"].items():
        lost = fates["submitted"] - fates["trained"] - sum(fates["dropped"].values()) - fates["in_flight"]
        assert lost == 0, f"{unit}: {fates}"
    return summary


pytestmark = pytest.mark.timeout(300)
