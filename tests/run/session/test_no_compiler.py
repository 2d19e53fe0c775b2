"""A machine without a C++ compiler: the engine is slower, and says so wherever people look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.session.runs import make_run, tiny_model

WORDS = "the compiled kernels are missing (no C++ compiler is installed"
REMEDY = "apt install g++"
COST = "sampling takes about twice as long"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of such a machine, whose cache holds no kernels of an earlier day either."""
    (tmp_path / "bin").mkdir()
    given = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "300"}
    return {**os.environ, **given}


def said(environment: dict[str, str], *arguments: str | Path) -> str:
    program = [sys.executable, "-c", "from headrace.run.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_without_kernels_says_so_where_people_look(tmp_path: Path, bare: dict[str, str]) -> None:
    run_file = make_run(tmp_path / "work", tiny_model(tmp_path / "model"))
    run_dir = tmp_path / "work" / "run"
    planned = said(bare, "train", run_file, "--dry-run")
    told = said(bare, "train", run_file)
    first_step = told.index("step 1/3")
    assert WORDS in told[:first_step]
    summary = json.loads((run_dir / "summary.json").read_text())
    facts = json.loads((run_dir / "parts.json").read_text())
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    warned = [event["text"] for event in events if event["level"] == "warning"]
    status = said(bare, "status", run_dir)
    for words in (planned, told, *warned, *summary["warnings"], facts["engine"]["fallback"], status):
        assert WORDS in words
        assert REMEDY in words
        assert COST in words
    assert len(warned) == len(summary["warnings"]) == 1


@pytest.mark.slow
def test_a_run_with_kernels_or_without_use_for_them_warns_of_nothing(tmp_path: Path, bare: dict[str, str]) -> None:
    run_file = make_run(tmp_path / "work", tiny_model(tmp_path / "model"))
    assert "kernels are missing" not in said(dict(os.environ), "train", run_file, "--dry-run")
    told = said(bare, "train", run_file, "--set", "engine.kernels=off")
    assert "kernels are missing" not in told
