"""Files of stages: each begins with the weights of the one before, and the whole goes on after it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace.base.errors import ConfigError, DataError
from headrace.learner.core import LearnerCore
from headrace.wings.supervised import stages as stages_module
from headrace.wings.supervised.session import dpo, sft
from headrace.wings.supervised.stages import load_stages, read_stages, run_stages
from tests.learner.builders import assert_same_bits
from tests.wings.supervised.material import chat_model, conversations, pairs, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("stages") / "model")


def two_stages(model_dir: Path, home: Path, run_dir: str = "whole") -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    rows = str(write_rows(home / "rows.jsonl", conversations(8)))
    compared = str(write_rows(home / "pairs.jsonl", pairs(8)))
    common = {"learner": {"lr": 1e-3}, "run": {"rows_per_step": 4, "threads": 1}}
    return {
        "model": {"path": str(model_dir)},
        "observe": {"view": "none", "report": False},
        "run": {"dir": str(home / run_dir)},
        "stage": [
            {"kind": "sft", "data": {"path": rows}, **common},
            {"kind": "dpo", "data": {"path": compared}, "loss": "simpo", **common},
        ],
    }


def weights_of(directory: Path) -> dict[str, Any]:
    return load_file(directory / "model.safetensors")


def test_each_stage_begins_with_the_weights_of_the_one_before(model, tmp_path):
    tree = two_stages(model, tmp_path)
    summary = run_stages(tree)
    assert (summary.status, [each.name for each in summary.results]) == ("finished", ["base", "1-sft", "2-dpo"])
    assert read_stages(tmp_path / "whole") == summary
    by_hand = [{**each, "observe": tree["observe"]} for each in tree["stage"]]
    for each, verb, path, name in (
        (by_hand[0], sft, str(model), "a"),
        (by_hand[1], dpo, str(tmp_path / "a" / "checkpoints" / "step-000002"), "b"),
    ):
        del each["kind"]
        verb({**each, "model": {"path": path}, "run": {**each["run"], "dir": str(tmp_path / name)}})
    alone = tmp_path / "b" / "checkpoints" / "step-000002"
    assert_same_bits(weights_of(alone), weights_of(tmp_path / "whole" / "2-dpo" / "model"))


class Killed(BaseException):
    """What a kill leaves is what lies on the disk at that moment."""


@pytest.mark.parametrize("moment", ["in the first stage", "before the weights are written", "in the second stage"])
def test_stages_that_were_interrupted_go_on_to_the_same_bits(model, tmp_path, monkeypatch, moment):
    run_stages(two_stages(model, tmp_path, "whole"))
    whole, calls = LearnerCore.train, []

    def train(core: LearnerCore, batch: Any) -> Any:
        calls.append(batch.step)
        if len(calls) == {"in the first stage": 2, "in the second stage": 4}.get(moment):
            raise Killed
        return whole(core, batch)

    def no_export(*_: Any) -> None:
        raise Killed

    tree = two_stages(model, tmp_path, "killed")
    with monkeypatch.context() as patched:
        patched.setattr(LearnerCore, "train", train)
        if moment == "before the weights are written":
            patched.setattr(stages_module, "export", no_export)
        with pytest.raises(Killed):
            run_stages(tree)
    with pytest.raises(ConfigError, match="holds stages already"):
        run_stages(tree)
    summary = run_stages(tree, resume=True)
    assert (summary.status, [each.steps for each in summary.results]) == ("finished", [0, 2, 2])
    for name in ("1-sft", "2-dpo"):
        assert_same_bits(
            weights_of(tmp_path / "whole" / name / "model"), weights_of(tmp_path / "killed" / name / "model")
        )


def test_a_stage_that_has_ended_is_not_run_again_and_does_not_change(model, tmp_path, monkeypatch):
    tree = two_stages(model, tmp_path)
    run_stages(tree)
    monkeypatch.delattr(LearnerCore, "train")
    assert run_stages(tree, resume=True).status == "finished"
    tree["stage"][0]["learner"] = {"lr": 5e-4}
    with pytest.raises(ConfigError, match="settings of the stage 1-sft have changed since it ended"):
        run_stages(tree, resume=True)


def test_every_stage_is_checked_before_the_first_begins(model, tmp_path):
    for change, error, words in (
        ({"data": {"path": str(tmp_path / "gone.jsonl")}}, DataError, "gone.jsonl does not exist"),
        ({"learner": {"lrr": 1}}, ConfigError, r"stage 2-dpo: learner\.lrr"),
        ({"model": {"path": "other"}}, ConfigError, r"stage 2-dpo sets model\.path, which follows from the stages"),
        ({"kind": "ppo"}, ConfigError, r"kind"),
    ):
        tree = two_stages(model, tmp_path)
        tree["stage"][1] |= change
        with pytest.raises(error, match=words):
            run_stages(tree)
    assert not (tmp_path / "whole").exists()
    with pytest.raises(ConfigError, match=r"has no \[\[stage\]\]"):
        run_stages({"model": {"path": str(model)}, "run": {"dir": "x"}})


def test_overrides_name_a_stage_by_its_number_and_paths_are_relative_to_the_file(model, tmp_path):
    (tmp_path / "all.toml").write_text(
        '[model]\npath = "base"\n[run]\ndir = "runs/all"\n'
        '[[stage]]\nkind = "sft"\n[stage.data]\npath = "rows.jsonl"\n[[stage]]\nkind = "rl"\n[stage.env]\n'
        'reward = "reward.py:reward"\n',
        encoding="utf-8",
    )
    found = load_stages(tmp_path / "all.toml", ["stage.2.learner.lr=3e-4", "stage.1.run.epochs=2"])
    assert (found.base, found.directory) == (str(tmp_path / "base"), tmp_path / "runs" / "all")
    assert found.stages[0].settings["data"] == {"path": str(tmp_path / "rows.jsonl")}
    assert found.stages[0].settings["run"] == {"epochs": 2}
    assert found.stages[1].settings["env"] == {"reward": f"{tmp_path / 'reward.py'}:reward"}
    assert found.stages[1].settings["learner"] == {"lr": 3e-4}
    with pytest.raises(ConfigError, match=r"stage\.3: there is no such stage"):
        load_stages(tmp_path / "all.toml", ["stage.3.learner.lr=1"])


def test_stages_file_is_plain_json(model, tmp_path):
    run_stages(two_stages(model, tmp_path))
    tree = json.loads((tmp_path / "whole" / "stages.json").read_text(encoding="utf-8"))
    assert [each["model"] for each in tree["results"]][1:] == [
        str(tmp_path / "whole" / name / "model") for name in ("1-sft", "2-dpo")
    ]
