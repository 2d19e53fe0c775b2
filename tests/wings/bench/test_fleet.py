"""The benchmark of the fleet, cut down."""

from __future__ import annotations

import pytest

from headrace.wings.bench import fleet, run_benchmark


@pytest.mark.slow
def test_a_quick_run_measures_every_figure_but_those_of_real_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENGINES": 5, "SEQUENCES": 80, "ROUNDS": 1, "KILLS": 3, "LOADED_S": 20.0}.items():
        monkeypatch.setattr(fleet, name, value)
    report = run_benchmark("fleet", quick=True)
    targets = {target.name: target for target in report.targets}
    for name, target in targets.items():
        assert target.holds or name.startswith("routing overhead"), target
    assert targets["tokens made again per death and sequence"].value > 0
    routed = report.rows[0]
    assert 0 < routed["p50_ms"] <= routed["p99_ms"] <= routed["max_ms"]
