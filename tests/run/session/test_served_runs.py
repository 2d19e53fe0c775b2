"""Whole runs whose engine is a server: as the protocol of vLLM and of SGLang has it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EngineUnfit
from headrace.models.config import LoraConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.run.session import load_config, train
from headrace.run.session.evaluating import evaluate
from headrace.testing.servers import FakeServer, fake_server
from headrace.wings.servers.client.carrier import Carrier, CarrierConfig
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.wire import Address, Wire
from headrace.wings.servers.vllm.dialect import call_workers
from tests.run.session.runs import make_run

VOCAB = "0123456789+="
LAUNCH = {"start_timeout_s": 100.0, "engine_restarts": 0, "engine_threads": 1, "learner_threads": 1}


def wanted(model_dir: Path, **more: Any) -> ServeRequirements:
    return ServeRequirements(path=str(model_dir), dtype="float32", max_context=99, **more)


@pytest.mark.parametrize(
    ("kind", "interrupt"),
    [("vllm", "inflight"), pytest.param("sglang", "abort_resume", marks=pytest.mark.slow)],
)
def test_run_trains_and_commits_into_a_server(kind: str, interrupt: str, model_dir: Path, tmp_path: Path) -> None:
    with fake_server(kind, wanted(model_dir)) as (url, server):
        path = make_run(tmp_path, model_dir, launch=LAUNCH, sync={"interrupt": interrupt})
        settings = [
            *(f"engine.kind={kind}", f'engine.server.urls=["{url}"]', "engine.server.wait_s=30"),
            *("engine.server.any_version=true", "observe.view=none"),
        ]
        summary = train(load_config(path, settings))
        assert server.label.startswith("3:")
    assert summary.status == "finished"
    assert list(summary.versions) == [0, 3]
    assert summary.mismatch_abs < 1e-4
    assert summary.ledger.groups.trained == summary.ledger.groups.submitted


def test_adapters_alone_travel_into_a_server(model_dir: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4)
    with fake_server("vllm", wanted(model_dir, lora=lora)) as (url, server):
        path = make_run(tmp_path, model_dir, launch=LAUNCH, sync={"codec": "adapter"})
        settings = [
            "model.lora.rank=4",
            "engine.kind=vllm",
            f'engine.server.urls=["{url}"]',
            "engine.server.wait_s=30",
            "observe.view=none",
        ]
        summary = train(load_config(path, settings))
        assert server.label.startswith("3:")
        assert set(server.files.adapters) == {"default"}
    assert summary.status == "finished"
    assert summary.mismatch_abs < 1e-4


def test_server_to_which_another_run_carries_its_weights_ends_this_one_at_once(model_dir: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "weights").write_bytes(b"abc")
    way = CarrierConfig(backend="gloo", host="127.0.0.1", device="cpu", deadline_s=30.0)
    with (
        fake_server("vllm", wanted(model_dir)) as (url, _),
        Wire(Address(url=url)) as wire,
        closing(Carrier(wire, call_workers, way)) as carrier,
    ):
        carrier.carry(theirs, 1)
        path = make_run(tmp_path, model_dir, launch={**LAUNCH, "engine_restarts": 2})
        settings = ["engine.kind=vllm", f'engine.server.urls=["{url}"]', "engine.server.weights_by=gloo"]
        with pytest.raises(EngineUnfit, match=r"gets its weights from another run, at 127\.0\.0\.1"):
            train(load_config(path, [*settings, "engine.server.wait_s=30", "observe.view=none"]))


@pytest.mark.slow
def test_server_that_is_started_again_gets_the_weights_of_the_run_anew(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, labels = FakeServer.load, list[str]()

    async def loaded(server: FakeServer, where: Path, label: str) -> None:
        labels.append(label)
        await load(server, where, label if len(labels) > 1 else "default")

    monkeypatch.setattr(FakeServer, "load", loaded)
    with fake_server("vllm", wanted(model_dir)) as (url, _):
        path = make_run(tmp_path, model_dir, launch={**LAUNCH, "engine_restarts": 1})
        settings = ["engine.kind=vllm", f'engine.server.urls=["{url}"]', "engine.server.wait_s=30", "observe.view=none"]
        summary = train(load_config(path, settings))
    assert summary.status == "finished"
    assert [label.partition(":")[0] for label in labels] == ["0", "0", "1", "2", "3"]
    assert summary.mismatch_abs < 1e-4
    assert summary.ledger.groups.trained == summary.ledger.groups.submitted


@pytest.mark.slow
def test_adapters_that_are_evaluated_are_taken_by_a_server(model_dir: Path, tmp_path: Path) -> None:
    with fake_server("vllm", wanted(model_dir, lora=LoraConfig(rank=4))) as (url, server):
        path = make_run(tmp_path, model_dir, launch=LAUNCH)
        settings = ["model.lora.rank=4", "engine.kind=vllm", f'engine.server.urls=["{url}"]', "engine.server.wait_s=30"]
        config = load_config(path, settings)
        evaluate(config, overrides=[f"data.eval_path={config.data.path}"])
        assert set(server.files.adapters) == {"default"}


@pytest.mark.slow
def test_what_a_server_recorded_of_a_mixture_is_replayed(tmp_path: Path) -> None:
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model_dir = make_tiny(tmp_path / "mixture" / "model", TinySpec(vocab=VOCAB, kind="qwen3_moe", extra=extra))
    with fake_server("vllm", wanted(model_dir, record_kept=True, record_routing=True)) as (url, _):
        path = make_run(tmp_path, model_dir, launch=LAUNCH)
        settings = [
            "engine.top_p=0.8",
            "engine.kind=vllm",
            f'engine.server.urls=["{url}"]',
            "engine.server.wait_s=30",
            "observe.view=none",
        ]
        summary = train(load_config(path, settings))
    assert summary.status == "finished"
    assert summary.mismatch_abs < 1e-4
    lines = (path.parent / "run" / "metrics.jsonl").read_text().splitlines()
    differs = [json.loads(line)["metrics"]["routing_differs"] for line in lines]
    assert differs[0] == 0.0, "the learner's own routers choose other experts under the same weights"
    assert len(differs) == 3
