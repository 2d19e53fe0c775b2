"""Processes of a run that are stopped by a signal: told by name within the stall timeout, and the run continues."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.base.clock import RealClock
from headrace.run.session.directory import read_summary
from tests.rollout.environments.tasks import chat_model, make_env_run
from tests.run.session.runs import Running, components, headrace, running

ENDLESS = 100_000
WAITING = """
    import asyncio

    async def rollout(task, policy):
        await policy.chat("hello")
        await asyncio.sleep({seconds})
        return None
"""
DRAWN = """
    import random

    def reward(completion):
        return random.random()
"""


def a_run(directory: Path, *, seconds: float = 0.2, **sections: Any) -> Path:
    """Environments and rewards in processes, tokens of one version ago."""
    settled = {
        "flow": {"groups_per_step": 2, "group_size": 4, "max_age": 1},
        "learner": {"lr": 1e-4},
        **sections,
    }
    return make_env_run(
        directory,
        chat_model(directory / "tiny"),
        WAITING.format(seconds=seconds),
        "rollout",
        reward=DRAWN,
        env={"reward": "reward.py:reward"},
        **settled,
    )


def worker_below(pid: int) -> int:
    """The process that runs foreign code, below the one that keeps it."""
    below = psutil.Process(pid).children(recursive=True)
    return [each.pid for each in below if "headrace.launch.hosts.main" in " ".join(each.cmdline())][-1]


def pid_of(life: Running, run_dir: Path, what: str) -> int:
    """A process of the run: by its role, or the fork server, or the worker that a role keeps."""
    if what == "fork server":
        children = psutil.Process(life.process.pid).children()
        return next(each.pid for each in children if "headrace.launch.hosts.forkserver" in " ".join(each.cmdline()))
    role, _, part = what.partition("/")
    pid = components(run_dir)[role]
    return worker_below(pid) if part else pid


def until_said(life: Running, words: str) -> float:
    """Read up to a line with these words; how long that took."""
    clock = RealClock()
    begun_s = clock.now()
    assert life.process.stdout is not None
    for line in life.process.stdout:
        life.lines.append(line)
        if words in line:
            return clock.now() - begun_s
    raise AssertionError(f"it ended without saying {words!r}: {life.lines} {life.rest()}")


def balanced(run_dir: Path) -> None:
    """Whether every group that was begun is accounted for."""
    summary = read_summary(run_dir)
    assert summary is not None
    groups = summary["ledger"]["groups"]
    assert groups["submitted"] == groups["trained"] + sum(groups["dropped"].values()) + groups["in_flight"]


@pytest.mark.parametrize("what", ["learner", pytest.param("scorer-0/worker", marks=pytest.mark.slow)])
def test_a_stopped_process_is_named_while_the_run_waits_and_then_it_goes_on(tmp_path: Path, what: str) -> None:
    run_file = a_run(tmp_path, run={"dir": "run", "steps": ENDLESS, "stall_timeout_s": 4.0})
    with running("train", run_file) as life:
        life.until_step(3)
        pid = pid_of(life, tmp_path / "run", what)
        os.kill(pid, signal.SIGSTOP)
        said_s = until_said(life, f"stopped (SIGSTOP; kill -CONT {pid} lets it continue)")
        assert said_s < 8.0  # of which half is room for a busy machine
        role = what.partition("/")[0]
        assert life.lines[-1].startswith(f"warning: {role} (pid ")
        parts = json.loads(headrace("status", tmp_path / "run", "--json").stdout)["components"]
        assert any("stopped (SIGSTOP" in part["state"] for part in parts if part["role"] == role)
        os.kill(pid, signal.SIGCONT)
        until_said(life, "s, and continues")
        life.until_step()
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    balanced(tmp_path / "run")


@pytest.mark.slow
def test_a_stopped_controller_is_told_by_status_and_goes_on(tmp_path: Path) -> None:
    run_file = a_run(tmp_path, run={"dir": "run", "steps": ENDLESS, "stall_timeout_s": 4.0})
    with running("train", run_file) as life:
        done = life.until_step(3)
        os.kill(life.process.pid, signal.SIGSTOP)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(life.process.pid).wait(12.0)
        parts = json.loads(headrace("status", tmp_path / "run", "--json").stdout)["components"]
        assert parts[0]["state"] == f"stopped (SIGSTOP; kill -CONT {life.process.pid} lets it continue)"
        os.kill(life.process.pid, signal.SIGCONT)
        life.until_step(done + 5)
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    balanced(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "what",
    [
        *("learner", "learner-1", "engine", "teacher-other", "scorer-0", "scorer-0/worker", "environment-0"),
        *("environment-0/worker", "fork server"),
    ],
)
def test_a_process_of_each_kind_may_stand_still_for_100_seconds(tmp_path: Path, what: str) -> None:
    sections: dict[str, Any] = {"run": {"dir": "run", "steps": ENDLESS, "stall_timeout_s": 15.0}}
    overrides: list[str] = []
    if what == "learner-1":
        overrides = ["--set", "learner.parallel.data=2"]
    if what == "teacher-other":
        chat_model(tmp_path / "other", hidden_size=48)
        teachers = f"[{{kind='model', path='{tmp_path / 'other'}', engine={{name='other'}}}}]"
        overrides = ["--set", f"learner.teachers={teachers}", "--set", "algo.advantage='reverse_kl'"]
    run_file = a_run(tmp_path, **sections)
    clock = RealClock()
    with running("train", run_file, *overrides) as life:
        life.until_step(3)
        pid = pid_of(life, tmp_path / "run", what)
        stopped_s = clock.now()
        os.kill(pid, signal.SIGSTOP)
        assert until_said(life, "stopped (SIGSTOP; kill -CONT") < 20.0
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(life.process.pid).wait(100.0 - (clock.now() - stopped_s))
        if psutil.pid_exists(pid):  # else it has been replaced
            os.kill(pid, signal.SIGCONT)
        done = int(json.loads((tmp_path / "run" / "status.json").read_text())["steps_done"])
        life.until_step(done + 3)
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    balanced(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "files"])
def test_an_engine_that_stands_still_while_a_version_is_announced_stages_it_later(
    tmp_path: Path, transport: str
) -> None:
    """The engine has no sequences meanwhile: both batches wait in their environments."""
    run_file = a_run(
        tmp_path,
        seconds=3.0,
        sync={"transport": transport},
        run={"dir": "run", "steps": ENDLESS, "stall_timeout_s": 15.0},
    )
    with running("train", run_file) as life:
        life.until_step(3)
        pid = components(tmp_path / "run")["engine"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(life.process.pid).wait(20.0)
        os.kill(pid, signal.SIGCONT)
        until_said(life, "s, and continues")
        done = int(json.loads((tmp_path / "run" / "status.json").read_text())["steps_done"])
        life.until_step(done + 3)
        assert components(tmp_path / "run")["engine"] == pid
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    balanced(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_only_engine_is_replaced_when_it_is_stopped_for_ever_without_sequences(tmp_path: Path) -> None:
    run_file = a_run(
        tmp_path,
        seconds=3.0,
        launch={"engine_silence_s": 4.0},
        run={"dir": "run", "steps": ENDLESS, "stall_timeout_s": 15.0},
    )
    with running("train", run_file) as life:
        done = life.until_step(3)
        pid = components(tmp_path / "run")["engine"]
        os.kill(pid, signal.SIGSTOP)
        until_said(life, f"engine (pid {pid}) is stopped (SIGSTOP; kill -CONT {pid} lets it continue)")
        until_said(life, "and has owed an answer for 4 s: it was ended")
        life.until_step(done + 5)
        assert components(tmp_path / "run")["engine"] != pid
        assert not psutil.pid_exists(pid)
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    balanced(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("max_age", [0, 1])
def test_the_death_of_a_worker_makes_no_step_of_64_episodes_three_times_as_long(tmp_path: Path, max_age: int) -> None:
    run_file = a_run(
        tmp_path,
        seconds=2.0,
        flow={"groups_per_step": 8, "group_size": 8, "max_age": max_age},
        engine={"max_new_tokens": 4, "max_sequences": 64},
        run={"dir": "run", "steps": 16, "stall_timeout_s": 60.0},
    )
    with running("train", run_file) as life:
        life.until_step(5)
        kept = max(role for role in components(tmp_path / "run") if role.startswith("environment-"))
        os.kill(worker_below(components(tmp_path / "run")[kept]), signal.SIGKILL)
        life.rest()
    assert life.process.returncode == 0
    assert any(line.startswith("warning: an environment worker died (") for line in life.lines)
    ended_s = [json.loads(line)["wall_s"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    took_s = [after - before for before, after in itertools.pairwise(ended_s)]
    # with max_age 1, two batches of equal episodes end together, and every second step hardly waits: the usual step is
    # one that waits for its episodes, of which there are seven or more
    usual_s = statistics.quantiles(took_s, n=4)[-1]
    assert 2.0 < usual_s < max(took_s) < 3.0 * usual_s, took_s
