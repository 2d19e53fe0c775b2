"""Whole runs over environments of other libraries."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.reward import load_reward
from headrace.run.session import evaluate, load_config, train
from tests.run.session.runs import make_run
from tests.wings.bridges.test_reasoning_gym import TASKS
from tests.wings.bridges.test_tools import SERVER

QUIET = ["observe.view=none"]


def bridged(model: Path, entry: str, options: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """The settings of a run over ``entry``."""
    return {
        "model": {"path": str(model)},
        "data": {"count": 4, "eval_count": 26},
        "env": {"kind": "bridge", "entry": entry, "options": options or {}},
        "engine": {"max_new_tokens": 4, "max_sequences": 32, "max_context": 1024},
        "launch": {"engine_threads": 1, "learner_threads": 1},
        **sections,
    }


def test_tasks_of_reasoning_gym_are_asked_and_scored_in_a_run(model_dir: Path) -> None:
    assert len(TASKS) >= 12
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in TASKS]
    found = evaluate(bridged(model_dir, "reasoning_gym/composite", {"datasets": parts}))
    assert (found.tasks, found.warnings) == (26, [])
    assert found.tokens > 26
    assert 0 <= found.mean_reward < 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_each_task_of_reasoning_gym_runs_by_itself(model_dir: Path, task: str) -> None:
    found = evaluate(bridged(model_dir, f"reasoning_gym/{task}", data={"eval_count": 4}))
    assert (found.tasks, found.warnings) == (4, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "options"),
    [
        ("textarena/GuessTheNumber-v0", {"max_turns": 3}),
        ("textarena/TicTacToe-v0", {"players": 2}),
    ],
)
def test_games_are_played_in_workers(model_dir: Path, entry: str, options: dict[str, Any]) -> None:
    found = evaluate(bridged(model_dir, entry, options, data={"eval_count": 4}))
    assert (found.tasks, found.warnings) == (4, [])


@pytest.mark.slow
def test_tools_of_a_server_are_offered_in_workers(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "tools.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "reward.py").write_text("def reward(completion):\n    return len(set(completion)) / 4\n")
    run = bridged(model_dir, f"mcp/{sys.executable} {tmp_path / 'tools.py'}", data={})
    run["env"]["reward"] = f"{tmp_path / 'reward.py'}:reward"
    found = evaluate(run, eval_data=[{"prompt": f"{number}?"} for number in range(4)])
    assert (found.tasks, found.warnings) == (4, [])
    assert found.mean_reward > 0


def test_what_a_library_refuses_ends_the_run_before_it_begins(model_dir: Path) -> None:
    with pytest.raises(EnvError, match="no task 'chain_sun'"):
        evaluate(bridged(model_dir, "reasoning_gym/chain_sun"))
    with pytest.raises(ConfigError, match="no bridge to 'reasoningym'"):
        evaluate(bridged(model_dir, "reasoningym/chain_sum"))


TRL_REWARDS = '''
    from trl.rewards import accuracy_reward, think_format_reward

    def digits(completions, prompts, target, **kwargs):
        """As TRL calls it: conversations, and a list for every column of the row."""
        assert len(prompts) == len(completions) == len(target)
        said = [completion[0]["content"] for completion in completions]
        return [sum(character.isdigit() for character in text) / want for text, want in zip(said, target)]
'''


def test_rewards_written_for_trl_score_a_run_as_they_are(tmp_path: Path, model_dir: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{number} digits"}], "target": 4.0} for number in range(8)]
    run_file = make_run(
        tmp_path, model_dir, reward=TRL_REWARDS, rows="".join(json.dumps(row) + "\n" for row in rows),
        env={"reward": "reward.py:digits"}, run={"steps": 2},
    )  # fmt: skip
    summary = train(run_file, overrides=QUIET)
    assert (summary.status, summary.steps) == ("finished", 2)


@pytest.mark.parametrize(
    ("name", "texts", "rewards"),
    [
        ("think_format_reward", ("<think>\nx\n</think>\ny", "y"), (1.0, 0.0)),
        ("accuracy_reward", (r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"), (1.0, 0.0)),
    ],
)
def test_trls_own_rewards_are_found_in_a_file_that_imports_them(
    tmp_path: Path, model_dir: Path, name: str, texts: tuple[str, ...], rewards: tuple[float, ...]
) -> None:
    run_file = make_run(tmp_path, model_dir, reward=TRL_REWARDS, env={"reward": f"reward.py:{name}"})
    prompt = [{"role": "user", "content": "a third?"}]
    request = ScoreCompletions(
        call=0, prompt=prompt, completions=texts, row={"prompt": prompt, "solution": r"$\frac{1}{3}$"}
    )
    with ThreadPoolExecutor(max_workers=1) as hands:
        scores = asyncio.run(load_reward(load_config(run_file).env.reward, hands).score(request))
    assert (scores.failure, scores.rewards) == ("", rewards)
