"""A demo that is interrupted prints the command that continues it, under a recipe too."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.run.session.config import load_config
from headrace.wings.recipes.demo.build import lay_out
from tests.run.session.runs import command, running

STEPS = "run.steps=60"


@pytest.mark.parametrize("seed", [0, 7])
def test_the_run_file_of_a_demo_keeps_its_seed(tmp_path: Path, seed: int) -> None:
    assert load_config(lay_out(tmp_path, seed=seed)).run.seed == seed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["", "verl"])
def test_the_command_that_an_interrupted_demo_prints_continues_it(tmp_path: Path, recipe: str) -> None:
    like = ("--like", recipe) if recipe else ()
    with running("demo", *like, "--dir", tmp_path / "demo", "--set", STEPS, "--set", "observe.view=plain") as life:
        done = life.until_step(3)
        life.process.send_signal(signal.SIGINT)
        life.rest()
    assert life.process.returncode == 0
    (told,) = (line.removeprefix("continue ") for line in life.lines if line.startswith("continue "))
    program, *words = shlex.split(told)
    assert (program, f"--set={STEPS}" in words) == ("headrace", True)
    continued = subprocess.run(command(*words), capture_output=True, text=True, timeout=300, check=False)
    assert continued.returncode == 0, continued.stderr
    assert f"step {done}/60" not in continued.stdout
    summary = json.loads((tmp_path / "demo" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 60)
