"""The example does what it says, on a model that knows nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from headrace.base.config.user_code import load_file
from headrace.base.types.observation import StepRecord
from headrace.policy import Policy
from headrace.run.observe import METRICS_FILE, JsonlWriter, write_report
from headrace.run.observe.jsonl import read_steps
from headrace.wings.recipes.demo.task import VOCAB, row
from tests.policy.builders import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_example_trains_and_leaves_a_curve(tmp_path, capsys):
    model = tiny(tmp_path / "model", VOCAB)
    for name in ("train", "held_out"):
        rows = [row((10 + number, 20)) for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    policy = Policy.load(model, lr=1e-3, loss="dapo", engine={"max_sequences": 256})
    with JsonlWriter[StepRecord](tmp_path / METRICS_FILE) as metrics:
        asyncio.run(load_file(EXAMPLE).train(policy, tmp_path, metrics, steps=3))
    assert policy.version == 3
    assert [step.version for step in read_steps(tmp_path / METRICS_FILE)] == [1, 2, 3]
    assert capsys.readouterr().out.count("the engine stood still") == 3
    assert write_report(tmp_path).stat().st_size > 10_000


def test_example_fits_on_a_page():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
