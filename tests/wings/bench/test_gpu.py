"""The benchmark of a GPU: its driver with stages in real processes, its refusals, and the whole of it on a device that
only claims to be one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, DataError
from headrace.models.kernels.build import find_compiler
from headrace.wings.bench import run_benchmark
from headrace.wings.bench.gpu import refusals, shapes
from headrace.wings.bench.gpu import vllm as vllm_stage
from headrace.wings.bench.gpu.base import GIB, GpuStageOutcome, read_lines
from headrace.wings.bench.gpu.driver import StagesPlan, run_stages
from headrace.wings.bench.gpu.files import GpuFile, compare_figures, make_card_rates, read_file, write_file
from headrace.wings.bench.gpu.probe import CardFacts
from headrace.wings.bench.gpu.stages import STAGES, StageKind, choose_stages
from headrace.wings.plan.catalogue import model

ROOT = Path(__file__).parents[3]
MODULE = "tests.wings.bench.gpu_stages"
FINE = CardFacts(
    torch="2.13.0", cuda="13.0", triton="3.7.1", count=1, name="NVIDIA H100 80GB HBM3", capability=(9, 0),
    total=80 * GIB, free=79 * GIB,
)  # fmt: skip


def kinds(**shares: float) -> dict[str, StageKind]:
    return {
        name: StageKind(module=MODULE, description=name, share_s=share, min_s=0.0 if name == "hanging" else 5.0)
        for name, share in shares.items()
    }


def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float, **shares: float
) -> tuple[list[GpuStageOutcome], list[list[str]]]:
    """The outcomes of stages of these shares, and the states that were flushed after each."""
    monkeypatch.chdir(ROOT)  # the stages are imported from here
    flushed: list[list[str]] = []

    def flush(outcomes: Sequence[GpuStageOutcome]) -> None:
        flushed.append([outcome.state for outcome in outcomes])

    plan = StagesPlan(names=list(shares), budget_s=budget_s, directory=tmp_path, kinds=kinds(**shares))
    return run_stages(plan, RealClock(), flush, lambda line: None), flushed


def test_a_stage_that_fails_or_hangs_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, flushed = ran(tmp_path, monkeypatch, 80, first=100, failing=100, hanging=1, last=10)
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "out of time", "done"]
    assert flushed == [[outcome.state for outcome in outcomes[:count]] for count in (1, 2, 3, 4)]
    first, failed, hung, last = outcomes
    assert "nobody's business" in failed.why
    assert first.why == last.why == ""
    assert [row["what"] for row in first.rows] == ["first", "what is endless", "what is broken", "after"]
    assert "--budget" in first.rows[1]["left_out"]
    assert first.rows[2]["failed"].startswith("ZeroDivisionError")
    assert [row["what"] for row in hung.rows] == ["hanging", "child"], "what it found before it was killed counts"
    assert not any(psutil.pid_exists(row["pid"]) for row in hung.rows)
    assert last.rows[0]["ceilings"] == {"first rate": 2.0, "failing rate": 2.0, "hanging rate": 2.0}
    assert [(target.name, target.holds) for target in first.targets] == [
        ("first was here", True), ("first was fast", False), ("what is broken: failed", False)
    ]  # fmt: skip
    assert first.processor_s > 0


def test_stages_that_no_longer_fit_are_left_out_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, _ = ran(tmp_path, monkeypatch, 1.0, first=1, hanging=1)
    assert [outcome.state for outcome in outcomes] == ["left out", "out of time"]
    assert outcomes[1].why.startswith("killed after ")
    assert "raise --budget" in outcomes[1].why
    assert "it needs 5" in outcomes[0].why
    assert "raise --budget" in outcomes[0].why


def test_a_stage_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from headrace.base.clock import RealClock\n"
        "from headrace.wings.bench.gpu.driver import StagesPlan, run_stages\n"
        "from tests.wings.bench.test_gpu import kinds\n"
        "plan = StagesPlan(names=['hanging'], budget_s=1e6, directory=Path(sys.argv[1]), kinds=kinds(hanging=1))\n"
        "run_stages(plan, RealClock(), lambda outcomes: None, lambda line: None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT) as command:
        pids: list[int] = []
        while len(pids) < 2:
            assert command.poll() is None
            pids = [line.row["pid"] for line in read_lines(tmp_path / "hanging.jsonl") if line.row is not None]
        stage = psutil.Process(pids[0])
        command.kill()
    psutil.wait_procs([stage], timeout=60)
    assert not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE


def test_a_line_that_was_not_finished_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert read_lines(file) == []
    file.write_bytes(b'{"row":{"what":"a"}}\n{"figures":{"x":1.5}}\n{"row":{"wha')
    assert [(line.row, line.figures) for line in read_lines(file)] == [({"what": "a"}, None), (None, {"x": 1.5})]


@pytest.mark.parametrize(
    ("facts", "names", "problem", "remedy"),
    [
        ({"cuda": ""}, ["facts"], "torch 2.13.0 is built without CUDA", "pytorch.org"),
        ({"error": "driver too old (found version 11040)", "count": 0}, ["facts"], "version 11040", "nvidia-smi"),
        ({"count": 0}, ["facts"], "it sees none", "CUDA_VISIBLE_DEVICES"),
        ({"name": "Tesla V100", "capability": (7, 0)}, ["facts"], "Tesla V100 has compute capability 7.0", "Ampere"),
        ({"free": 61 * GIB}, ["facts"], "other processes hold 19.0 of 80.0 GiB", "nvidia-smi"),
        ({"total": 24 * GIB, "free": 24 * GIB}, ["facts", "engine", "learner"], "stage learner needs 38 GiB",
         "--stages facts,engine leaves it out; in a run of your own learner.memory.offload_optimizer = true frees 23 "),
        ({"total": 32 * GIB, "free": 32 * GIB}, ["sync", "engine"], "stage sync needs 41 GiB", "--stages engine"),
        ({"total": 8 * GIB, "free": 8 * GIB}, ["engine"], "stage engine needs 9 GiB for qwen2.5-1.5b", "facts leaves"),
        ({"triton": ""}, ["kernels"], "Triton is not installed", "headrace[cuda]"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_measured_is_refused_before_anything_starts(
    facts: dict[str, Any], names: list[str], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        refusals.refuse_card(msgspec.structs.replace(FINE, **facts), names)
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy


def test_a_machine_without_a_compiler_for_triton_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    refusals.refuse_card(FINE, ["facts", "learner"])
    with pytest.raises(ConfigError, match="no C compiler is installed \\(gcc, clang, cc\\)"):
        refusals.refuse_card(FINE, ["kernels"])
    compiler = tmp_path / "own-cc"
    compiler.touch(mode=0o700)
    monkeypatch.setenv("CC", str(compiler))
    refusals.refuse_card(FINE, ["kernels"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stages": "facts,kernles"}, "--stages names 'kernles'"),
        ({"budget": -3.0}, "--budget -3 is no time"),
        ({"vllm": "/nowhere/python"}, "--vllm '/nowhere/python' is no program"),
        ({"out": "."}, "--out . cannot be written"),
        ({"out": "README.md"}, "--out README.md exists"),
        ({"compare": "README.md"}, "README.md is no file of headrace bench gpu"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    before = set(os.listdir())
    with pytest.raises((ConfigError, DataError), match=problem.replace("(", "\\(")):
        run_benchmark("gpu", pretend=True, **options)
    assert set(os.listdir()) == before, "no file was begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused_and_told_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MODELS_BYTES", 1 << 60)  # more than any disk has: the GPU is what is named first
    with pytest.raises(ConfigError) as refused:
        run_benchmark("gpu", out=str(tmp_path / "figures.json"))
    assert "--pretend" in refused.value.remedy
    assert not (tmp_path / "figures.json").exists()


def test_folders_without_room_for_the_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MODELS_BYTES", 0)
    assert refusals.model_folder() == refusals.shared_memory_root()
    monkeypatch.setattr(refusals, "MODELS_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="the random models of all stages take") as refused:
        refusals.model_folder()
    assert "TMPDIR" in refused.value.remedy


def test_other_benchmarks_refuse_the_options_of_this_one() -> None:
    with pytest.raises(ConfigError, match="benchmark loop has no option --pretend"):
        run_benchmark("loop", pretend=True)


def test_stages_keep_their_order() -> None:
    assert list(choose_stages("")) == list(STAGES)
    assert list(choose_stages(" soak,sync ")) == ["facts", "sync", "soak"]


def test_files_are_compared_and_an_other_format_is_refused(tmp_path: Path) -> None:
    now, before = {"engine": 90.0, "gap_s": 0.5, "new": 1.0, "same": 1.0}, {"engine": 100.0, "gap_s": 1.0, "same": 1.01}
    rows = {row["what"]: (row["is"], row["ratio"]) for row in compare_figures(now, before)}
    assert rows == {
        "compared, engine": ("slower", 0.9), "compared, gap_s": ("faster", 0.5),
        "compared, same": ("same", pytest.approx(0.990, abs=1e-3)),
    }  # fmt: skip
    outcome = GpuStageOutcome(name="facts", state="done", figures={"copy_device_gb_s": 3000.0})
    content = GpuFile(
        made="now", pretend=False, card="H100", budget_s=1.0, rates=make_card_rates("H100", [outcome]), stages=[outcome]
    )
    assert content.rates.copy_device_gb_s == 3000.0
    assert content.rates.train_share is None
    write_file(tmp_path / "a.json", content)
    assert read_file(tmp_path / "a.json") == content
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    write_file(tmp_path / "b.json", msgspec.structs.replace(content, format=99))
    with pytest.raises(DataError, match="format 99"):
        read_file(tmp_path / "b.json")


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen2.5-1.5b"])
def test_models_have_the_sizes_of_the_catalogue(name: str) -> None:
    assert shapes.MODELS[name].sizes == model(name)


def test_layers_that_are_left_out_change_nothing_else() -> None:
    for cut, whole in ((shapes.MIXTURE, "qwen3-30b-a3b"), (shapes.SINKS, "gpt-oss-20b")):
        ours, theirs = shapes.MODELS[cut].sizes, model(whole)
        assert ours.kv_numbers / ours.layers == theirs.kv_numbers / theirs.layers
        assert ours.expert_params / ours.layers == theirs.expert_params / theirs.layers
        assert (ours.hidden, ours.heads, ours.expert_share) == (theirs.hidden, theirs.heads, theirs.expert_share)


def with_vllm(directory: Path, context: int) -> Path:
    """An interpreter that has a module of vLLM's names, which answers at once: what is tried is the program that it
    runs, and what that is told."""
    (directory / "vllm.py").write_text(
        "from types import SimpleNamespace as N\n"
        "__version__ = '1.2'\n"
        "SamplingParams = N\n"
        "class LLM:\n"
        "    def __init__(self, **settings): self.settings = settings\n"
        "    def generate(self, prompts, params, use_tqdm):\n"
        "        assert params.ignore_eos and self.settings['max_model_len'] == "
        f"{context}\n"
        "        return [N(outputs=[N(token_ids=[1] * params.max_tokens)]) for _ in prompts]\n"
    )
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    program.chmod(0o700)
    return program


def test_program_for_vllm_counts_the_tokens_that_it_is_given(tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    spec = {"model": "m", "dtype": "float32", "context": 40, "sequences": 2, "new": 3, "prompts": [[1, 2], [3, 4]]}
    order.write_bytes(msgspec.json.encode(spec))
    done = subprocess.run(
        [str(with_vllm(tmp_path, 40)), "-P", str(vllm_stage.PROGRAM), str(order)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert found["vllm"] == "1.2"
    assert found["tok_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has devices of its own")
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is installed")
def test_all_of_it_runs_on_a_device_that_only_claims_to_be_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    vllm = str(with_vllm(tmp_path, vllm_stage.TINY.context))
    report = run_benchmark("gpu", pretend=True, budget=1500.0, out=str(out), vllm=vllm)
    states = {row["stage"]: (row["state"], row.get("why")) for row in report.rows if "stage" in row}
    assert states == dict.fromkeys(STAGES, ("done", None))
    assert [target.name for target in report.targets if not target.holds] == []
    found = read_file(out)
    assert found.pretend
    assert found.card == "claimed"
    by_stage = {outcome.name: outcome for outcome in found.stages}
    (engine,) = [row for row in by_stage["engine"].rows if row["what"] == "qwen2.5-0.5b, 4 x 20"]
    assert engine["launch"] > 0
    assert engine["download"] <= 1
    (apart,) = [row for row in by_stage["exact"].rows if row["what"] == "engine against learner, qwen3-0.6b, float32"]
    assert apart["preempted"] > 0
    assert by_stage["sharing"].rows[0]["asleep_gib"] < by_stage["sharing"].rows[0]["awake_gib"]
    assert by_stage["vllm"].rows[0]["vllm"] == "1.2"
    kills = next(row for row in by_stage["demo"].rows if row["what"] == "demo")
    assert (sorted(kills["killed"]), kills["steps"]) == (["engine", "learner"], 30)
