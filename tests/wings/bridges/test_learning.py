"""A task of another library is learned: the example of docs/bridges.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.run.session import train

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_learns_a_task_of_reasoning_gym(tmp_path: Path) -> None:
    made = [sys.executable, str(ROOT / "examples" / "arithmetic.py"), str(tmp_path / "model")]
    subprocess.run(made, check=True, capture_output=True, timeout=1200)
    changes = {"model.path": tmp_path / "model", "run.dir": tmp_path / "run", "run.steps": 90, "data.eval_count": 200}
    overrides = [f"{name}={value}" for name, value in changes.items()]
    summary = train(ROOT / "examples" / "arithmetic.toml", overrides=[*overrides, "observe.view=none"])
    assert summary.status == "finished"
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_after > summary.eval_before + 0.07
