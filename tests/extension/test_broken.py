"""A package that does everything wrong is named, and stops only the runs that name what it offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extension.conftest import Program, dry_runs
from tests.run.session.runs import make_run, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


SETTINGS = {
    "algo.loss=unimportable": [
        "offered by the package headrace-broken as broken.unimportable:Loss, which cannot",
        "RuntimeError: no licence for this machine",
    ],
    "algo.loss=not_a_loss": [
        "is not a class that inherits headrace.algo.losses.section.LossSection",
        "which the package headrace-broken offers",
    ],
    "algo.loss=misnamed": ["has no field kind: Literal['misnamed'] = 'misnamed'"],
    "algo.loss=huber": ["offered by the packages headrace-broken and headrace-stranger"],
    "algo.advantage=not_an_advantage": [
        "which the package headrace-broken offers as broken.contract:NotALoss, is not a class that inherits",
    ],
    "flow.policy=not_a_policy": [
        "which the package headrace-broken offers as broken.contract:NotALoss, is not a class that inherits",
    ],
    "env.rewards=[{kind='not_a_scorer'}]": [
        "which the package headrace-broken offers as broken.contract:NotALoss, is not a class that inherits",
    ],
    "env.kind=not_an_environment": ["is neither a class that inherits headrace.Env nor an async function"],
    "sync.transport=not_a_transport": ["headrace-broken offers as broken.contract:NUMBER, is a int"],
    "engine.kind=not_an_engine": ["is a int, not a headrace.engine.config.EngineKind"],
    "launch.kind=not_a_launcher": ["is a int, not a headrace.launch.config.Launcher"],
    "env.tool_parser=not_a_parser": ["which the package headrace-broken offers"],
}
"""For each setting what the program says of it."""
OWN = "algo.loss=grpo"
"""A setting whose name the package offers, and which is Headrace's own."""


@pytest.fixture(scope="module")
def said(broken: Program, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    path = make_run(tmp_path_factory.mktemp("work") / "home", model)
    return dry_runs(broken, path, [*SETTINGS, OWN])


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_package_breaks_is_named_with_the_package(said: dict[str, tuple[int, str]], setting: str) -> None:
    status, stderr = said[setting]
    assert status == 1
    assert "Traceback" not in stderr
    for words in SETTINGS[setting]:
        assert words in " ".join(stderr.split())


def test_a_run_that_names_nothing_of_it_goes_on(broken: Program, model: Path, tmp_path: Path) -> None:
    path = make_run(tmp_path / "home", model, run={"steps": 1})
    done = broken("train", path, cwd=path.parent)
    assert done.returncode == 0, done.stderr


def test_a_name_of_headrace_stays_its_own_and_the_package_is_named(said: dict[str, tuple[int, str]]) -> None:
    status, stderr = said[OWN]
    assert status == 0, stderr
    assert "the package headrace-broken offers algo.loss.kind='grpo', which is Headrace's own" in stderr


def test_a_verb_that_cannot_be_imported_leaves_the_others_alone(broken: Program) -> None:
    assert broken("greet", "world").stdout == "hello world\n"
    shown = broken("--help")
    assert shown.returncode == 0
    assert "Cannot be used" in shown.stdout
    assert "headrace-broken" in shown.stdout
    done = broken("stumble")
    assert done.returncode == 1
    assert "offered by the package headrace-broken" in done.stderr


def test_an_object_that_is_no_verb_is_named_with_its_package(broken: Program) -> None:
    done = broken("not_a_verb")
    assert done.returncode == 1
    assert "which the package headrace-broken offers as broken.contract:NUMBER, is a int" in " ".join(
        done.stderr.split()
    )
