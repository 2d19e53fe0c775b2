"""Recipes: each is a whole answer to every axis, and its settings are what a run takes."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.run.cli import main
from headrace.run.session import load_config
from headrace.run.session.config import RunConfig
from headrace.run.session.recipes import AXES, recipe, recipes
from headrace.wings.recipes.demo.verb import leave_open

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


@pytest.mark.parametrize(
    ("name", "settings", "problem", "remedy"),
    [
        ("trl-sync", ["flow.max_age=1"], "the recipe 'trl-sync' says flow.policy='synchronous'", "leave flow.max_age"),
        ("oat", ["flow.lead=2"], "flow.lead=2 does not fit flow.policy='one_ahead'", "leave flow.lead out"),
        ("prime-rl", ["flow.max_age=0"], "the recipe 'prime-rl' says flow.lead=1", "set flow.lead <= 0"),
        ("pipelinerl", ["flow.policy=bounded"], "says flow.lead=8, flow.max_age=4", "or raise flow.max_age"),
        ("pipelinerl", ["flow.policy.stale=wait", "flow.order=strict"], "flow.order='strict'", "'ready_first'"),
        ("art", ["flow.capacity=auto"], "flow.capacity='auto' does not fit", "leave flow.capacity out"),
        ("areal", ["algo.loss=reinforce"], "counts the correction of stale tokens twice", "algo.correction = 'none'"),
        ("areal", ["algo.loss=reinforce"], "says algo.correction='decoupled'", "or take another recipe"),
        ("areal", ["algo.old=engine"], "correction 'decoupled' reads π_old/μ", "algo.old = 'learner'"),
        ("verl", ["algo.correction=none"], "corrects for none of it", "flow.max_age = 0"),
        ("atropos", ["sync.host=10.0.0.1"], "sync.transport='files' takes no uploads", "sync.transport = 'http'"),
        ("torchforge", ["sync.directory=x"], "sync.transport='shm' writes no files", "sync.transport = 'files'"),
        ("slime", ["sync.tls_certificate=x"], "sync.transport='group' takes no uploads", "sync.transport = 'http'"),
        ("nemo-rl", ["flow.max_age=auto", "flow.policy.per=token"], "would not mask the same tokens", "'group'"),
        ("art", ["sync.rolling=2"], "sync.rolling=2 engines are to commit at once", "sync.rolling <= 1"),
        ("tunix", ["sync.codec=adapter"], "sends adapters alone, and model.lora is not set", "set model.lora"),
    ],
)
def test_settings_that_contradict_a_recipe_are_refused_with_name_value_reason_and_whose_they_are(
    name: str, settings: list[str], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RUN, settings, like=name)
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy


def test_process_groups_have_a_folder_for_what_they_cannot_bring() -> None:
    assert load_config(RUN, ["sync.directory=x"], like="slime").sync.directory == "x"


def test_what_a_recipe_does_not_say_is_not_told_as_its_own() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RUN, ["flow.lead=3", "flow.max_age=2"], like="areal")
    assert "recipe" not in refused.value.problem


@pytest.mark.parametrize("name", ["default", *SYSTEMS])
def test_the_demo_runs_like_any_recipe(name: str, tmp_path: Path) -> None:
    run_file = tmp_path / "demo.toml"
    run_file.write_text((files("headrace.wings.recipes.demo") / "demo.toml").read_text())
    leave_open(run_file)
    config = load_config(run_file, like=name)
    assert config.flow.max_age == load_config(RUN, like=name).flow.max_age
    assert config.flow.groups_per_step == 64


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
