"""Run files that name bridges: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace.rollout.environments.bridges
from headrace.base.errors import ConfigError
from headrace.rollout.environments.bridges import BRIDGES, find_bridge
from headrace.run.session import load_config
from headrace.run.session.prepare import Inputs, prepare
from tests.rollout.environments.tasks import chat_model


def tree(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "nowhere"}, **sections}


def test_a_missing_library_is_refused_with_what_pip_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.rollout.environments.bridges, "find_spec", lambda _: None)
    for bridge in map(BRIDGES.load, BRIDGES):
        if not bridge.package:
            continue
        with pytest.raises(ConfigError, match=f"needs the package {bridge.package}") as told:
            find_bridge(bridge.example)
        assert told.value.remedy == f"pip install {bridge.install}"


def test_every_extra_that_is_named_exists() -> None:
    extras = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for bridge in map(BRIDGES.load, BRIDGES):
        if bridge.install:
            extra = bridge.install.removeprefix("'headrace[").removesuffix("]'")
            assert f"\n{extra} = [" in extras


def test_a_misspelt_bridge_is_told_its_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no bridge to 'textarina'") as told:
        find_bridge("textarina/Wordle-v0")
    assert "did you mean 'textarena'" in told.value.remedy
    with pytest.raises(ConfigError, match="does not say what of reasoning_gym"):
        find_bridge("reasoning_gym")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env": {"kind": "bridge"}}, "needs env.entry"),
        ({"env": {"kind": "env", "entry": "a.py:A", "options": {"a": 1}}}, "env.options has no effect"),
        ({"data": {"path": "a.jsonl", "count": 3}}, "data.count=3 are both set"),
        ({"data": {"eval_path": "a.jsonl", "eval_count": 3}}, "data.eval_count=3 are both set"),
    ],
)
def test_settings_without_an_effect_are_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(tree(**sections))


def test_files_of_a_bridge_are_found_from_the_run_file(tmp_path: Path) -> None:
    for name in ("my_env.py", "tools.py"):
        (tmp_path / name).write_text("class MyEnv: ...\n")
    entries = {
        "trl/my_env.py:MyEnv": f"trl/{tmp_path}/my_env.py:MyEnv",
        "mcp/python tools.py --now": f"mcp/python {tmp_path}/tools.py --now",
        "mcp/http://127.0.0.1:8000/mcp": "mcp/http://127.0.0.1:8000/mcp",
        "gem/game:GuessTheNumber-v0": "gem/game:GuessTheNumber-v0",
    }
    for entry, absolute in entries.items():
        path = tmp_path / "run.toml"
        path.write_text(f'[model]\npath = "m"\n[env]\nkind = "bridge"\nentry = "{entry}"\n')
        assert load_config(path).env.entry == absolute


def test_held_out_numbers_follow_those_of_training(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    env = {"kind": "bridge", "entry": "trl/" + str(_env_file(tmp_path))}
    config = load_config(
        tree(
            model={"path": str(model)},
            env=env,
            data={"count": 5, "eval_count": 2},
            flow={"groups_per_step": 2},
            engine={"max_new_tokens": 4},
        )
    )
    prepared = prepare(config, Inputs())
    assert [task.row["number"] for task in prepared.tasks] == [0, 1, 2, 3, 4]
    assert [task.row["number"] for task in prepared.eval_tasks] == [5, 6]
    with pytest.raises(ConfigError, match=r"data\.count=5 is set, and rows are handed over too"):
        prepare(config, Inputs(data=[{"number": 1}]))


def _env_file(directory: Path) -> str:
    (directory / "quiet.py").write_text("class Quiet:\n    def reset(self, **row): return 'a'\n")
    return f"{directory / 'quiet.py'}:Quiet"
