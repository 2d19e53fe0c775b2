"""What a teacher said of a token is told beside it, and why it is not where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.flow.ledger import SqliteLedger
from tests.wings.view.asking import ask, opened
from tests.wings.view.synthetic import GROUP_SIZE, plain_episode, set_teachers, taught_episode, train, write_run


@pytest.fixture
def taught(tmp_path: Path) -> TestClient:
    """Group 3 is the episode that was taught."""
    directory = write_run(tmp_path / "taught", steps=1, extra=[taught_episode(0, 0)])
    set_teachers(directory, {"kind": "reverse_kl", "beta": 2.0, "weight": 1.0}, {"kind": "frozen", "engine": {}})
    return opened(directory)


def test_a_token_tells_what_its_teacher_says_of_it(taught: TestClient) -> None:
    answer = ask(taught, "episodes/3.0")["turns"][1]
    assert (answer["teacher"], answer["teacher_entries"]) == ("math", 2)
    assert answer["teacher_gap"] == pytest.approx(0.5)
    window = ask(taught, "episodes/3.0/turns/1?from=3&count=9")
    assert window["teacher"] == [pytest.approx(window["logprob"][at] + (-0.5, 0.25)[at % 2]) for at in range(3)] + [
        None
    ]
    assert window["teacher_version"] == [0, 0, 0, -1]
    told = ask(taught, "episodes/3.0/turns/1/1")["teacher"]
    assert [(each["text"], round(each["logprob"], 4)) for each in told] == [("t", -0.6931), ("!", -1.3863)]
    assert "teacher" not in ask(taught, "episodes/3.0/turns/1/6")
    assert "teacher" not in ask(taught, "episodes/3.0/turns/0?from=0&count=9")


def test_what_a_teacher_adds_to_the_advantage_of_each_token_is_told(taught: TestClient) -> None:
    told = ask(taught, "episodes/3.0")
    rewards = [each["reward"] for each in told["siblings"]]
    answer = told["turns"][1]
    assert answer["advantage"] == pytest.approx(1.0 - sum(rewards) / 4)
    assert answer["teacher_adds"] == pytest.approx([-1.0, 0.5])
    added = ask(taught, "episodes/3.0/turns/1?from=0&count=9")["teacher_adds"]
    assert added == pytest.approx([0.5, -1.0, 0.5, -1.0, 0.5, -1.0, 0.0], abs=1e-6)


def test_what_a_teacher_beside_the_learner_said_is_told_once_its_step_has_ended(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    set_teachers(directory, {"kind": "reverse_kl"}, {"kind": "refreshed", "every": 2})
    client = opened(directory)
    untold = ask(client, "episodes/0.0")
    assert "reverse_kl" in untold["teacher_why"]
    assert untold["advantage_why"].startswith("a teacher adds to it, and of that: not recorded")
    ledger = SqliteLedger(directory / "ledger.sqlite", group_size=GROUP_SIZE, groups_per_step=2)
    train(ledger, (9,), 2, [plain_episode(9, place, 1) for place in range(GROUP_SIZE)], teacher=2)
    ledger.close()
    client = opened(directory)
    told = ask(client, "episodes/9.0")
    assert (told["teacher_why"], told["turns"][1]["teacher_entries"]) == ("", 0)
    window = ask(client, "episodes/9.0/turns/1?from=0&count=9")
    assert window["teacher_version"] == [2]
    assert window["teacher"] == [pytest.approx(window["logprob"][0] - 0.125)]
    assert window["teacher_adds"] == [pytest.approx(-0.125)]


@pytest.mark.parametrize(
    ("teachers", "why"),
    [((), "the run has no teacher"), (({"kind": "frozen", "engine": {}},), "no teacher was asked about it")],
)
def test_an_episode_that_was_not_taught_says_why(teachers: tuple[Any, ...], why: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    set_teachers(directory, {"kind": "grpo"}, *teachers)
    assert ask(opened(directory), "episodes/0.0")["teacher_why"] == why
