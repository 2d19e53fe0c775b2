"""Games of gem, played to their ends: where the package is installed (extra: gem), and in an environment of its own."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.base.errors import EnvError
from tests.venvs import python_with, run_tests
from tests.wings.bridges.scripted import attempts
from tests.wings.bridges.test_games import halving

INSTALLED = find_spec("gem") is not None
with_gem = pytest.mark.skipif(not INSTALLED, reason="gem-llm is not installed (extra: gem)")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(INSTALLED, reason="the tests below have run")
def test_games_of_gem_are_played_where_it_is_installed() -> None:
    done = run_tests(python_with("gem-llm==0.0.4"), Path(__file__))
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@with_gem
def test_a_game_of_gem_is_won_by_who_heeds_its_hints() -> None:
    hint = r"guessed (\d+), and the target number is (higher|lower)"
    won = attempts(
        "gem/game:GuessTheNumber-v0", [{"number": n} for n in range(6)],
        lambda read: f"\\boxed{{{halving(read, hint)}}}", min_number=1, max_number=20, max_turns=8,
    )  # fmt: skip
    assert [attempt.ended.reward for attempt in won] == [1.0] * 6
    assert max(len(attempt.read) for attempt in won) > 2
    assert all("Enter your first guess" in attempt.read[0] for attempt in won)


@with_gem
def test_a_row_is_the_same_game_whoever_plays_beside_it() -> None:
    def lives(rows: list[int]) -> dict[int, list[str]]:
        random.random()
        played = attempts("gem/game:GuessTheNumber-v0", [{"number": n} for n in rows], lambda _: "\\boxed{3}")
        return {n: attempt.read for n, attempt in zip(rows, played, strict=True)}

    together, alone = lives(list(range(8))), lives([5])
    assert together[5] == alone[5]


@with_gem
def test_a_game_that_gem_does_not_know_is_told_at_once() -> None:
    with pytest.raises(EnvError, match="game:Chess-v9"):
        attempts("gem/game:Chess-v9", [], str)
