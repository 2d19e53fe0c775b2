"""The numbers of the summary that follow from the steps."""

import json

import pytest

from headrace.run.observe.summary import age_histogram, commit_gap_ms, summarize_steps
from tests.run.observe.synthetic import step_record


def test_gaps_are_given_in_milliseconds_by_rank() -> None:
    gaps = [0.001 * i for i in range(1, 101)]
    found = commit_gap_ms(gaps)
    assert found["p50"] == pytest.approx(50.5)
    assert found["p99"] == pytest.approx(99.01)


def test_a_run_without_a_commit_has_no_gap() -> None:
    assert commit_gap_ms([]) == {"p50": None, "p99": None}


def test_ages_add_up_in_order() -> None:
    assert list(age_histogram([{3: 1, 0: 2}, {1: 5, 0: 1}]).items()) == [(0, 3), (1, 5), (3, 1)]


def test_the_summary_of_some_steps() -> None:
    steps = [step_record(0, reward_mean=None, commit_gap_s=None), *(step_record(i) for i in (1, 2, 3))]
    found = summarize_steps(steps, wall_s=10.0)
    assert found["reward_first"] == steps[1].reward_mean
    assert found["reward_last"] == steps[3].reward_mean
    assert (found["steps"], found["tokens_generated"], found["tokens_trained"]) == (4, 400, 360)
    assert (found["generated_tok_s"], found["trained_tok_s"]) == (40.0, 36.0)
    assert found["commit_gap_ms"] == {"p50": 1.0, "p99": 1.0}
    assert found["exposed_sync_frac"] == pytest.approx(0.008)
    assert found["max_token_age"] == 1
    assert found["age_histogram"] == {"0": 120, "1": 240}
    assert found["mismatch_kl"] == pytest.approx(4e-4)
    json.dumps(found, allow_nan=False)


def test_the_summary_of_no_steps_has_every_key_and_no_invented_number() -> None:
    empty, full = summarize_steps([], wall_s=0.0), summarize_steps([step_record(0)], wall_s=1.0)
    assert empty.keys() == full.keys()
    assert empty["reward_first"] is None
    assert empty["max_token_age"] is None
    assert empty["generated_tok_s"] == 0.0
