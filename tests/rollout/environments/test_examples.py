"""The examples of several agents, as they stand in examples/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.run.session import train
from headrace.wings.recipes.demo import build_demo
from tests.rollout.environments.tasks import chat_model, episodes

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENTS = {
    "self_play": {"first", "second"},
    "proposer_solver": {"proposer"},
    "proposer_solver_lora": {"proposer"},
    "debate": {"debater/0", "debater/1", "judge"},
}
"""Who answers in the games of a model that knows nothing."""


@pytest.mark.parametrize(
    "name",
    [
        "proposer_solver",
        "debate",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("self_play", "proposer_solver_lora")),
    ],
)
def test_an_example_of_several_agents_runs(tmp_path: Path, name: str) -> None:
    model = chat_model(tmp_path / "model", init_std=0.02)
    rows = "".join(json.dumps({"prompt": f"{a}+{a + 1}=", "answer": 2 * a + 1}) + "\n" for a in range(10, 22))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = [
        *(f"model.path={model}", "flow.groups_per_step=2", "flow.group_size=4", "run.steps=2", "data.eval_path="),
        *("launch.engine_threads=1", "launch.learner_threads=1", "observe.view=none", "observe.report=false"),
        *(f"run.dir={tmp_path / 'run'}", "flow.max_idle_batches=100"),
    ]
    if name == "debate":
        overrides.append(f"data.path={tmp_path / 'rows.jsonl'}")
    summary = train(EXAMPLES / f"{name}.toml", overrides=overrides)
    assert (summary.status, summary.steps) == ("finished", 2)
    assert not summary.ledger.episodes.dropped
    found = episodes(tmp_path / "run", summary.ledger.groups.submitted)
    assert {agent for episode in found for agent in episode.agent_rewards} >= AGENTS[name]
    if name == "self_play":
        assert all(sum(episode.agent_rewards.values()) == 0 for episode in found)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo(tmp_path_factory.mktemp("demo"), seed=0).directory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), [
    ("self_play", 0.6, 0.8), ("proposer_solver", 0.55, 0.6), ("debate", 0.5, 0.6), ("proposer_solver_lora", 0.55, 0.65)
])  # fmt: skip
def test_an_example_learns_on_the_model_of_the_demo(
    tmp_path: Path, demo: Path, name: str, before: float, after: float
) -> None:
    """Held-out games and sums, before and after."""
    overrides = [f"model.path={demo / 'model'}", f"run.dir={tmp_path / 'run'}", "observe.view=none"]
    rows: dict[str, Any] = {"debate": ["train", "held_out"], "proposer_solver": ["", "held_out"], "self_play": ["", ""]}
    train_rows, held_out = rows[name.removesuffix("_lora")]
    overrides += [f"data.path={demo / train_rows}.jsonl"] if train_rows else []
    overrides += [f"data.eval_path={demo / held_out}.jsonl"] if held_out else []
    summary = train(EXAMPLES / f"{name}.toml", overrides=overrides)
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_before <= before
    assert summary.eval_after >= after
