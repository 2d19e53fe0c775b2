"""Recipes: each is a whole answer to every axis, and its settings are what a run takes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.recipes.systems import AXES, recipe, recipes
from headrace.session import load_config
from headrace.session.config import RunConfig

RUN: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "rows.jsonl"}, "env": {"reward": "r.py:reward"}}
SYSTEMS = (
    *("areal", "art", "atropos", "miles", "nemo-rl", "oat", "open-instruct", "pipelinerl", "prime-rl", "roll"),
    *("skyrl", "slime", "torchforge", "trl-async", "trl-sync", "tunix", "verifiers-rl", "verl"),
)


def test_every_system_has_its_recipe_and_the_default_comes_first() -> None:
    assert tuple(recipes()) == ("default", *SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_says_something_on_every_axis_and_makes_a_whole_run_file(name: str) -> None:
    one = recipe(name)
    assert set(one.axes) == set(AXES)
    assert all([one.system, one.says, one.differs, *one.axes.values()])
    assert isinstance(load_config(RUN, like=name), RunConfig)


def test_the_default_recipe_is_what_a_run_does_that_says_nothing() -> None:
    assert load_config(RUN, like="default") == load_config(RUN)


def test_no_two_systems_that_differ_in_flow_or_sync_have_the_same_settings() -> None:
    def point(name: str) -> str:
        return json.dumps(load_config(RUN, like=name).model_dump(mode="json"), sort_keys=True)

    same = [{"miles", "slime"}]  # the survey tells them apart by their learners alone
    alike = [{a, b} for i, a in enumerate(SYSTEMS) for b in SYSTEMS[i + 1 :] if point(a) == point(b)]
    assert alike == same


def test_what_the_run_file_says_goes_before_the_recipe_and_the_call_before_both() -> None:
    file = {**RUN, "flow": {"max_age": 3}}
    assert load_config(RUN, like="areal").flow.max_age == 4
    assert load_config(file, like="areal").flow.max_age == 3
    assert load_config(file, ["flow.max_age=2"], like="areal").flow.max_age == 2
    assert load_config(file, like="areal").sync.interrupt == "abort_resume"


def test_settings_that_contradict_the_recipe_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"max_age=3"):
        load_config({**RUN, "flow": {"max_age": 3}}, like="trl-sync")


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="there is no recipe 'arael'") as refused:
        load_config(RUN, like="arael")
    assert "areal" in refused.value.remedy


def test_the_program_lists_them_and_shows_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["headrace", "recipes", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        return capsys.readouterr().out

    table = json.loads(said("--json"))
    assert [row["name"] for row in table] == list(recipes())
    assert "PipelineRL" in said("pipelinerl")
    assert 'interrupt = "inflight"' in said("pipelinerl")
