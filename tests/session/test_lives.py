"""One run that is stopped and killed in every way, and goes on each time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from headrace.clock import RealClock
from headrace.session import load_config
from tests.session.runs import Running, components, headrace, make_run, running, shared_buffers, wait_gone
from tests.session.serial import SerialLoop, same_learner

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
        run={"dir": "run", "steps": STEPS, "checkpoint_every": 3},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        life.until_step(4)
        life.process.send_signal(signal.SIGINT)
        assert life.rest() == ""
        assert life.process.returncode == 0
    summary = ended(run_dir, "stopped")
    steps = summary["steps"]
    assert 4 <= steps < STEPS
    assert "step-" + f"{steps:06d}" in os.listdir(run_dir / "checkpoints")

    with running("train", run_file, "--resume") as life:
        assert life.until_step() == steps + 1
        words = died(life, run_dir, "engine")
        assert "remedy: mend the cause, then --resume" in words
    assert "engine" in ended(run_dir, "failed")["cause"]

    with running("train", run_file, "--resume") as life:
        life.until_step()
        died(life, run_dir, "learner")
    ended(run_dir, "failed")
    assert not shared_buffers(life.process.pid)

    with running("train", run_file, "--resume") as life:
        life.until_step()
        others = [pid for role, pid in components(run_dir).items() if role != "controller"]
        assert len(others) == 3
        life.process.kill()
        life.process.wait()
        assert wait_gone(others, timeout_s=2.0) == []
    assert shared_buffers(life.process.pid)  # nobody was left to remove it
    status = json.loads(headrace("status", run_dir, "--json").stdout)
    assert status["state"] == "killed"
    assert {part["state"] for part in status["components"]} == {"ended"}

    done = headrace("train", run_file, "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert not shared_buffers(life.process.pid)
    summary = ended(run_dir, "finished")
    assert summary["steps"] == STEPS
    assert summary["ledger"]["groups"] == {"submitted": 28, "trained": 28, "dropped": {}, "in_flight": 0}
    assert summary["ledger"]["episodes"] == {"submitted": 112, "trained": 112, "dropped": {}, "in_flight": 0}
    assert not [warning for warning in summary["warnings"] if "other weights" in warning]

    SerialLoop(load_config(run_file), tmp_path / "buffer").train(tmp_path / "serial")
    last = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    assert same_learner(last, tmp_path / "serial")


def died(life: Running, run_dir: Path, role: str) -> str:
    """Kill a part; the run must say so within 5 seconds. What it said."""
    pid = components(run_dir)[role]
    clock = RealClock()
    killed_s = clock.now()
    os.kill(pid, signal.SIGKILL)
    words = life.rest()
    assert clock.now() - killed_s < 5.0
    assert life.process.returncode == 1
    assert f"error: {role} (pid {pid}) was killed by SIGKILL" in words
    assert "Traceback" not in words
    return words


def ended(run_dir: Path, status: str) -> dict:
    """The summary, if it says ``status``; the books must balance."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == status
    for unit, fates in summary["ledger"].items():
        lost = fates["submitted"] - fates["trained"] - sum(fates["dropped"].values()) - fates["in_flight"]
        assert lost == 0, f"{unit}: {fates}"
    return summary


pytestmark = pytest.mark.timeout(300)
