"""Games of textarena, played to their ends."""

from __future__ import annotations

import random
import re

import pytest

from headrace.base.errors import EnvError
from headrace.rollout import EpisodeLimits
from tests.wings.bridges.scripted import attempts


def halving(read: str, form: str, top: int = 20) -> str:
    """The middle of what the hints leave over."""
    low, high = 1, top
    for said, hint in re.findall(form, read, flags=re.DOTALL):
        low, high = (int(said) + 1, high) if hint == "higher" else (low, int(said) - 1)
    return str((low + high) // 2)


def test_a_game_of_textarena_is_won_by_who_heeds_its_hints() -> None:
    hint = r"assistant\n\[(\d+)\].*?number is (higher|lower)"
    won = attempts(
        "textarena/GuessTheNumber-v0", [{"number": n} for n in range(6)], lambda read: f"[{halving(read, hint)}]"
    )
    assert [attempt.ended.reward for attempt in won] == [1.0] * 6


def test_what_a_player_has_read_is_not_said_again() -> None:
    (game,) = attempts("textarena/GuessTheNumber-v0", [{"number": 1}], _counting())
    assert game.read[-1].count("You are playing Guess The Number") == 1


def _counting():  # type: ignore[no-untyped-def]
    count = iter(range(1, 30))
    return lambda _: f"[{next(count)}]"


def test_two_players_earn_apart() -> None:
    def first_free(read: str) -> str:
        free: str = re.findall(r"Available Moves: '\[(\d)\]'", read)[-1]
        return f"[{free}]"

    (game,) = attempts("textarena/TicTacToe-v0", [{"number": 0}], first_free, players=2)
    assert game.ended.agent_rewards == {"player/0": 1.0, "player/1": -1.0}
    assert {turn.author for turn in game.turns if turn.author.startswith("player")} == {"player/0", "player/1"}


def test_a_budget_that_is_spent_ends_the_game_with_nothing() -> None:
    (game,) = attempts("textarena/GuessTheNumber-v0", [{"number": 1}], _counting(), limits=EpisodeLimits(max_turns=2))
    assert game.ended.reward == 0.0
    assert len(game.read) == 2


def test_a_row_is_the_same_game_whoever_plays_beside_it() -> None:
    entry = "textarena/GuessTheNumber-v0"

    def lives(rows: list[int]) -> dict[int, list[str]]:
        random.random()
        played = attempts(entry, [{"number": n} for n in rows], lambda _: "\\boxed{3} [3]")
        return {n: attempt.read for n, attempt in zip(rows, played, strict=True)}

    together, alone = lives(list(range(8))), lives([5])
    assert together[5] == alone[5]


def test_what_a_library_of_games_does_not_know_is_told_at_once() -> None:
    with pytest.raises(EnvError, match="Chess-v9"):
        attempts("textarena/Chess-v9", [], str)
    with pytest.raises(EnvError, match="textarena/GuessTheNumber-v0"):
        attempts("textarena/GuessTheNumber-v0", [], str, players=3)
