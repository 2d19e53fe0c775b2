"""The benchmark of the engine, cut down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import ComponentDied, ConfigError
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench import engine, run_benchmark
from headrace.wings.bench.engine_peers import PeerProcess, open_worker


@pytest.mark.slow
def test_a_quick_run_measures_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tuple(dataclasses.replace(match, peers=()) for match in engine.QUICK)
    monkeypatch.setattr(engine, "QUICK", alone)
    report = run_benchmark("engine", quick=True, threads=1)
    found = {row["what"]: row for row in report.rows}
    assert found["1M, 4 x 8"]["tok_s"] > 0
    assert 0 < found["step of 4 sequences"]["outside_forward_ms"] < found["step of 4 sequences"]["step_ms"]
    assert found["gap of 10 commits"]["mean_running"] == 4
    assert {target.name for target in report.targets} == {
        "floor of a step by the step", "recording kept-sets, more time", "recording routing, more time",
        "commit gap p99", "fresh process to first token",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("side", ["generate", "continuous"])
def test_peers_give_the_tokens_that_were_asked_for(side: str, tmp_path: Path) -> None:
    with open_worker(side, make_tiny(tmp_path / "model", engine.SMALL), 1) as peer:
        for _ in range(2):
            assert peer.call(engine.make_request((8,) * 4))["tokens"] == 32


def test_a_process_that_ends_says_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.exit('out of luck')"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    with pytest.raises(ComponentDied, match="out of luck"):
        PeerProcess("some side", process, log).call({})
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.close()


def test_lognormal_lengths_have_the_mean_and_spread_they_name() -> None:
    lengths = engine.draw_lengths(20_000, 128, 10_000)
    mean = sum(lengths) / len(lengths)
    spread = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5
    assert abs(mean - 128) < 4
    assert abs(spread / mean - 1) < 0.1
    assert max(engine.draw_lengths(256, 128, 512)) <= 512


def test_the_floor_of_a_step_is_products_or_weights_and_the_context() -> None:
    spec = TinySpec(vocab="abcde", hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=6)
    weights = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6 + 4 * 8
    assert engine.step_floor_s(spec, 10, 0, {"flop_per_s": 1.0, "bytes_per_s": 1e9}) == 20 * weights
    slow_memory = {"flop_per_s": 1e9, "bytes_per_s": 1.0}
    assert engine.step_floor_s(spec, 10, 3, slow_memory) == 4 * weights + 4 * 2 * 2 * 10 * 3


def test_orders_are_the_same_each_time_and_can_be_sent() -> None:
    order = engine.make_request((3, 4), top_p=0.5)
    assert json.loads(json.dumps(order)) == engine.make_request((3, 4), top_p=0.5)
    assert [len(prompt) for prompt in order["prompts"]] == [engine.PROMPT] * 2


def test_an_option_of_another_benchmark_is_refused() -> None:
    with pytest.raises(ConfigError, match="benchmark algo has no option --quick"):
        run_benchmark("algo", quick=True)


class Answering:
    """A side that answers at once, in the number format and with the unit of the processor that it names."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def call(self, request: dict[str, object]) -> dict[str, object]:
        lengths = request.get("lengths", [])
        assert isinstance(lengths, list)
        return {"tokens": sum(lengths), "cache_bytes": 0, "unit": self.unit}

    def resident_bytes(self) -> int:
        return 1


@pytest.mark.parametrize(("unit", "num_targets"), [("AMX", 1), ("AVX-512 BF16", 0)])
def test_bfloat16_has_a_target_only_where_the_processor_has_a_unit_for_it(
    unit: str, num_targets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "open_worker", lambda side, *_, **__: contextlib.nullcontext(Answering(unit)))
    monkeypatch.setattr(engine, "make_tiny", lambda directory, spec: directory)
    bench = engine._EngineBench(directory=tmp_path, threads=1, vllm="", quick=True, on_progress=lambda line: None)
    (match,) = (each for each in engine.QUICK if each.side == "bfloat16")
    rows, targets = engine._compare(bench, match)
    assert [row["side"] for row in rows if "side" in row] == ["bfloat16", "native"]
    assert len(targets) == num_targets
