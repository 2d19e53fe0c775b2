"""A package of a stranger adds one of each: one file and one entry point, and nothing of Headrace is changed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from headrace.extend import CONTRACTS
from tests.extension.conftest import HERE, Program, dry_runs
from tests.rollout.environments.tasks import chat_model
from tests.run.session.runs import make_run

SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"kind": "echo", "options": {"times": 2}, "tool_parser": "shout"},
    "algo": {"loss": "huber", "advantage": "sign"},
    "flow": {"groups_per_step": 2, "group_size": 4, "policy": "one_batch"},
    "run": {"dir": "run", "steps": 2},
}
REWARDS = '\n[[env.rewards]]\nkind = "small_digits"\nlimit = 4\n'


def run_file(directory: Path) -> Path:
    model = chat_model(directory.parent / f"{directory.name}-model")
    path = make_run(directory, model, **SETTINGS)
    text = path.read_text().replace('reward = "reward.py:reward"\n', "")
    path.write_text(text.replace('options = {"times": 2}', "options = { times = 2 }") + REWARDS)
    return path


def test_each_thing_that_the_stranger_adds_is_one_file_and_one_entry_point() -> None:
    rows = tomllib.loads((HERE / "stranger/pyproject.toml").read_text())["project"]["entry-points"]
    assert set(rows) <= {contract.group for contract in CONTRACTS.values()}
    targets = [target.partition(":")[0] for group in rows.values() for target in group.values()]
    files = {f"stranger.{path.stem}" for path in (HERE / "stranger/stranger").glob("*.py")} - {"stranger.__init__"}
    assert sorted(targets) == sorted(files)


def test_a_run_uses_what_a_stranger_offers(stranger: Program, tmp_path: Path) -> None:
    path = run_file(tmp_path / "home")
    done = stranger("train", path, "--json", cwd=path.parent)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["steps"] == 2
    config = json.loads((path.parent / "run/config.json").read_text())
    config = config.get("config", config)
    assert config["algo"]["loss"]["kind"] == "huber"
    assert config["algo"]["loss"]["delta"] == 0.5
    assert config["flow"]["policy"]["kind"] == "one_batch"
    assert config["env"]["rewards"][0]["limit"] == 4


def test_a_dry_run_explains_the_settings_of_a_stranger(stranger: Program, tmp_path: Path) -> None:
    path = run_file(tmp_path / "home")
    done = stranger("train", path, "--dry-run", "--set", "algo.loss={kind='huber', delta=0.25}", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert '"delta": 0.25' in done.stdout


REFUSED = {
    "algo.loss={kind='huber', dleta=1.0}": ["algo.loss.dleta is not a setting", "did you mean 'delta'"],
    "algo.loss={kind='huber', delta=-1.0}": ["algo.loss.delta=-1.0: input should be greater than 0"],
    "algo.loss=hubber": ["did you mean 'huber'"],
    "flow.policy=one_batsch": ["did you mean 'one_batch'"],
    "flow.max_age=3": ["flow.max_age=3 does not fit flow.policy='one_batch', which makes it 0"],
    "env.kind=ecko": ["did you mean 'echo'"],
    "env.tool_parser=shoot": ["did you mean 'shout'"],
    "env.entry=a.py:A": ["env.kind='echo' does not use it"],
}
"""For each setting what the program says of it."""


def test_settings_of_a_stranger_are_refused_as_our_own(stranger: Program, tmp_path: Path) -> None:
    found = dry_runs(stranger, run_file(tmp_path / "home"), REFUSED)
    for setting, words in REFUSED.items():
        status, stderr = found[setting]
        assert status == 1, setting
        for each in words:
            assert each in " ".join(stderr.split()), setting


def test_a_verb_of_a_stranger_is_run_and_listed(stranger: Program) -> None:
    assert stranger("greet", "world").stdout == "hello world\n"
    shown = stranger("--help").stdout
    assert "Of a stranger" in shown
    assert "Greet somebody." in shown
    assert shown.index("Plan, compare and measure") < shown.index("Of a stranger")


def test_the_loss_of_a_stranger_is_checked_by_its_name(stranger: Program) -> None:
    done = stranger("check", "loss", "huber", "--option", "delta=0.3")
    assert "huber keeps the contract" in done.stdout, done.stderr
