"""Every number that a run reports has a row that says what it is, and the document holds the rows."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.metrics import as_label, quantile
from headrace.control.metrics.batch import repetition
from headrace.run.observe.metrics import REGISTRY, combine_over_run, find, flat, table
from tests.run.observe.staged import Stage
from tests.run.observe.synthetic import step_record

DOCUMENT = Path(__file__).parents[3] / "docs" / "observing.md"


def test_every_number_of_a_run_has_a_row(tmp_path: Path) -> None:
    _, seen = Stage().run(tmp_path)
    names = {name for record in seen.steps for name in flat(record)}
    assert [name for name in names if find(name) is None] == []
    expected = {
        *("reward_mean", "reward_p90", "length_p10", "length_submitted_mean", "turns_mean", "zero_variance_frac"),
        *("version_spread", "age_p90", "engine_busy_frac", "learner_busy_frac", "cost_s_per_episode"),
        *("trained_tok_s", "straggler_s", "queue/ready", "prefill_frac", "truncated_frac", "repetition"),
    }
    assert expected <= names


def test_names_are_unique_and_no_name_fits_two_rows() -> None:
    assert len({row.name for row in REGISTRY}) == len(REGISTRY)
    for row in REGISTRY:
        found = find(re.sub(r"\{\w+\}", "x", row.name))
        assert found is not None
        assert found[0] is row


def test_the_document_has_the_table_of_the_registry() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table() in text, "write headrace.run.observe.metrics.table() into docs/observing.md"


def test_a_number_that_was_not_measured_is_left_out() -> None:
    numbers = flat(step_record(0, reward_mean=None, metrics={"loss": None, "lr": 0.5}))
    assert "reward_mean" not in numbers
    assert "loss" not in numbers
    assert numbers["lr"] == 0.5


def test_metrics_over_a_run_are_combined_as_their_rows_say() -> None:
    steps = [step_record(step, metrics={"age_max": 3.0 - step, "lr": 0.1 * step}) for step in range(3)]
    numbers = combine_over_run(steps)
    assert numbers["trained_tokens"] == 270
    assert numbers["generated_tokens"] == 300
    assert numbers["age_max"] == 3.0
    assert numbers["lr"] == pytest.approx(0.2)
    assert numbers["reward_mean"] == pytest.approx(0.401)


@given(st.text())
def test_any_text_makes_a_label_that_fits_its_pattern(text: str) -> None:
    found = find(f"env/{as_label(text)}/reward_mean")
    assert found is not None
    assert found[1] == as_label(text)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_is_the_inverted_distribution_function(values: list[int], share: float) -> None:
    assert quantile(sorted(values), share) == np.quantile(values, share, method="inverted_cdf")


@given(st.lists(st.integers(0, 3), min_size=5, max_size=60))
def test_repetition_agrees_with_counting_4_grams(ids: list[int]) -> None:
    grams = [tuple(ids[place : place + 4]) for place in range(len(ids) - 3)]
    assert repetition(np.array(ids, np.int32)) == pytest.approx(1 - len(set(grams)) / len(grams))
