"""A run with a critic: what is refused before it starts, and that it continues after its end as if it had not ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.policy.config import resolve
from headrace.run.session.config import load_config
from headrace.run.session.prepare import Inputs, prepare
from tests.run.session.runs import make_run, tiny_model


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", tiny_model(tmp_path / "model"), algo={"advantage.kind": "gae"})


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["algo.advantage=grpo", "learner.critic.lr=1e-4"], "learner.critic.lr=0.0001 has no effect", "'gae'"),
        (["learner.critic.clip=0.2"], "updates=1", ""),
        (["learner.parallel.data=2"], "works in one process only", "leave learner.parallel out"),
        (["learner.critic.warmup_steps=3"], "leaves none of run.steps=3", "set run.steps above"),
        (["learner.critic.lrr=1e-4"], "learner.critic.lrr is not a setting", "'lr'"),
        (["algo.advantage.lam=1.5"], "lam=1.5", ""),
    ],
)
def test_settings_that_cannot_work_are_refused(run_file: Path, overrides: list[str], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, overrides)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_path_of_the_critic_is_relative_to_the_run_file(run_file: Path) -> None:
    text = run_file.read_text() + '\n[learner.critic]\npath = "model"\n'
    run_file.write_text(text)
    assert load_config(run_file).learner.critic.path == str(run_file.parent / "model")


def test_loop_of_ones_own_has_no_critic() -> None:
    with pytest.raises(ConfigError, match="loop of its own has no critic"):
        resolve({"model": {"path": "m"}}, {"algo": {"advantage": {"kind": "gae"}}}, None, None)


def test_critic_that_is_made_for_shorter_samples_is_refused(run_file: Path, tmp_path: Path) -> None:
    short = tiny_model(tmp_path / "short", max_positions=6)
    with pytest.raises(ConfigError, match="was made for 6 tokens"):
        prepare(load_config(run_file, [f"learner.critic.path={short}"]), Inputs())


def test_run_with_a_critic_measures_it_and_resumes(run_file: Path) -> None:
    from headrace.run.session import train

    overrides = ["observe.view=none", "algo.advantage.lam=0.9", "learner.critic.lr=1e-3"]
    train(run_file, overrides=overrides)
    summary = train(run_file, overrides=[*overrides, "run.steps=4"], resume=True)
    assert summary.steps == 4
    lines = [json.loads(line) for line in (run_file.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["metrics"] for line in lines if "value_loss" in line.get("metrics", {})]
    assert len(measured) == 4
    assert all(metrics["value_loss"] >= 0 and metrics["critic_grad_norm"] > 0 for metrics in measured)
    assert list((run_file.parent / "run" / "checkpoints").glob("step-*4/critic.safetensors"))
