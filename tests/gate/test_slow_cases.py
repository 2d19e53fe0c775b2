"""The list of cases that only the slow tests run names tests that there are."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, SLOW_CASES, STALE_LINES


def test_every_line_of_slow_cases_is_a_test_that_there_is() -> None:
    assert SLOW_CASES
    for case in SLOW_CASES:
        file, _, rest = case.partition("::")
        name = re.split(r"\[|::", rest)[0]
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", text), case  # defined there, or imported from a suite


def test_every_line_of_slow_cases_is_a_case_of_the_files_that_this_run_has_collected(
    request: pytest.FixtureRequest,
) -> None:
    """Otherwise its case is back in `make test` unnoticed."""
    assert not request.config.stash[STALE_LINES]
