"""Warnings of a run: which of them are kept, and what takes their place when their cause has passed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.base.types.observation import Event
from headrace.control.state import RunState


def test_a_warning_whose_cause_has_passed_says_so_from_then_on_until_it_comes_back() -> None:
    heard: list[Event] = []
    rest: Any = None
    observers: Any = SimpleNamespace(event=heard.append)
    metrics: Any = SimpleNamespace(wall_s=1.0)
    state = RunState(parts=rest, run=rest, flow=rest, board=rest, observers=observers, metrics=metrics)
    state.warn("engine is stopped, for 4 s", kind="engine is stopped", always=True)
    assert state.warnings == ["engine is stopped, for 4 s"]
    state.resolve_warning("engine was stopped for 9 s, and continues", kind="engine is stopped")
    assert state.warnings == ["engine was stopped for 9 s, and continues"]
    state.warn("engine is stopped, for 3 s", kind="engine is stopped", always=True)
    assert state.warnings == ["engine is stopped, for 3 s (the latest of 2 times)"]
    assert [each.level for each in heard] == ["warning", "info", "warning"]
