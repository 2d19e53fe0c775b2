"""The benchmark of learning curves: what is kept between calls, how variants are compared, and a run of five steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.wings.bench import learning, run_benchmark
from headrace.wings.bench.learning_tasks import TASKS


def row(seed: int, age: int, area: float, goal_s: float | None = 10.0, part: str = "default") -> dict[str, Any]:
    """Return the figures of a run, as far as comparisons read them."""
    key = {"task": "demo", "seed": seed, "max_age": age, "part": part, "steps": 150}
    return {**key, "area": area, "goal_s": goal_s, "lowest_late": area, "mean_age": float(age), "tok_s": 100.0 - age}


def figures(made: list[dict[str, Any]]) -> Any:
    """Return a stand-in for a run, which yields ``area`` 0.5 and notes what it was asked for."""

    def measured(_task: object, _directory: object, key: dict[str, Any]) -> dict[str, Any]:
        made.append(key)
        return {name: value for name, value in row(key["seed"], key["max_age"], 0.5).items() if name not in key}

    return measured


def test_a_call_continues_where_one_before_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(learning, "_measure_run", figures(made))
    asked: dict[str, object] = {"seeds": "0,1", "ages": "0,2", "tasks": "demo", "parts": "default"}
    first = run_benchmark("learning", directory=str(tmp_path), **asked)
    assert len(made) == 4
    kept = tmp_path / learning.ROWS
    lines = kept.read_text("utf-8").splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]) + lines[-1][:20], encoding="utf-8")  # a call that was killed while it wrote
    again = run_benchmark("learning", directory=str(tmp_path), **asked)
    assert made[4:] == [{"task": "demo", "seed": 1, "max_age": 2, "part": "default", "steps": TASKS["demo"].steps}]
    assert again.rows == first.rows
    assert [json.loads(line)["seed"] for line in kept.read_text("utf-8").splitlines()] == [0, 0, 1, 1]
    run_benchmark("learning", directory=str(tmp_path), **{**asked, "steps": 5})
    assert len(made) == 9  # shorter runs are other runs


def test_variants_are_compared_with_the_synchronous_run_of_their_seed() -> None:
    rows = [row(0, 0, 0.8), row(1, 0, 0.5, goal_s=None), row(0, 2, 0.84, goal_s=5.0), row(1, 2, 0.45, goal_s=None)]
    (compared,) = learning._comparisons([*rows, row(2, 2, 0.9)])  # seed 2 has no synchronous run
    assert compared["seeds"] == 2
    assert compared["area"] == pytest.approx((1.05 + 0.9) / 2)
    assert compared["area_worst"] == pytest.approx(0.9)
    assert compared["goal_s"] == pytest.approx(0.75)  # half of the time, and twice never
    low, high = compared["area_95"]
    assert low == pytest.approx(0.9)
    assert high == pytest.approx(1.05)
    never = learning._comparisons([row(0, 0, 0.8), row(0, 2, 0.8, goal_s=None)])[0]
    assert math.isinf(never["goal_s"])
    named = {target.name: target.holds for target in learning._targets(rows, [compared])}
    assert named == {
        "area over tokens: demo, max_age 2, default / synchronous, mean": False,
        "area over tokens: demo, max_age 2, default / synchronous, worst seed": False,
    }


def test_the_interval_narrows_with_seeds() -> None:
    few, many = learning.confidence_interval([0.9, 1.1]), learning.confidence_interval([0.9, 1.1] * 20)
    assert few[0] < many[0] < 1.0 < many[1] < few[1]


@pytest.mark.parametrize(("option", "value"), [("tasks", "demi"), ("parts", "defalt"), ("seeds", "one")])
def test_unknown_names_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option}"):
        run_benchmark("learning", **{option: value})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", ["demo", "gym"])
def test_runs_of_five_steps(tmp_path: Path, task: str) -> None:
    """Every task has a model and rows, and a curve of the model before and after."""
    report = run_benchmark(
        "learning", directory=str(tmp_path), seeds="0", ages="0,1", tasks=task, parts="default", steps=10
    )
    before, after = report.rows[0]["curve"]
    assert before[0] == 0 < after[0]
    assert 0.2 < before[2] < 0.9
    assert report.rows[-1]["what"] == f"{task}, max_age 1, default / synchronous"
