"""Whole runs whose engine is a server: as the protocol of vLLM and of SGLang has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.session import load_config, train
from headrace.testing.engine_servers import fake_server
from tests.session.runs import make_run

LAUNCH = {"start_timeout_s": 100.0, "engine_restarts": 0, "engine_threads": 1, "learner_threads": 1}


@pytest.mark.parametrize(
    ("kind", "interrupt"),
    [("vllm", "inflight"), pytest.param("sglang", "abort_resume", marks=pytest.mark.slow)],
)
def test_run_trains_and_commits_into_a_server(kind: str, interrupt: str, model_dir: Path, tmp_path: Path) -> None:
    with fake_server(kind, model_dir) as (url, server):
        path = make_run(tmp_path, model_dir, launch=LAUNCH, sync={"interrupt": interrupt})
        settings = [
            *(f"engine.kind={kind}", f'engine.server.urls=["{url}"]', "engine.server.wait_s=30"),
            *("engine.server.any_version=true", "observe.view=none"),
        ]
        summary = train(load_config(path, settings))
        assert server.label == "3"
    assert summary.status == "finished"
    assert list(summary.versions) == [0, 3]
    assert summary.mismatch_abs < 1e-4
    assert summary.ledger.groups.trained == summary.ledger.groups.submitted
