"""A run that learns from a teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import NothingToLearn
from headrace.session import train
from tests.session.runs import make_run, tiny_model

INDIFFERENT = """
    def reward(completion):
        return 0.5
"""
SETTINGS = ["observe.view=none", "flow.max_idle_batches=2", "run.steps=4"]


def test_rewards_that_are_all_equal_end_a_run_unless_a_teacher_says_what_to_prefer(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    teacher = tiny_model(tmp_path / "teacher", hidden_size=48)
    with pytest.raises(NothingToLearn, match="got the same reward"):
        train(make_run(tmp_path / "alone", model, reward=INDIFFERENT), overrides=SETTINGS)
    run_file = make_run(
        tmp_path / "taught",
        model,
        reward=INDIFFERENT,
        algo={"advantage": "reverse_kl"},
        learner={"lr": 1e-2, "teacher.kind": "model", "teacher.path": str(teacher)},
    )
    train(run_file, overrides=SETTINGS)
    summary = json.loads((run_file.parent / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
