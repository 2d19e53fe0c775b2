"""Runs with one sample per prompt: for baselines that are not made of siblings."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.run.session import load_config, train
from tests.run.session.runs import make_run


@pytest.mark.parametrize(
    ("advantage", "works"),
    [
        ("gae", True),
        ("reinforce_pp", True),
        ({"kind": "reinforce_pp", "group_baseline": True}, False),
        ("grpo", False),
        ("rloo", False),
    ],
)
def test_single_samples_are_for_baselines_that_are_not_made_of_siblings(advantage: object, works: bool) -> None:
    tree = {"model": {"path": "m"}, "flow": {"group_size": 1}, "algo": {"advantage": advantage}}
    if works:
        assert load_config(tree).flow.min_episodes == 1
        return
    with pytest.raises(ConfigError, match=r"flow.group_size=1 .*one by itself earns no credit") as refused:
        load_config(tree)
    assert "flow.group_size >= 2" in refused.value.remedy
    assert "'gae'" in refused.value.remedy


def test_groups_of_several_of_which_one_is_enough_need_such_a_baseline_too() -> None:
    with pytest.raises(ConfigError, match=r"flow.min_episodes=1 with algo.advantage='grpo'"):
        load_config({"model": {"path": "m"}, "flow": {"min_episodes": 1}})
    load_config({"model": {"path": "m"}, "flow": {"min_episodes": 1}, "algo": {"advantage": "reinforce_pp"}})


@pytest.mark.slow
def test_a_run_of_ppo_with_one_sample_per_prompt_trains_every_one_of_them(tmp_path: Path, model_dir: Path) -> None:
    flow = {"groups_per_step": 8, "group_size": 1, "max_idle_batches": 2}
    run_file = make_run(tmp_path / "work", model_dir, flow=flow, run={"dir": "run", "steps": 4})
    summary = train(run_file, overrides=["observe.view=none", "algo.advantage=gae"])
    assert (summary.status, summary.steps) == ("finished", 4)
    assert summary.tokens_trained > 0
    assert not summary.warnings
