"""Parts of a real run that are killed while weights are on their way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from headrace.base.clock import RealClock
from tests.run.session.runs import components, make_run, running, shared_buffers, verb, wait_gone

STEPS = 60
TRIES = 50
TOLD_WITHIN_S = 30.0
"""Half of ``sync.deadline_s``: it is the death that is noticed, and not that something takes long."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def sync_waits_for(run_dir: Path) -> str:
    """What the run's status says that the sync waits for."""
    waits = json.loads((run_dir / "status.json").read_text())["waits"]
    return next(line for line in waits if line.split()[0] == "sync")


def caught(run_dir: Path, engine: psutil.Process, words: str) -> bool:
    """Whether the status, both next times that it is renewed, says that the sync waits for ``words``."""
    for _ in range(2):
        before = (run_dir / "status.json").stat().st_mtime_ns
        while (run_dir / "status.json").stat().st_mtime_ns == before:
            assert wait_gone([engine.pid], timeout_s=0.02) == [engine.pid]
        if words not in sync_waits_for(run_dir):
            return False
    return True


def kill_while(run_file: Path, role: str, words: str, *given: str) -> None:
    """Stop the engine, each time a little later after the end of a step, until the sync waits for ``words`` meanwhile;
    kill ``role`` then."""
    run_dir, clock = run_file.parent / "run", RealClock()
    with running("train", run_file, *given) as life:
        life.until_step()
        pids = components(run_dir)
        engine = psutil.Process(pids["engine"])
        for attempt in range(TRIES):
            assert wait_gone([engine.pid], timeout_s=0.003 * (attempt % 12)) == [engine.pid]
            engine.suspend()
            if caught(run_dir, engine, words):
                break
            engine.resume()
            life.until_step()
        else:
            raise AssertionError(f"never caught waiting for {words}")
        killed_s = clock.now()
        os.kill(pids[role], signal.SIGKILL)
        if role != "engine":
            engine.resume()
        said = life.rest()
        assert clock.now() - killed_s < TOLD_WITHIN_S
        assert life.process.returncode == 1
    assert f"error: {role} (pid {pids[role]}) was killed by SIGKILL" in said
    assert "remedy: fix the cause, then --resume" in said
    assert "Traceback" not in said
    assert wait_gone(list(pids.values()), timeout_s=0.0) == []
    assert not shared_buffers(life.process.pid)


@pytest.mark.parametrize(
    ("transport", "codec", "interrupt"),
    [("shm", "delta", "drain"), ("http", "full", "drain"), ("files", "delta", "drain")],
)
def test_learner_killed_while_staging_and_engine_killed_while_committing_are_named_and_the_run_recovers(
    tmp_path: Path, model_dir: Path, transport: str, codec: str, interrupt: str
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        engine={"max_new_tokens": 20, "max_sequences": 16},
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 2, "max_idle_batches": STEPS},
        sync={"transport": transport, "codec": codec, "interrupt": interrupt},
        launch={"engine_restarts": 0},
        run={"dir": "run", "steps": STEPS, "checkpoint_every": 1},
    )
    kill_while(run_file, "learner", "the staging of version")
    kill_while(run_file, "engine", "the commit of version", "--resume")
    assert "resumed at step" in verb("train", run_file, "--resume")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    groups = summary["ledger"]["groups"]
    assert (groups["submitted"], groups["in_flight"]) == (groups["trained"] + sum(groups["dropped"].values()), 0)
