"""1,000 steps of 512 episodes: every page in well under a second or two, and never all of it in memory."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.observation import StepRecord
from headrace.base.types.trace import Span
from headrace.flow.ledger.bundles import encode_bundle
from headrace.run.observe import JsonlWriter
from headrace.wings.view.app import make_app
from headrace.wings.view.run import OpenRun
from tests.wings.view.browsing import LET_IN, TOKEN
from tests.wings.view.synthetic import STARTED_S, given, record, sampled, write_run

PATHS = (
    *("overview", "metrics", "series?names=reward_mean,loss,wait_s", "flow", "system", "search?words=no such words"),
    *("timeline", "timeline?from=500&to=503&bins=1200", "timeline?bins=1200", "outliers/500"),
    *("episodes", "episodes?offset=500000", "episodes?order=reward", "episodes?status=failed"),
    *("episodes?reward_from=0.95&order=tokens&offset=1000", "episodes/64000.2", "episodes/64000.2/turns/1"),
)
STEPS = 1000
GROUPS = 128
SIZE = 4


def write_large(directory: Path) -> Path:
    """Written past the ledger's operations, which would take minutes."""
    write_run(directory, steps=1)
    turns = [given("What is it?"), sampled("42 or so", version=0, parent=0)]
    bundle, _ = encode_bundle([EpisodeGraph(key=EpisodeKey(0, place), turns=turns) for place in range(SIZE)])
    with sqlite3.connect(directory / "ledger.sqlite", isolation_level=None) as db:
        db.execute("BEGIN")
        for table in ("episodes", "bundles", "groups", "steps", "versions"):
            db.execute(f"DELETE FROM {table}")
        numbers = range(STEPS * GROUPS)
        db.executemany(
            "INSERT INTO groups (number, row, state, oldest_version, step, submitted_s, moved_s)"
            " VALUES (?, 0, 'released', ?, ?, ?, ?)",
            ((n, max(0, n // GROUPS - 1), n // GROUPS, STARTED_S, STARTED_S) for n in numbers),
        )
        db.executemany(
            "INSERT INTO episodes VALUES (?, ?, 'scored', '', ?, 8, ?, ?, ?, '{}', '{}', ?, ?)",
            (
                (n, p, (n * 7 + p) % 11 / 10, max(0, n // GROUPS - 1), max(0, n // GROUPS - 1), STARTED_S, n, p)
                for n in numbers
                for p in range(SIZE)
            ),
        )
        db.executemany("INSERT INTO bundles VALUES (?, ?)", ((n, bundle) for n in numbers))
        db.executemany(
            "INSERT INTO steps VALUES (?, ?, '{}', ?, ?)",
            ((step, GROUPS * SIZE * 8, json.dumps({1: GROUPS * SIZE * 8}), STARTED_S) for step in range(STEPS)),
        )
        db.execute("COMMIT")
    db.close()
    with JsonlWriter[StepRecord](directory / "metrics.jsonl") as metrics:
        metrics.write(record(step) for step in range(1, STEPS))
    with JsonlWriter[Span](directory / "trace.jsonl") as trace:
        for step in range(STEPS):
            zero = 5000.0 + step
            trace.write(
                Span(
                    lane="rollout",
                    name="episode",
                    start_s=zero + each / 600,
                    end_s=zero + each / 600 + 0.4,
                    step=step,
                    of=EpisodeKey(step * GROUPS + each // 4, each % 4),
                )
                for each in range(GROUPS * SIZE)
            )
    return directory


@pytest.mark.slow
def test_a_run_of_half_a_million_episodes_is_usable(tmp_path: Path) -> None:
    directory = write_large(tmp_path / "run")
    clock, process = RealClock(), psutil.Process()
    before = process.memory_info().rss
    run = OpenRun(directory, clock)
    took_s: dict[str, float] = {}
    with TestClient(make_app([run], clock=clock, token=TOKEN, ending=lambda: True), headers=LET_IN) as client:
        for path in PATHS:
            began_s = clock.now()
            answer = client.get(f"/api/runs/0/{path}")
            took_s[path] = clock.now() - began_s
            assert answer.status_code == 200, answer.text
    run.close()
    grown = process.memory_info().rss - before
    print({path: round(seconds, 3) for path, seconds in took_s.items()}, f"{grown / 2**20:.0f} MiB")
    first = {"timeline", "flow"}  # the index, and the books: once
    assert max(seconds for path, seconds in took_s.items() if path not in first) < 2.0
    assert max(took_s.values()) < 10.0
    assert grown < 500 * 2**20
