"""Whole runs of which every environment is on a machine that joins."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rollout.environments.tasks import chat_model, make_env_run
from tests.run.session.runs import Running, command, headrace, running

PROGRAM = """
    import json, os, urllib.request

    task = json.load(open(os.environ["HEADRACE_TASK"]))
    assert "//PLACE:" in os.environ["OPENAI_BASE_URL"]  # where others find the run
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    print(json.dumps({"reward": sum(character in "01234" for character in text) / 4}))
"""
ROLLOUT = """
    async def rollout(task, policy):
        reply = await policy.chat(task["prompt"])
        return sum(character in "01234" for character in reply.message.content) / 4
"""
HOST = "127.0.0.2"
"""Of this machine, and not the one at which things are found by default."""


def address() -> str:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return f"{HOST}:{one.getsockname()[1]}"


def join(run_dir: Path, *more: str) -> subprocess.Popen[str]:
    begun = command("join", run_dir, "--wait", "60", *more)
    return subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(run: Running, run_dir: Path) -> dict[str, int]:
    """The books of a run that has come to its end."""
    error = run.rest(120)
    assert run.process.returncode == 0, error
    told = headrace("ledger", run_dir, "--json")
    books = json.loads(told.stdout)
    assert books["holds"]
    groups: dict[str, int] = books["conservation"]["groups"]
    return groups


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_of_programs_all_of_them_on_another_machine(tmp_path: Path) -> None:
    run_of_programs(tmp_path, join_at=address(), place=HOST)


def run_of_programs(tmp_path: Path, *, join_at: str, place: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(textwrap.dedent(PROGRAM).replace("PLACE", place))
    env = {"kind": "program", "entry": "", "command": f"{sys.executable} {agent}", "workers": 0, "concurrency": 4}
    model = chat_model(tmp_path / "tiny")
    run_file = make_env_run(tmp_path / "run", model, ROLLOUT, "rollout", env=env,
                            launch={"engine_threads": 1, "learner_threads": 1, "join": join_at})  # fmt: skip
    told = headrace("train", run_file, "--dry-run").stdout
    assert "with workers for environments, all of them run there." in told
    with join(run_file.parent / "run") as machine, running("train", run_file) as run:
        try:
            run.until_step(1)
            assert any("waits for a machine to join at" in line for line in run.lines)
            status = json.loads((run_file.parent / "run" / "status.json").read_text())
            nodes = {part["role"].partition("-")[0]: part["node"] for part in status["components"]}
            assert (nodes["environment"], nodes["engine"]) == ("127.0.0.1", "")
            groups = ended(run, run_file.parent / "run")
            words = machine.communicate(timeout=30)[0]
        finally:
            machine.kill()
    assert groups["trained"] == 6
    assert (machine.returncode, words.splitlines()[-1]) == (0, "the run has ended")
    assert not (run_file.parent / "run" / "join.json").exists()


def long_run(tmp_path: Path, join_at: str) -> Path:
    return make_env_run(
        tmp_path / "run", chat_model(tmp_path / "tiny"), ROLLOUT, "rollout", env={"workers": 0},
        launch={"engine_threads": 1, "learner_threads": 1, "join": join_at},
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 2, "max_idle_batches": 100},
        run={"dir": "run", "steps": 60},
    )  # fmt: skip


@contextmanager
def joining() -> Iterator[list[subprocess.Popen[str]]]:
    """Machines, which do not outlive the body."""
    machines: list[subprocess.Popen[str]] = []
    try:
        yield machines
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_come_and_are_killed_and_each_group_is_trained_once(tmp_path: Path) -> None:
    run_file = long_run(tmp_path, address())
    run_dir = run_file.parent / "run"
    with joining() as machines, running("train", run_file) as run:
        machines.append(join(run_dir, "--workers", "2"))
        for step in (10, 20, 30):
            run.until_step(step)
            machines.append(join(run_dir))
            machines[-2].send_signal(signal.SIGKILL)
        assert ended(run, run_dir)["trained"] == 120
