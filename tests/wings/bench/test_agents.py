"""The benchmark of agents, cut down."""

from __future__ import annotations

import pytest

from headrace.wings.bench import run_benchmark


@pytest.mark.slow
def test_a_quick_run_measures_both_runs_of_a_pair() -> None:
    report = run_benchmark("agents", quick=True)
    barrier, paced = report.rows
    assert (barrier["what"], paced["what"]) == ("barrier", "paced")
    assert (barrier["max_token_age"], barrier["steps"]) == (0, paced["steps"])
    targets = {target.name: target for target in report.targets}
    assert next(target for name, target in targets.items() if name.startswith("age of the oldest")).holds
    assert next(target for name, target in targets.items() if name.startswith("tokens trained")).holds
