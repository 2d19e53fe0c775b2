"""Whole runs whose agents work in sandboxes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.flow.ledger.opening import open_ledger
from headrace.models.tiny import TinySpec, make_tiny
from headrace.rollout.environments.data import load_rows
from headrace.run.session import evaluate, train
from headrace.run.session.checking import check_env
from tests.wings.bridges.conftest import PRINTABLE, TEMPLATE
from tests.wings.sandboxes.task_files import HARBOR, write_task
from tests.wings.sandboxes.test_mcp import SERVER


def make_model(directory: Path) -> Path:
    spec = TinySpec(
        vocab=PRINTABLE, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, max_positions=1024,
        init_std=0.3, chat_template=TEMPLATE,
    )  # fmt: skip
    return make_tiny(directory / "model", spec)


@pytest.mark.slow
def test_a_run_trains_on_task_directories_and_counts_what_cannot_be_attempted(tmp_path: Path) -> None:
    tests = "#!/bin/bash\nwc -c < /app/answer.sh > /logs/verifier/reward.txt\n"
    for number in range(3):
        write_task(tmp_path / f"tasks/good-{number}", HARBOR, **{"tests/test.sh": tests})
    write_task(tmp_path / "tasks/without-tests", HARBOR, **{"tests/test.sh": None})
    tree = {
        "model": {"path": str(make_model(tmp_path))},
        "data": {"path": str(tmp_path / "tasks")},
        "env": {"kind": "shell", "options": {"action": "line", "image": "machine", "commands": 2, "system": "Go."}},
        "engine": {"max_new_tokens": 6, "max_sequences": 16, "max_context": 1024},
        "flow": {"groups_per_step": 2, "group_size": 2},
        "launch": {"engine_threads": 1, "learner_threads": 1},
        "observe": {"view": "none", "report": False},
        "run": {"dir": str(tmp_path / "run"), "steps": 3},
    }
    summary = train(tree)
    assert summary.steps == 3
    assert summary.ledger.episodes.dropped["task_invalid"] >= 1
    episodes = open_ledger(tmp_path / "run").episodes(0)
    shown = [turn.extra for episode in episodes for turn in episode.turns if turn.stop_reason is not None]
    assert any("seconds" in columns for columns in shown)


@pytest.mark.slow
def test_an_evaluation_earns_what_the_tests_write(tmp_path: Path) -> None:
    tests = "#!/bin/bash\necho 0.5 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "tasks/one", HARBOR, **{"tests/test.sh": tests})
    kinds = ["jail", *(["bubblewrap"] if shutil.which("bwrap") else [])]
    for kind in kinds:
        options = {"sandbox": kind, "action": "line", "image": "machine", "commands": 1}
        found = evaluate({
            "model": {"path": str(make_model(tmp_path / kind))},
            "data": {"eval_path": str(tmp_path / "tasks"), "count": 1},
            "env": {"kind": "shell", "options": options},
            "engine": {"max_new_tokens": 4, "max_sequences": 4, "max_context": 1024},
            "launch": {"engine_threads": 1, "learner_threads": 1},
        })  # fmt: skip
        assert found.mean_reward == pytest.approx(0.5)


@pytest.mark.slow
def test_a_task_is_walked_before_a_run_with_its_own_solution(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/one", HARBOR)
    options = {"image": "machine", "commands": 2}
    report = check_env("shell", rows=load_rows(tmp_path / "tasks"), options=options)
    assert report.ok
    assert "rewards differ: from 0.25 to 1" in str(report)
    broken = write_task(tmp_path / "broken", HARBOR, **{"environment/Dockerfile": "FROM x\nRUN false\n"})
    report = check_env("shell", rows=load_rows(broken), options=options)
    assert "task_setup" in str(report)
    assert not report.ok


EXAMPLE = Path(__file__).parents[3] / "examples" / "repairs.py"
PATHS = {"model.path": "model", "data.path": "train", "data.eval_path": "held_out", "run.dir": "run"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_repairs_are_learned_from_branches_that_resume_their_worlds(tmp_path: Path) -> None:
    """The example as it stands: most first programs fail, and branches from within them say which repair was wrong."""
    subprocess.run([sys.executable, EXAMPLE, tmp_path], check=True)
    overrides = [
        *(f"{name}={tmp_path / path}" for name, path in PATHS.items()),
        *("launch.engine_threads=1", "launch.learner_threads=1", "observe.view=none", "observe.report=false"),
    ]
    summary = train(EXAMPLE.with_suffix(".toml"), overrides=overrides)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward_mean"] for step in steps]
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.7
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_before < 0.3
    assert summary.eval_after > 0.7
    assert sum(step["metrics"].get("pivots/branches", 0) for step in steps) > 500
    assert not any("branch_env_differs" in warning for warning in summary.warnings)


@pytest.mark.slow
def test_a_run_has_servers_in_its_sessions_and_counts_those_that_fail(tmp_path: Path) -> None:
    """A task earns something only if its server has been started; in the other one it ends at once."""
    tests = "#!/bin/bash\ntest -e /tmp/began && wc -c < /app/answer.sh > /logs/verifier/reward.txt\n"
    start = "touch /tmp/began\n"
    for name, server in {"good-1": start + SERVER, "good-2": start + SERVER, "bad": "exit 1"}.items():
        write_task(tmp_path / "tasks" / name, {**HARBOR, "tests/test.sh": tests, "environment/server.sh": server})
    options = {"action": "line", "image": "machine", "commands": 1, "system": "Go.", "mcp": {"one": "bash server.sh"}}
    tree = {
        "model": {"path": str(make_model(tmp_path))},
        "data": {"path": str(tmp_path / "tasks")},
        "env": {"kind": "shell", "options": options},
        "engine": {"max_new_tokens": 6, "max_sequences": 16, "max_context": 1024},
        "flow": {"groups_per_step": 2, "group_size": 2},
        "launch": {"engine_threads": 1, "learner_threads": 1},
        "observe": {"view": "none", "report": False},
        "run": {"dir": str(tmp_path / "run"), "steps": 3},
    }
    summary = train(tree)
    assert summary.steps == 3
    assert summary.ledger.episodes.dropped["session_mcp"] >= 1
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["reward_mean"] > 0 for step in steps)
