"""Rows of SWE-bench are tasks: an agent works in the repository, and the named tests are the reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.base.errors import DataError, EpisodeError
from headrace.rollout.environments.data import load_rows
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.sandboxes import swe
from headrace.wings.sandboxes.environment import ShellEnv
from headrace.wings.sandboxes.world import close_shared_worlds
from tests.wings.sandboxes.conftest import container_options, memory_folder
from tests.wings.sandboxes.swe_rows import FILES, git, make_row
from tests.wings.sandboxes.test_environment import Saying, block

SOLVE = "sed -i 's/a - b/a + b/' calc/core.py"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(close_shared_worlds())


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repositories")


@pytest.fixture(scope="module")
def row(repositories: Path) -> dict[str, Any]:
    return make_row(repositories)


class SweWorld(NamedTuple):
    row: dict[str, Any]
    repositories: Path


@pytest.fixture
def world(row: dict[str, Any], repositories: Path) -> SweWorld:
    return SweWorld(row, repositories)


def attempt(
    runner: asyncio.Runner, row: dict[str, Any], says: Sequence[str], **options: Any
) -> tuple[Episode, list[str]]:
    model = Saying([*says, "submit"])
    with ThreadPoolExecutor(1) as executor:
        rollout = as_rollout(partial(ShellEnv, **options), executor)
        return runner.run(rollout(row, EpisodePolicy(model))), model.read


def here(repositories: Path) -> dict[str, Any]:
    return {"image": "machine", "repositories": str(repositories)}


_CHEAT = (
    "(echo 'import calc.core'; echo 'calc.core.add = lambda a, b: a + b'; git show HEAD:tests/test_core.py) > /tmp/n"
)
"""A command that writes tests whose first lines mend what they test."""


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        ([SOLVE], 1.0),
        ([], 0.0),
        pytest.param(["sed -i 's/a - b/5/' calc/core.py"], 0.0, marks=pytest.mark.slow),  # it breaks another test
        ([f"{SOLVE}; rm -r tests; mkdir -p tests; ln -s /etc tests/test_core.py"], 1.0),  # tests are put back
        pytest.param([f"{SOLVE}; printf 'def test_add(): pass' > tests/test_core.py; git add -A; git -c user.name=x "
          "-c user.email=y commit -qam x"], 1.0, marks=pytest.mark.slow),
        (["rm -rf .git"], 0.0),
        (["git config filter.e.smudge 'sed s/5/-1/'; echo 'tests/* filter=e' > .git/info/attributes"], 0.0),
        (["git config --global filter.e.smudge 'sed s/5/-1/'; echo 'tests/* filter=e' > .gitattributes"], 0.0),
        (["mv .git ../other; echo 'gitdir: ../other' > .git"], 0.0),
        ([f"{_CHEAT}; printf '#!/bin/sh\\ncp /tmp/n tests/test_core.py' > .git/hooks/post-checkout; "
          "chmod +x .git/hooks/post-checkout"], 0.0),
        ([f"{_CHEAT}; git replace $(git rev-parse HEAD:tests/test_core.py) $(git hash-object -w /tmp/n); "
          "rm tests/test_core.py"], 0.0),
        ([f"{SOLVE}; touch .git/index.lock"], 1.0),
        pytest.param(["printf 'raise SystemExit(0)' > calc/core.py"], 0.0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_named_tests_are_the_reward(
    runner: asyncio.Runner, row: dict[str, Any], repositories: Path, commands: list[str], reward: float
) -> None:
    episode, _ = attempt(runner, row, [block(command) for command in commands], **here(repositories))
    assert episode.reward == reward


def test_the_agent_finds_the_base_commit_and_nothing_of_what_came_after(
    runner: asyncio.Runner, row: dict[str, Any], repositories: Path
) -> None:
    look = "pwd; git status --short; git log --oneline --all | wc -l; git rev-parse HEAD; cat tests/test_core.py"
    _, read = attempt(runner, row, [block(look), block("grep -ra SECRET /testbed; ls tests")], **here(repositories))
    assert read[0] == "add subtracts."
    assert read[1].startswith(f"/testbed\n1\n{row['base_commit']}\n")
    assert "test_double" in read[1]
    assert "test_add" not in read[1]
    assert read[2] == "test_core.py"


def test_a_row_of_swe_smith_makes_its_bug_and_its_reverse_solves_it(
    runner: asyncio.Runner, row: dict[str, Any], repositories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_folder() as folder:
        options = container_options("docker", folder)
        testbed = folder / "tree" / "testbed"
        git(folder, "clone", "-q", str(repositories / "me/calc"), str(testbed))
        git(testbed, "checkout", "-q", f"{row['base_commit']}~0")
        (testbed / "calc/core.py").write_text(FILES["calc/core.py"].replace("a - b", "a + b"))
        git(testbed, "commit", "-q", "-a", "-m", "clean")
        (testbed / "calc/core.py").write_text(FILES["calc/core.py"])
        bug = git(testbed, "diff")
        git(testbed, "checkout", "-q", ".")
        smith = {
            "instance_id": "me__calc.1", "repo": "swesmith/me__calc", "image_name": "tree:base", "patch": bug,
            "problem_statement": "It subtracts.", "FAIL_TO_PASS": ["tests/test_core.py::test_add"], "PASS_TO_PASS": [],
        }  # fmt: skip
        said = "short test summary info\\n%s tests/test_core.py::test_add\\n"
        test_command = f"grep -q 'a + b' calc/core.py && printf '{said % 'PASSED'}' || printf '{said % 'FAILED'}'; true"
        settings = {"sandbox": "docker", "driver": options, "image": "task", "test_command": test_command}
        settings["may_lack"] = ["disk"]
        file = folder / "rows"
        file.mkdir()
        (file / "train.jsonl").write_text(json.dumps(smith) + "\n")
        (loaded,) = load_rows(file)
        episode, read = attempt(runner, loaded, [block("git status --short; cat calc/core.py")], **settings)
        assert "a - b" in read[1]
        assert " M" not in read[1]
        assert episode.reward == 0.0
        assert attempt(runner, loaded, [loaded["solution"]], **settings)[0].reward == 1.0
        runner.run(close_shared_worlds())


def test_files_of_rows_are_read_as_a_directory_with_their_solutions(
    runner: asyncio.Runner, row: dict[str, Any], repositories: Path, tmp_path: Path
) -> None:
    bad = {**row, "instance_id": "bad", "FAIL_TO_PASS": "[]"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, bad)))
    good, refused = load_rows(tmp_path)
    assert (good["prompt"], good["task"], good["problem"]) == ("add subtracts.", "me__calc-1", "")
    assert "no tests in FAIL_TO_PASS" in refused["problem"]
    assert attempt(runner, good, [good["solution"]], **here(repositories))[0].reward == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FAIL_TO_PASS": []}, "no tests in FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "no list"}, "FAIL_TO_PASS='no list'"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS='None'"),
        ({"PASS_TO_PASS": ["test_x (a.B)"]}, r"'test_x \(a.B\)', which is none of pytest"),
        ({"base_commit": "HEAD; rm -rf /"}, "base_commit='HEAD; rm"),
        ({"base_commit": ""}, "a patch of tests and no base_commit"),
        ({"expected_output_json": "{}"}, "as R2E-Gym does"),
    ],
)
def test_a_row_that_cannot_be_a_task_is_refused_by_name(
    row: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        swe.open_row({**row, **changes})


@pytest.mark.parametrize(
    ("changes", "options", "failure"),
    [
        ({"PASS_TO_PASS": None}, {}, ("task_invalid", "PASS_TO_PASS")),
        ({}, {"image": "none"}, ("task_image", "swebench/sweb.eval.x86_64.me_1776_calc-1:latest")),
        ({"image_name": "own/image"}, {"image": "none"}, ("task_image", "'own/image'")),
        ({}, {"image": "none", "image_names": "x/{id_s}"}, ("task_image", "'x/me_s_calc-1'")),
        ({}, {"image": "none", "image_names": "x/{id}"}, ("task_invalid", "is no form of names")),
        ({}, {"image": "task"}, ("task_image", "'jail' have no images")),
        ({"instance_id": "a"}, {"repositories": ""}, ("task_setup", "no folder of repositories")),
        ({"instance_id": "b", "repo": "no/where"}, {}, ("task_setup", "no repository 'no/where'")),
        ({"instance_id": "c", "base_commit": "0" * 40}, {}, ("task_setup", "000 of ")),
        ({"instance_id": "d", "test_patch": "no patch"}, {}, ("task_invalid", "test_patch does not fit")),
        ({"instance_id": "e", "PASS_TO_PASS": ["tests/no.py::a"]}, {}, ("task_invalid", "there is no 'tests/no.py'")),
    ],
)
def test_an_episode_that_cannot_begin_fails_by_name(
    runner: asyncio.Runner, world: SweWorld, changes: dict[str, Any], options: dict[str, Any], failure: tuple[str, str]
) -> None:
    reason, words = failure
    with pytest.raises(EpisodeError, match=words) as error:
        attempt(runner, {**world.row, **changes}, [], **{**here(world.repositories), **options})
    assert error.value.reason == reason


def test_a_patch_of_tests_that_does_not_fit_is_no_reward_of_0_and_leaves_nothing_behind(
    runner: asyncio.Runner, world: SweWorld
) -> None:
    row = {
        **world.row,
        "instance_id": "unfit",
        "test_patch": world.row["test_patch"].replace("def test_nothing", "def x"),
    }
    with pytest.raises(EpisodeError, match="test_patch does not fit") as error:
        attempt(runner, row, ["submit"], **here(world.repositories))
    assert error.value.reason == "task_invalid"
    look = "git fsck --unreachable --no-reflogs; git status --short; grep -rq test_add /testbed /tmp && echo found"
    _, read = attempt(runner, world.row, [block(look)], **here(world.repositories))
    assert read[1] == "[exit code 1]"


def test_only_the_last_summary_of_pytest_counts() -> None:
    names = ["t.py::a"]

    def of(text: str) -> float:
        return swe.passes(text, names)

    assert of("short test summary info ==\nPASSED t.py::a\n") == 1.0
    assert of("PASSED t.py::a\n") == 0.0
    assert of("short test summary info ==\nPASSED t.py::a\nshort test summary info ==\nFAILED t.py::a - x\n") == 0.0
    assert of("short test summary info ==\nERROR t.py::a\nPASSED t.py::a\n") == 0.0
    assert of("short test summary info ==\nXFAIL t.py::a - why\n") == 1.0
