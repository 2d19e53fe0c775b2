"""The exported trace keeps the rules of the Trace Event Format, and holds what the run's trace holds."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import DataError, RunError
from headrace.base.types.trace import Span
from headrace.run.observe import JsonlWriter, load_run
from headrace.run.observe.perfetto import split_into_tracks, write_trace
from tests.run.observe.synthetic import MakeRun

NEEDED = {"X": {"name", "pid", "tid", "ts", "dur"}, "C": {"name", "pid", "ts", "args"}, "M": {"name", "pid", "args"}}
"""What each kind of event must have (Trace Event Format, "Event Descriptions")."""


def exported(run: Path, out: Path) -> list[dict[str, Any]]:
    num = write_trace(load_run(run), out)
    data = gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes()
    tree = json.loads(data)
    assert len(tree["traceEvents"]) == num
    return tree["traceEvents"]


def test_every_event_has_what_the_format_asks_for(make_run: MakeRun, tmp_path: Path) -> None:
    for event in exported(make_run(20), tmp_path / "out.json"):
        assert NEEDED[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        for value in event["args"].values():
            assert value is not None


def test_the_export_holds_every_span_at_its_time(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(20)
    spans = load_run(run).spans
    zero = min(span.start_s for span in spans)
    slices = [event for event in exported(run, tmp_path / "out.json.gz") if event["ph"] == "X"]
    held = sorted((event["name"], round(event["ts"]), round(event["ts"] + event["dur"])) for event in slices)
    assert held == sorted((s.name, round((s.start_s - zero) * 1e6), round((s.end_s - zero) * 1e6)) for s in spans)


def test_lanes_are_processes_in_the_usual_order_with_reward_and_queues_as_curves(
    make_run: MakeRun, tmp_path: Path
) -> None:
    events = exported(make_run(3), tmp_path / "out.json")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["engine", "learner", "sync", "scoring", "rollout", "metrics"]
    curves = {event["name"] for event in events if event["ph"] == "C"}
    assert {"groups", "reward"} <= curves


moments = st.integers(0, 30)


@given(st.lists(st.tuples(moments, moments).map(sorted), max_size=40))
def test_on_a_track_no_span_begins_before_the_last_has_ended_and_no_track_is_too_many(
    times: list[tuple[int, int]],
) -> None:
    spans = [Span(lane="rollout", name="episode", start_s=start, end_s=end) for start, end in times]
    laid = split_into_tracks(spans)
    for track in laid:
        for before, after in pairwise(track):
            assert before.end_s <= after.start_s
    assert sorted((s.start_s, s.end_s) for track in laid for s in track) == sorted(map(tuple, times))
    at_once: dict[int, int] = defaultdict(int)
    for start, end in times:
        for tick in range(start, end):
            at_once[tick] += 1
    if all(start < end for start, end in times):
        assert len(laid) == max(at_once.values(), default=0)


def test_hostile_names_stay_text(make_run: MakeRun, tmp_path: Path) -> None:
    run, name = make_run(1), '"}],</script>\x1b[31m\u202e'
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        trace.write([Span(lane=name, name=name, start_s=5000.0, end_s=5001.0)])
    assert name in {event["name"] for event in exported(run, tmp_path / "out.json")}


def test_a_run_without_a_trace_and_a_place_that_cannot_be_written_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(1)
    with pytest.raises(RunError, match="nowhere"):
        write_trace(load_run(run), tmp_path / "nowhere" / "out.json")
    (run / "trace.jsonl").unlink()
    with pytest.raises(DataError, match="holds no trace"):
        write_trace(load_run(run), tmp_path / "out.json")
