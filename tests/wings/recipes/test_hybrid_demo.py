"""The demo with a small Qwen3.5, whose first layer is linear attention, learns as it does with the default model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.run.session.runs import command

GOAL = 0.9
"""Mean reward on held-out sums, of 1."""


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_hybrid_learns_the_demo(tmp_path: Path) -> None:
    asked = ("demo", "--hybrid", "--json", "--dir", tmp_path / "demo", "--set", "run.steps=150")
    done = subprocess.run(command(*asked), capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "demo" / "model" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    summary = json.loads(done.stdout)
    assert summary["status"] == "finished"
    assert summary["eval_after"] >= GOAL > summary["eval_before"]
