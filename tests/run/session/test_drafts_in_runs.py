"""A whole run that drafts tokens from history is the run without, bit for bit, and its history outlives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from headrace.models.heads import HEADS_FILE
from headrace.run.session.directory import FACTS_FILE, read_sealed
from headrace.wings.bench.speculation_heads import add_head
from tests.engine.native.test_speculation import needs_kernels
from tests.run.session.runs import make_run, tiny_model, verb

EXACT = ("--set", "model.deterministic=true", "--set", "sync.interrupt=inflight_recompute")


def trained(directory: Path, model: Path, speculation: str, *more: str) -> dict[str, Any]:
    """The run's weights by snapshot and tensor, its last step's metrics, and the facts of its engine."""
    sections: dict[str, Any] = {
        "data": {"shuffle": True},
        "engine": {"speculation": speculation, "max_new_tokens": 16, "temperature": 0.3},
        "flow": {"groups_per_step": 4, "group_size": 4, "max_age": 0},
        "learner": {"lr": 1e-4},
        "run": {"steps": 9, "checkpoint_every": 3, "keep_checkpoints": 9},
    }
    run_file = directory / "run.toml"
    if not run_file.exists():
        make_run(directory, model, **sections)
    verb("train", run_file, *EXACT, *more)
    place = directory / "run"
    steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    weights = {
        f"{snapshot.name}/{name}": array.tobytes()
        for snapshot in sorted((place / "checkpoints").iterdir())
        for name, array in load_file(next(snapshot.rglob("model.safetensors"))).items()
    }
    passes = [step["metrics"]["passes_by_token"] for step in steps if "passes_by_token" in step.get("metrics", {})]
    return {"weights": weights, "passes": passes, "engine": read_sealed(place / FACTS_FILE)["engine"]}


@needs_kernels
@pytest.mark.slow
def test_whole_run_has_the_weights_of_one_without_drafts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    without, drafted = (trained(tmp_path / kind, model, kind) for kind in ("off", "history"))
    assert drafted["weights"] == without["weights"]
    assert len(drafted["weights"]) > 3
    assert min(drafted["passes"]) < 0.9
    assert (tmp_path / "history" / "run" / "answers-engine.bin").exists()
    resumed = trained(tmp_path / "history", model, "history", "--resume", "--set", "run.steps=12")
    again = trained(tmp_path / "off", model, "off", "--resume", "--set", "run.steps=12")
    assert resumed["weights"] == again["weights"]
    assert resumed["engine"]["history_tokens_found"] > 500
    assert resumed["engine"]["history_entries_damaged"] == 0


@needs_kernels
@pytest.mark.slow
def test_whole_run_with_a_prediction_head_has_the_weights_of_one_without(tmp_path: Path) -> None:
    model = add_head(tiny_model(tmp_path / "model", kind="qwen2"))
    without, drafted = (trained(tmp_path / kind, model, kind) for kind in ("off", "heads"))
    assert drafted["weights"] == without["weights"]
    assert len(drafted["weights"]) > 3
    assert drafted["engine"]["head_weights"] > 0
    newest = max((tmp_path / "heads" / "run" / "checkpoints").iterdir())
    assert load_file(next(newest.rglob(HEADS_FILE))).keys() == load_file(model / HEADS_FILE).keys()
