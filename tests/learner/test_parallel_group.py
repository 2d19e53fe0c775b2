"""Weights that every rank of a learner sends its part of are, in every engine, those that the ranks hold together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner.builders import tiny
from tests.learner.rank_group_cases import SENT
from tests.learner.test_parallel import KINDS, Found, answer, run
from tests.once import once, selected, shared_directory

FOUR = [name for name in SENT if name.endswith(("_tp2", "2x2_delta")) and name != "sent_tp2"]
TWO = [name for name in SENT if name not in FOUR]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shared_directory(tmp_path_factory, "group")
    for kind in ("dense", "tied", "experts"):
        once(directory, f"made {kind}", lambda kind=kind: tiny(directory / kind, **KINDS[kind]))
    return directory


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, place: Path) -> Found:
    cases = [case for case in selected(request, "case") if case in TWO]
    return once(place, "two", lambda: run(place, 2, [*cases, "refused_fp8"]))


@pytest.fixture(scope="module")
def four(place: Path) -> Found:
    return once(place, "four", lambda: run(place, 4, FOUR))


def assert_sent(found: Found, case: str) -> None:
    """Every engine has every bit of four versions, and each rank has sent no more than it holds."""
    ranks = answer(found, case)["ranks"]
    for rank in ranks:
        assert rank["wrong"] == []
        assert rank["own"] <= rank["held"] + rank["total"] // 50  # each piece begins at a cache line
    assert sum(rank["own"] for rank in ranks) <= 1.1 * ranks[0]["total"]  # what two ranks hold is sent by one
    if SENT[case][2] != "adapter":
        assert max(rank["own"] for rank in ranks) < 1.3 * ranks[0]["total"] / len(ranks)


@pytest.mark.parametrize("case", TWO)
def test_engines_hold_what_two_ranks_hold_together(two: Found, case: str) -> None:
    assert_sent(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_engines_hold_what_four_ranks_hold_together(four: Found, case: str) -> None:
    assert_sent(four, case)


def test_eight_bits_of_parts_of_rows_are_refused(two: Found) -> None:
    assert "has one scale for a whole row" in answer(two, "refused_fp8")["problem"]
