"""Rewards of several components in whole runs: real processes, a tiny model."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.load import load_toml, validate
from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.trace import Span
from headrace.flow.ledger import SqliteLedger
from headrace.run.observe.jsonl import read_jsonl
from headrace.run.session import RunConfig, load_config, train
from tests.run.session.runs import REWARD, make_run, tiny_model

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
    if completion[:1] < "4":
        raise ValueError("small")
    return 0.0
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
    assert any("'flaky' failed and counts as its default: reward_error" in warning for warning in summary.warnings)
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


def test_a_reward_for_trl_is_trained_on_and_what_it_logs_is_kept(tmp_path: Path, model_dir: Path) -> None:
    reward = """
        def reward(completions, completion_ids, trainer_state, log_metric, log_extra, answer, **columns):
            log_metric("mean length", sum(map(len, completion_ids)) / len(completion_ids))
            log_metric("step", trainer_state.global_step)
            log_extra("gold", answer)
            return [float(len(set(ids))) for ids in completion_ids]
    """
    summary = train(make_run(tmp_path, model_dir, reward=reward, flow={"max_age": 0}))
    assert summary.status == "finished"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["metrics"]["logged/step"] for step in steps] == [0.0, 1.0, 2.0]
    assert all(1 <= step["metrics"]["logged/mean_length"] <= 4 for step in steps)
    ledger = SqliteLedger.open(tmp_path / "run" / "ledger.sqlite")
    try:
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        for attempt in ledger.attempts(0):
            for episode in ledger.episodes(attempt.number):
                assert episode.turns[-1].extra == {"gold": rows[attempt.row]["answer"]}
    finally:
        ledger.close()


def test_an_optional_reward_that_never_works_ends_the_run_with_its_cause(tmp_path: Path, model_dir: Path) -> None:
    judge = {"kind": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    rubric = [{"ref": "reward.py:reward"}, {**judge, "optional": True, "default": 0.0}]
    tree = {**load_toml(make_run(tmp_path, model_dir)), "env": {"rewards": rubric}}
    for section, key in (("model", "path"), ("data", "path"), ("run", "dir")):
        tree[section][key] = str(tmp_path / tree[section][key])
    rubric[0]["ref"] = f"{tmp_path}/reward.py:reward"
    with pytest.raises(EnvError, match=r"'judge' has failed for each of the first 8 answers(.|\n)*cannot be reached"):
        train(tree)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["steps"] == 0
    assert "cannot be reached: ConnectError" in told["reward_failures"]["judge"]["first_cause"]
    assert any("the reward 'judge' failed" in warning for warning in told["warnings"])


def test_a_parameter_that_nobody_gives_is_refused_before_anything_starts(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(tmp_path, model_dir, reward="def reward(completions, solution, **columns): return [0.0]")
    with pytest.raises(EnvError, match="requires the parameter 'solution'"):
        train(run_file)
    assert not (tmp_path / "run").exists()
