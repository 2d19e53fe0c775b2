"""Whole runs on real processes: what they learn, keep, count and say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import headrace as library
from headrace.base.errors import ConfigError, NoRewards, NothingToLearn
from headrace.run.session import load_config
from tests.run.session.runs import make_run, tiny_model, verb
from tests.run.session.serial import SerialLoop, same_learner

NUMBERS = {
    "eval_before", "eval_after", "reward_first", "reward_last", "steps", "tokens_generated", "tokens_trained", "wall_s",
    "generated_tok_s", "trained_tok_s", "engine_idle_frac", "learner_idle_frac", "exposed_sync_frac", "max_token_age",
    "mismatch_kl",
}  # fmt: skip
"""The keys of ``summary.json`` that hold one number."""

FILES = {
    "checkpoints", "checksums.xxh3", "config.json", "events.jsonl", "interleaving-engine.jsonl", "ledger.sqlite",
    "live.json", "lock", "logs", "metrics.jsonl", "parts.json", "report", "status.json", "summary.json", "trace.jsonl",
}  # fmt: skip

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

GROUP_REWARD = """
    import asyncio

    async def reward(prompts, completions, answer, **columns):
        assert all(prompt[0]["role"] == "user" for prompt in prompts), prompts
        await asyncio.sleep(0.02 * (answer[0] % 3))
        texts = [completion[0]["content"] for completion in completions]
        return [sum(character in "01234" for character in text) / 4 for text in texts]
"""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def check_summary(summary: Mapping[str, Any]) -> None:
    """What other programs read is there, and the figures fit each other."""
    assert {key for key in NUMBERS if isinstance(summary[key], int | float)} == NUMBERS
    assert 0 <= summary["commit_gap_ms"]["p50"] <= summary["commit_gap_ms"]["p99"]
    for key in ("engine_idle_frac", "learner_idle_frac", "exposed_sync_frac", "eval_before", "eval_after"):
        assert 0 <= summary[key] <= 1, key
    ages = {int(age): tokens for age, tokens in summary["age_histogram"].items()}
    assert max(ages) == summary["max_token_age"]
    assert sum(ages.values()) == summary["tokens_trained"] <= summary["tokens_generated"]
    assert summary["generated_tok_s"] == pytest.approx(summary["tokens_generated"] / summary["wall_s"])
    assert summary["trained_tok_s"] == pytest.approx(summary["tokens_trained"] / summary["wall_s"])
    assert summary["versions"] == [0, summary["steps"]]
    assert abs(summary["mismatch_kl"]) < 1e-6
    assert summary["mismatch_abs"] < 1e-4
    for fates in (summary["ledger"][unit] for unit in ("groups", "episodes", "tokens")):
        assert set(fates) == {"submitted", "trained", "dropped", "in_flight"}
        assert fates["submitted"] == fates["trained"] + sum(fates["dropped"].values()) + fates["in_flight"]
    assert summary["ledger"]["tokens"]["trained"] == summary["tokens_trained"]


def test_a_synchronous_run_gives_the_weights_of_a_serial_loop_and_leaves_everything_it_promises(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 0},
        data={"path": "rows.jsonl", "eval_path": "rows.jsonl"},
        run={"dir": "run", "steps": 5, "checkpoint_every": 2, "keep_checkpoints": 2},
        observe={"view": "plain", "report": True},
    )
    run_dir = tmp_path / "run"
    printed = verb("train", run_file, "--json")
    summary = read(run_dir / "summary.json")
    assert json.loads(printed) == summary
    assert (summary["status"], summary["steps"], summary["max_token_age"]) == ("finished", 5, 0)
    check_summary(summary)
    assert {path.name for path in run_dir.iterdir()} == FILES
    assert (run_dir / "report" / "report.html").exists()
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(5))
    assert read(run_dir / "config.json")["flow"]["max_age"] == 0

    SerialLoop(load_config(run_file), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(run_dir / "checkpoints" / "step-000005", tmp_path / "serial")

    status = json.loads(verb("status", run_dir, "--json"))
    assert (status["state"], status["version"]) == ("finished", 5)
    assert [part["role"] for part in status["components"]] == ["controller", "engine", "learner", "scorer-0"]
    assert {part["state"] for part in status["components"]} == {"ended"}
    assert set(status["components"][0]) == {"role", "pid", "state", "version", "device", "restarts", "node", "parent"}
    books = json.loads(verb("ledger", run_dir, "--json"))
    assert books["holds"] is True
    assert books["conservation"] == summary["ledger"]

    with pytest.raises(ConfigError, match="holds a run already"):
        library.train(run_file)
    with pytest.raises(ConfigError, match=r"run.steps=5, and the run has 5 steps behind it"):
        library.train(run_file, resume=True)
    assert read(run_dir / "summary.json") == summary

    evaluation = json.loads(verb("eval", run_dir, "--json"))
    assert evaluation["mean_reward"] == summary["eval_after"] != summary["eval_before"]
    assert evaluation["tasks"] == 12


def test_an_asynchronous_run_keeps_every_trained_token_within_the_bound(tmp_path: Path) -> None:
    chat = "".join(
        json.dumps({"prompt": [{"role": "user", "content": f"{a}+{a + 1}"}], "answer": a}) + "\n" for a in range(9)
    )
    run_file = make_run(
        tmp_path,
        tiny_model(tmp_path / "chat", chat_template=TEMPLATE),
        reward=GROUP_REWARD,
        rows=chat,
        data={"path": "rows.jsonl", "eval_path": "rows.jsonl"},
        env={"reward": "reward.py:reward", "reward_workers": 2},
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 2},
        run={"dir": "run", "steps": 12},
    )
    summary = library.train(run_file, overrides=["observe.view=none"])
    tree = read(tmp_path / "run" / "summary.json")
    check_summary(tree)
    assert summary.status == "finished"
    assert 1 <= summary.max_token_age <= 2
    assert summary.sequences_restarted == 0
    assert summary.ledger.groups.trained == 24
    assert summary.ledger.groups.dropped == {}
    books = json.loads(verb("ledger", tmp_path / "run", "--json"))
    assert {int(age) for age in books["ages"]} <= {0, 1, 2}


BAD_REWARD = """
    import os, threading

    def reward(completion, deed):
        match deed:
            case "raise": raise RuntimeError("no verdict")
            case "nan": return float("nan")
            case "none": return None
            case "hang": threading.Event().wait()
            case "crash": os._exit(3)
            case "text": return "good"
        return sum(character in "01234" for character in completion) / 4
