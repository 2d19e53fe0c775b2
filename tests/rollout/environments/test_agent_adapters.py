"""Whole runs in which several agents train adapters of their own; and what of that cannot be, refused at load."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.base.config import validate
from headrace.base.errors import ConfigError, EnvError, ModelError
from headrace.base.types.episode import EpisodeGraph
from headrace.flow.ledger.opening import open_ledger
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.lora import Switch
from headrace.policy.config import PolicyConfig
from headrace.run.session import evaluate, load_config, train
from headrace.run.session.explain import explain
from headrace.run.session.exporting import export
from headrace.run.session.prepare import Inputs, prepare
from headrace.run.session.replaying import replay
from tests.rollout.environments.tasks import episodes
from tests.rollout.environments.test_agents_in_runs import duel, gap, spoken
from tests.run.session.runs import components, running

ROWS = 'env.agents=[{name="a", kind="trained"}, {name="b", kind="trained"}]'
ADAPTERS = ("model.lora.rank=4", 'model.lora.agents=["a", "b"]')
QUIET = ("observe.view=none", *ADAPTERS)


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir())


def moved(adapter: Path) -> float:
    """How far an adapter has gone from where it computed nothing."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return sum(float(tensor.norm()) for name, tensor in tensors.items() if "lora_B" in name)


def replayed(run_dir: Path) -> tuple[int, list[int]]:
    """How many versions a fresh learner gave bit for bit that was trained on the ledger's batches, and the others."""
    with closing(open_ledger(run_dir)) as ledger:
        found = replay(run_dir, ledger)
    return len(found.agree), found.differ


def test_two_agents_train_their_own_adapters_in_one_run(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(
        tmp_path, model_dir, "a", "b", learner={"lr": 3e-2}, flow={"max_age": 0},
        run={"steps": 3, "checkpoint_every": 2},
    )  # fmt: skip
    summary = train(run_file, overrides=[*QUIET, ROWS])
    assert summary.status == "finished", summary.cause
    run_dir = tmp_path / "run"
    found = episodes(run_dir, summary.ledger.groups.submitted)
    last = newest(run_dir)
    assert min(moved(last / "agents" / name) for name in "ab") > 0.1
    assert moved(last) == 0  # nobody asked the policy itself
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [metrics for metrics in lines if "grad_norm" in metrics]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["mismatch_abs"] < 1e-5  # each token under the adapter that sampled it
        norms = [metrics[f"agent/{name}/grad_norm"] for name in "ab"]
        assert metrics["grad_norm"] == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)
    final_answers_are_each_agents_own(found, model_dir, run_dir)
    assert replayed(run_dir) == (4, [])


def final_answers_are_each_agents_own(found: list[EpisodeGraph], base: Path, run_dir: Path) -> None:
    """Those of the version that the second snapshot holds: under it, and under no other agent's adapter."""
    lora = LoraConfig(rank=4, agents=("a", "b"))
    model = load_model(
        ModelConfig(path=str(base), lora=lora).with_snapshot(str(run_dir / "checkpoints" / "step-000002"))
    )
    switch, gaps = Switch(model), dict[tuple[str, str], list[float]]()
    said = [(episode, place) for episode in found for place in spoken(episode, "a") + spoken(episode, "b")]
    newest = [(each, place) for each, place in said if set(each.turns[place].tokens.versions_T.tolist()) == {2}]
    for agent in "ab":
        with switch.on(agent):
            for episode, place in newest:
                gaps.setdefault((agent, episode.turns[place].author), []).append(abs(gap(model, episode, place)))
    assert max(*gaps["a", "a"], *gaps["b", "b"]) < 1e-4
    assert min(max(gaps["a", "b"]), max(gaps["b", "a"])) > 1e-2


