"""Rewards of several components in whole runs: real processes, a tiny model."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.config.load import validate
from headrace.errors import ConfigError
from headrace.observe.jsonl import read_jsonl
from headrace.session import RunConfig, load_config, train
from headrace.types.trace import Span
from tests.session.runs import REWARD, make_run, tiny_model

RUBRIC = [
    {"kind": "function", "name": "digits", "ref": "reward.py:reward"},
    {"kind": "exact", "name": "starts", "weight": 0.5, "pattern": "^[0-4]", "answer_column": "small"},
    {"kind": "function", "name": "steps", "ref": "steps.py:step", "by_turn": True, "clamp": [0.0, 0.5]},
    {"kind": "function", "name": "flaky", "ref": "steps.py:broken", "weight": 3.0, "optional": True, "default": 0.0},
]
STEPS = """
async def step(completion, history, turn):
    assert turn == 0 and history.endswith("=")
    return len(completion) / 4

def broken(completion):
    raise ValueError("always")
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def rows() -> str:
    lines = [{"prompt": f"{a}+{a + 1}=", "small": list("01234")} for a in range(12)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_components_and_process_rewards_are_added_up_kept_and_credited(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(tmp_path, model_dir, reward=REWARD, rows=rows(), env={}, algo={"advantage": "step"})
    (tmp_path / "steps.py").write_text(STEPS)
    text = run_file.read_text().replace('[env]\nreward = "reward.py:reward"\n', "")
    run_file.write_text(text + "".join("[[env.rewards]]\n" + _toml(each) for each in RUBRIC))
    summary = train(load_config(run_file))
    assert summary.status == "finished"
    assert any("'flaky' failed and counts as 0: reward_error" in warning for warning in summary.warnings)
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as db:
        found = db.execute("SELECT reward, reward_parts FROM episodes WHERE status = 'scored'").fetchall()
    assert found
    for reward, told in found:
        parts = json.loads(told)
        assert list(parts) == ["digits", "starts", "steps", "flaky"]
        assert parts["steps"] <= 0.5
        assert reward == pytest.approx(parts["digits"] + 0.5 * parts["starts"] + parts["steps"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/digits", "reward/starts", "reward/steps", "reward/flaky"} <= lines[-1]["metrics"].keys()
    lanes = {span.lane for span in read_jsonl(tmp_path / "run" / "trace.jsonl", Span)}
    assert {"scoring turns", "reward digits", "reward steps"} <= lanes


def _toml(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def config(**sections: Any) -> RunConfig:
    return validate(RunConfig, {"model": {"path": "m"}, **sections})


EXACT = {"kind": "exact"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env": {"rewards": [EXACT, EXACT]}}, "two env.rewards are called 'exact'"),
        ({"env": {"rewards": [EXACT], "reward": "f.py:f"}}, "are both set"),
        ({"env": {"rewards": [{**EXACT, "weight": 0}]}}, "nothing could be earned"),
        ({"env": {"rewards": [EXACT], "reward_workers": 2}}, "env.reward_workers=2 has no effect"),
        ({"env": {"rewards": [{"kind": "exakt"}]}}, "exact"),
        ({"env": {"rewards": [{**EXACT, "patern": "x"}]}}, "did you mean 'pattern'"),
        (
            {"env": {"rewards": [EXACT, {**EXACT, "name": "b", "weight": 2}]}, "algo": {"advantage": "gdpo"}},
            "the weights of env.rewards do not count",
        ),
        (
            {"env": {"rewards": [EXACT]}, "algo": {"advantage": {"kind": "gdpo", "weights": [1, 2]}}},
            "has 2 entries for 1 env.rewards",
        ),
    ],
)
def test_nonsense_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**sections)
