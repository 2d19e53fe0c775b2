"""A curriculum asks for the rows that teach most, is the same under the same seed, and survives a crash."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.rollout.environments import Curriculum, CurriculumConfig, DataConfig
from headrace.rollout.environments.curriculum import CurriculumState


def made(num_rows: int, *, seed: int = 0, epochs: int | None = None, **settings: float) -> Curriculum:
    return Curriculum(CurriculumConfig(**settings), num_rows=num_rows, seed=seed, epochs=epochs)


def rewards(solved: int, of: int = 4) -> list[float]:
    return [1.0] * solved + [0.0] * (of - solved)


def attempt(curriculum: Curriculum, number: int, solved: int, version: int = 0) -> int:
    """A group from its pick to its end."""
    row = curriculum.pick(number, version)
    assert row is not None
    curriculum.observe(number, row, version, rewards(solved))
    return row


def test_every_row_is_attempted_once_before_any_is_again_while_nothing_is_known() -> None:
    curriculum = made(20)
    first = [attempt(curriculum, number, 2) for number in range(20)]
    assert sorted(first) == list(range(20))
    assert first != sorted(first)
    assert [attempt(curriculum, number, 2) for number in range(20, 40)] == first, "the oldest first"


def test_rows_are_in_pools_by_their_running_solve_rate() -> None:
    curriculum = made(4, memory=0.5, rest=0.0)
    rows = [attempt(curriculum, number, solved) for number, solved in enumerate((0, 2, 4))]
    assert curriculum.pools() == {"unseen": 4, "hard": 0, "target": 0, "easy": 0}, "not before the next version"
    attempt(curriculum, 3, 2, version=1)
    assert curriculum.pools() == {"unseen": 1, "hard": 1, "target": 1, "easy": 1}
    rates = {record.row: record.rate for record in curriculum.state().rows}
    assert [rates[row] for row in rows] == [0.0, 0.5, 1.0]


def test_rate_keeps_what_memory_says_of_what_was_before() -> None:
    curriculum = made(1, memory=0.75, rest=0.0)
    for number, solved in enumerate((4, 0, 2)):
        attempt(curriculum, number, solved, version=number)
    curriculum.pick(3, 3)
    (record,) = curriculum.state().rows
    assert record.rate == pytest.approx(0.75 * (0.75 * 1.0 + 0.25 * 0.0) + 0.25 * 0.5)


def test_row_that_was_solved_always_or_never_rests() -> None:
    curriculum = made(4, rest=2.0)
    outcomes = dict(enumerate((0, 4, 2, 2)))
    rows = [attempt(curriculum, number, outcomes[number]) for number in range(4)]
    picked = [attempt(curriculum, number, 2, version=1) for number in range(4, 12)]
    assert set(picked[:4]) == set(rows[2:])
    assert rows[0] not in picked[: 8 - 4]
    later = [attempt(curriculum, number, 2, version=2) for number in range(12, 30)]
    assert set(rows[:2]) <= set(picked + later)


def test_where_all_rows_rest_those_that_wake_first_are_asked() -> None:
    curriculum = made(3, rest=100.0)
    rows = [attempt(curriculum, number, 4) for number in range(3)]
    assert attempt(curriculum, 3, 4, version=1) == rows[0]


def test_rows_are_drawn_by_their_weights() -> None:
    curriculum = made(40, rest=0.0, hard=0.0, easy=0.2, target=1.0)
    solved = {row: (0, 2, 4)[row % 3] for row in range(40)}
    counts: Counter[int] = Counter()
    for number in range(3000):
        row = curriculum.pick(number, number)
        assert row is not None
        curriculum.observe(number, row, number, rewards(solved[row]))
        if number >= 400:  # all have been seen
            counts[solved[row]] += 1
    assert counts[0] == 0
    share = counts[4] / counts.total()
    weight = 0.2 * sum(value == 4 for value in solved.values())
    expected = weight / (weight + sum(value == 2 for value in solved.values()))
    assert share == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 2600))


def test_epochs_bound_how_many_groups_are_made() -> None:
    curriculum = made(5, epochs=2)
    assert [curriculum.pick(number, 0) is None for number in range(12)] == [False] * 10 + [True] * 2


@dataclass(frozen=True)
class Remembered:
    number: int
    row: int
    oldest_version: int
    closed: bool
    rewards: tuple[float, ...]


@given(seed=st.integers(0, 2**16), batch=st.integers(1, 5), cut=st.integers(1, 30), order=st.randoms())
def test_life_after_a_crash_picks_what_the_undisturbed_one_picks(
    seed: int, batch: int, cut: int, order: random.Random
) -> None:
    """Synchronous: groups of a version end in any order, before the next version begins."""

    def solved(row: int, number: int) -> int:
        return int(np.random.default_rng([row, number]).integers(0, 5))

    def run(crash: int | None) -> tuple[list[int], CurriculumState]:
        curriculum = made(12, seed=seed, rest=0.5)
        ledger: dict[int, Remembered] = {}
        saved = CurriculumState()
        number = 0
        for version in range(10):
            open_groups = []
            for _ in range(batch):
                row = curriculum.pick(number, version)
                assert row is not None
                ledger[number] = Remembered(number, row, version, False, ())
                open_groups.append(number)
                number += 1
            order.shuffle(open_groups)
            for group in open_groups:
                if group == crash:
                    crash = None
                    packed = msgspec.json.encode(msgspec.to_builtins(saved))
                    curriculum = made(12, seed=seed, rest=0.5)
                    state = msgspec.convert(msgspec.json.decode(packed), CurriculumState)
                    curriculum.restore(state, [ledger[n] for n in sorted(ledger) if n >= state.first_unknown])
                row = ledger[group].row
                earned = tuple(rewards(solved(row, group))) if group % 7 else ()
                curriculum.observe(group, row, version, earned)
                ledger[group] = Remembered(group, row, version, True, earned)
                if order.random() < 0.2:
                    saved = curriculum.state()
        curriculum.pick(number, 100)
        return [group.row for group in ledger.values()], curriculum.state()

    assert run(cut) == run(None)


def test_dataset_that_has_shrunk_is_no_trouble() -> None:
    curriculum = made(10)
    for number in range(10):
        attempt(curriculum, number, 2)
    smaller = made(4)
    smaller.restore(curriculum.state(), [])
    assert smaller.pick(10, 1) in range(4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 0.9, "high": 0.1}, "low=0.9 above high=0.1"),
        ({"unseen": 0.0}, "unseen=0.0"),
        ({"memory": 1.0}, "memory=1.0"),
        ({"targett": 1.0}, "curriculum.targett is not a setting"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(DataConfig, {"curriculum": settings})