@pytest.mark.slow
def test_a_learner_of_two_agents_that_is_killed_goes_on_exactly(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(
        tmp_path, model_dir, "a", "b", learner={"lr": 3e-2}, flow={"max_age": 1},
        run={"steps": 12, "checkpoint_every": 3},
    )  # fmt: skip
    settings = [word for each in (*ADAPTERS, ROWS, "launch.learner_restarts=0") for word in ("--set", each)]
    with running("train", run_file, *settings) as program:
        program.until_step(5)
        os.kill(components(tmp_path / "run")["learner"], signal.SIGKILL)
        program.rest()
    assert program.process.returncode == 1
    summary = train(run_file, overrides=[*QUIET, ROWS, "launch.learner_restarts=0"], resume=True)
    assert (summary.status, summary.steps) == ("finished", 12)
    for fates in (summary.ledger.groups, summary.ledger.episodes, summary.ledger.tokens):
        assert fates.submitted == fates.trained + sum(fates.dropped.values()) + fates.in_flight
    agreed, differ = replayed(tmp_path / "run")
    assert differ == []
    assert agreed >= 12


@pytest.mark.slow
def test_each_agent_is_exported_and_evaluated_by_its_name(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(
        tmp_path, model_dir, "a", "b", learner={"lr": 3e-2}, run={"steps": 2, "checkpoint_every": 1},
        data={"path": "rows.jsonl", "eval_path": "rows.jsonl"},
    )  # fmt: skip
    train(run_file, overrides=[*QUIET, ROWS])
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="an adapter for each of policy, a, b") as said:
        export(run_dir, tmp_path / "out")
    assert "--agent a" in said.value.remedy
    with pytest.raises(ConfigError, match=r"--agent c: .* holds none of that name"):
        export(run_dir, tmp_path / "out", agent="c")
    alone = export(run_dir, tmp_path / "b", "separate", agent="b")
    assert (alone.kind, alone.agent) == ("adapter", "b")
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"agents", "optimizer.safetensors"} & names
    whole = export(run_dir, tmp_path / "merged", agent="a")
    assert whole.kind == "merged adapter"
    merged = load_model(ModelConfig(path=str(tmp_path / "merged")))
    adapted = load_model(
        ModelConfig(path=str(model_dir), lora=LoraConfig(rank=4, adapter=str(newest(run_dir) / "agents" / "a")))
    )
    ids, plan = torch.arange(3, 9), PackedPlan([6])
    with torch.no_grad():
        torch.testing.assert_close(forward(merged, ids, plan), forward(adapted, ids, plan), rtol=1e-4, atol=1e-5)
    assert export(run_dir, tmp_path / "policy", agent="policy").agent == ""
    found = evaluate(run_file, overrides=[*ADAPTERS, ROWS, f"model.lora.adapter={newest(run_dir)}"])
    assert not found.warnings


@pytest.mark.slow
def test_without_tables_the_names_of_the_adapters_are_all_there_are(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "bb", flow={"max_failed_groups": 2})
    with pytest.raises(EnvError, match=r"agent 'bb' is asked for"):
        train(run_file, overrides=QUIET)


def config(agents: list[str], rows: dict[str, str], **sections: Any) -> dict[str, Any]:
    tables = [{"name": name, "kind": kind} for name, kind in rows.items()]
    env = {"kind": "rollout", "entry": "e.py:rollout", "agents": tables}
    return {"model": {"path": "m", "lora": {"agents": agents}}, "env": env, **sections}


@pytest.mark.parametrize(
    ("agents", "rows", "sections", "words"),
    [
        (["a", "a"], {}, {}, "model.lora.agents names 'a' twice"),
        (["a.b"], {}, {}, "model.lora.agents"),
        (["default"], {}, {}, "peft takes 'default'"),
        (["lora_A"], {}, {}, "peft takes 'lora_A'"),
        (["policy"], {}, {}, "'policy' is taken"),
        (["user"], {}, {}, "'user' is taken"),
        (["solvr"], {"solver": "trained"}, {}, "'solvr' is not among env.agents.*did you mean 'solver'"),
        (["solver"], {"solver": "frozen"}, {}, "'solver' is to train an adapter, and in env.agents it is the weights"),
        (["a"], {}, {"env": {"reward": "r.py:reward"}}, "'a' is never asked: with env.kind='single_turn'"),
        (["a"], {}, {"engine": {"kind": "sglang"}, "sync": {"interrupt": "drain"}}, "'sglang' has no model.lora"),
    ],
)  # fmt: skip
def test_agents_that_cannot_have_adapters_are_refused(
    agents: list[str], rows: dict[str, str], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        load_config(config(agents, rows, **sections))


def test_full_weights_have_no_place_for_agents_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"model\.agents is not a setting"):
        load_config({"model": {"path": "m", "agents": ["a", "b"]}})


def test_a_loop_of_ones_own_refuses_agents() -> None:
    with pytest.raises(ConfigError, match="knows no agents"):
        validate(PolicyConfig, {"model": {"path": "m", "lora": {"agents": ["a"]}}})


def test_an_adapter_to_begin_with_must_be_there_for_every_agent(tmp_path: Path, model_dir: Path) -> None:
    lora = LoraConfig(rank=4, agents=("a",), adapter=str(model_dir))
    with pytest.raises(ModelError, match="holds no usable adapter"):
        load_model(ModelConfig(path=str(model_dir), lora=lora))


def test_the_dry_run_says_who_trains_an_adapter(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b")
    rows = 'env.agents=[{name="a", kind="trained"}, {name="b", kind="trained"}, {name="c", kind="trained"}]'
    told = explain(prepare(load_config(run_file, [*ADAPTERS, rows]), Inputs()))
    assert "Agent 'a' trains an adapter of its own, beside the policy's." in told
    assert "Agent 'c' is the policy under training." in told
    assert "Agent 'b' is the policy" not in told
