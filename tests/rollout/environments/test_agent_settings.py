"""Agents as a run file names them: what cannot be served is refused at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, HeadraceError
from headrace.models import LoraConfig, ModelConfig
from headrace.rollout.environments.agents import AdapterAgent, FrozenAgent, ModelAgent, TrainedAgent
from headrace.run.session import load_config
from headrace.run.session.prepare import Inputs, prepare
from tests.rollout.environments.tasks import chat_model, make_env_run

ROLLOUT = "async def rollout(task, policy):\n    return 0.0\n"


def config(*agents: dict[str, Any], **env: Any) -> dict[str, Any]:
    settled = {"kind": "rollout", "entry": "env.py:rollout", **env}
    return {"model": {"path": "m"}, "env": {**settled, "agents": list(agents)}}


@pytest.mark.parametrize(
    ("agents", "env", "words"),
    [
        ([{"name": "a", "kind": "trained"}] * 2, {}, "two env.agents are called 'a'"),
        ([{"name": "policy", "kind": "frozen"}], {}, "the name 'policy' is taken"),
        ([{"name": "user", "kind": "trained"}], {}, "the name 'user' is taken"),
        ([{"name": "a/1", "kind": "trained"}], {}, r"env.agents\[0\].*name='a/1'"),
        ([{"name": "a", "kind": "frosen"}], {}, "env.agents.*kind='frosen' does not exist"),
        ([{"name": "a"}], {}, "does not say its kind"),
        ([{"name": "a", "kind": "adapter"}], {}, "path is missing"),
        ([{"name": "a", "kind": "frozen", "path": "x"}], {}, "path is not a setting"),
        ([{"name": "a", "kind": "frozen"}], {"kind": "env", "entry": "e.py:E"}, "env.agents has no effect"),
    ],
)
def test_agents_that_cannot_be_are_refused(agents: list[dict[str, Any]], env: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config(*agents, **env))


def test_paths_of_agents_are_relative_to_the_run_file_and_names_on_a_hub_stay(tmp_path: Path) -> None:
    (tmp_path / "models" / "coach").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[env]\nkind = "rollout"\nentry = "e.py:rollout"\n'
        '[[env.agents]]\nname = "coach"\nkind = "model"\npath = "models/coach"\n'
        '[[env.agents]]\nname = "absent"\nkind = "model"\npath = "./models/absent"\n'
        '[[env.agents]]\nname = "hub"\nkind = "model"\npath = "Qwen/Qwen3-0.6B"\n'
        '[[env.agents]]\nname = "past"\nkind = "frozen"\n'
    )
    coach, absent, hub, past = load_config(tmp_path / "run.toml").env.agents
    assert coach == ModelAgent(name="coach", path=str(tmp_path / "models" / "coach"))
    assert absent == ModelAgent(name="absent", path=str(tmp_path / "models" / "absent"))
    assert hub == ModelAgent(name="hub", path="Qwen/Qwen3-0.6B")  # a name on a hub, as no directory is meant
    assert past == FrozenAgent(name="past")


def test_what_each_kind_loads() -> None:
    model = ModelConfig(path="m", dtype="bfloat16", lora=LoraConfig(rank=4, adapter="first"))
    assert TrainedAgent(name="a").resolve_model(model) is None
    assert FrozenAgent(name="a").resolve_model(model) == model
    assert ModelAgent(name="a", path="n").resolve_model(model) == ModelConfig(path="n", dtype="bfloat16")


def refused(tmp_path: Path, model: Path, agent: str) -> str:
    run_file = make_env_run(tmp_path, model, ROLLOUT, "rollout")
    with pytest.raises(HeadraceError) as found:
        prepare(load_config(run_file, [f"env.agents=[{agent}]"]), Inputs())
    return str(found.value)


def test_a_model_that_reads_other_tokens_or_fewer_is_refused_by_the_name_of_its_agent(
    tmp_path: Path, model_dir: Path
) -> None:
    strange = chat_model(tmp_path / "strange", vocab="abcdefghijkl")
    words = refused(tmp_path / "a", model_dir, f'{{name="coach", kind="model", path="{strange}"}}')
    assert "env.agents 'coach' path" in words
    assert "another vocabulary" in words
    short = chat_model(tmp_path / "short", max_positions=16)
    words = refused(tmp_path / "b", model_dir, f'{{name="coach", kind="model", path="{short}"}}')
    assert "was made for 16 tokens, and conversations may have 64" in words
    words = refused(tmp_path / "c", model_dir, '{name="coach", kind="model", path="nowhere"}')
    assert "env.agents 'coach' path" in words
    assert "does not exist" in words


def test_a_directory_that_holds_no_adapter_is_refused(tmp_path: Path, model_dir: Path) -> None:
    words = refused(tmp_path, model_dir, f'{{name="coach", kind="adapter", path="{model_dir}"}}')
    assert "holds no usable adapter" in words
    assert str(AdapterAgent(name="coach", path="d")) == "the adapter in d"


def test_the_dry_run_says_who_answers(tmp_path: Path, model_dir: Path) -> None:
    from headrace.run.session.explain import explain

    run_file = make_env_run(tmp_path, model_dir, ROLLOUT, "rollout")
    overrides = ['env.agents=[{name="me", kind="trained"}, {name="past", kind="frozen"}]']
    told = explain(prepare(load_config(run_file, overrides), Inputs()))
    assert "Agent 'me' is the policy under training." in told
    assert "Agent 'past' is the weights that the run begins with." in told
    assert "2 engines" in told