"""


@pytest.mark.slow
def test_rows_that_fail_in_every_way_are_counted_drops_and_the_rest_goes_on(tmp_path: Path, model_dir: Path) -> None:
    deeds = ["raise", "nan", "none", "hang", "crash", "text", *["good"] * 6]
    rows = [{"prompt": "1+2=", "deed": deed} for deed in deeds] + [{"prompt": "1" * 30, "deed": "long"}]
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=BAD_REWARD,
        rows="".join(json.dumps(row) + "\n" for row in rows),
        env={"reward": "reward.py:reward", "reward_timeout_s": 1.5},
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 1},
        run={"dir": "run", "steps": 5},
    )
    summary = library.train(run_file, overrides=["observe.view=none"])
    assert summary.status == "finished"
    assert summary.steps == 5
    groups = summary.ledger.groups
    assert groups.trained == 10
    assert set(groups.dropped) == {
        "reward_error", "reward_nan", "reward_none", "reward_timeout", "reward_crashed", "prompt_too_long",
    }  # fmt: skip
    said = "\n".join(summary.warnings)
    assert "reward_error: RuntimeError: no verdict at reward.py:6" in said
    assert "reward_error: returned a str, not a number" in said
    assert "reward_nan: returned nan" in said
    assert "reward_timeout: no reward for 1.5 s" in said
    assert "row 13: 30 prompt tokens, 34 with the answer, do not fit the context of 32: dropped" in said
    for fates in (groups, summary.ledger.episodes, summary.ledger.tokens):
        assert fates.submitted == fates.trained + sum(fates.dropped.values()) + fates.in_flight


def test_a_reward_that_is_none_for_every_answer_is_told_without_the_table_of_loops(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path, model_dir, reward="def reward(completion): completion.strip()", flow={"max_failed_groups": 2}
    )
    with pytest.raises(NoRewards, match="None means that an answer does not count") as error:
        library.train(run_file, overrides=["observe.view=none"])
    assert "\n" not in error.value.problem


def test_a_reward_that_never_differs_ends_the_run_in_words_with_its_work_kept(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward="def reward(completion): return 0.25",
        flow={"groups_per_step": 2, "group_size": 2, "max_idle_batches": 4},
        run={"dir": "run", "steps": 50, "checkpoint_every": 2},
    )
    with pytest.raises(NothingToLearn, match=r"in 4 steps in a row .* got the same reward \(the last: 0.25\)") as error:
        library.train(run_file, overrides=["observe.view=none"])
    assert "\n" not in error.value.problem, "a table of loops helps nobody here"
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed"
    assert "same reward" in summary["cause"]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()
    assert read(tmp_path / "run" / "status.json")["components"][0]["state"] == "ended"
