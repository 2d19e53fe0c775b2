"""A dashboard that is asked over HTTP without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from headrace.base.clock import RealClock
from headrace.wings.view.app import make_app
from headrace.wings.view.run import OpenRun
from tests.wings.view.browsing import LET_IN, TOKEN


def ask(client: TestClient, path: str) -> Any:
    answer = client.get(f"/api/runs/0/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def opened(directory: Path) -> TestClient:
    client = stranger(directory)
    client.headers.update(LET_IN)
    return client


def stranger(directory: Path, token: str = TOKEN) -> TestClient:
    return TestClient(
        make_app([OpenRun(directory, RealClock())], clock=RealClock(), token=token, ending=lambda: True),
        base_url="http://127.0.0.1",
        follow_redirects=False,
    )
