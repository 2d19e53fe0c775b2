"""A device that only claims to be one shows what a GPU would refuse, and that nothing here does that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models.kernels.build import find_compiler
from headrace.testing.claimed import device_environment
from tests.models.kinds import tiny
from tests.testing.claimed_loop import TOKENS
from tools.families.tiny import write_model

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has devices of its own"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is installed"),
]
UPLOADS, DOWNLOADS = 13, 1
"""What a pass of the engine that samples without controls sends to the device, and fetches from it."""
TRAINING_WAITS, TRAINING_DOWNLOADS = 8, 2
"""How often a step of one micro-batch waits for the device, and fetches from it."""


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return device_environment(tmp_path_factory.mktemp("claimed"))


def run(program: str, variables: dict[str, str], *arguments: str) -> Any:
    """The JSON that a program of this directory prints."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([variables["PYTHONPATH"], str(root), str(root / "src")])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.testing.{program}", *arguments],
        env={**os.environ, **variables, "PYTHONPATH": paths}, cwd=root, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_a_gpu_would_refuse_is_refused_and_what_it_would_wait_for_is_counted(variables: dict[str, str]) -> None:
    found = run("claimed_faults", variables)
    assert "got tensors on cuda:0 and on cpu, at " in found["told"]["mixed"]
    assert "tests/testing/claimed_faults.py:" in found["told"]["mixed"]
    assert "got tensors on cuda:0 and on cpu" in found["told"]["product"]
    assert "can't convert cuda:0 device type tensor to numpy" in found["told"]["numpy"]
    assert "is set to one on cpu" in found["told"]["data"]
    assert found["told"]["gradient"] == "cuda:0"
    assert found["memory"] == [4000, 0], "a view takes none"
    assert found["told"]["complex"] == "[[0.0, -1.0]]"
    assert found["counts"] == {
        "item": {"wait": 1}, "cpu": {"download": 1}, "list": {"upload": 1}, "mask": {"wait": 1},
        "upload": {"upload": 1}, "several": {"upload": 1}, "nothing": {}, "wait": {"wait": 1},
    }  # fmt: skip


CASES = {
    "dense": ("llama", {}),
    "mixture": ("qwen3_moe", {}),
    "adapter": ("llama", {"model": {"lora": {"rank": 4}}}),
}
SLOW = {
    "hybrid": ("qwen3_5_text", {}),
    **{kind: (kind, {}) for kind in ("gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "gpt2")},
    **{
        kind: (kind, {})
        for kind in ("qwen3_next", "mamba2", "lfm2", "nemotron_h", "granitemoehybrid", "jamba", "llama4_text")
    },
    "recomputed": ("llama", {"learner": {"memory": {"recompute": True}}}),
    "muon": ("llama", {"learner": {"optimizer": {"kind": "muon"}}}),
    "prefixes": ("llama", {"learner": {"share_prefixes": True}}),
    "truncated": ("llama", {"engine": {"top_p": 0.9, "top_k": 8}}),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_loop_of_ones_own_gives_on_the_device_what_it_gives_on_the_cpu(
    case: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    kind, settings = {**CASES, **SLOW}[case]
    try:
        path = tiny(tmp_path / "model", kind)
    except KeyError:
        path = write_model(tmp_path / "model", kind)
    found = run("claimed_loop", variables, str(path), json.dumps(settings))
    host, device = found["cpu"], found["cuda"]
    assert device["ids"] == host["ids"]
    np.testing.assert_allclose(np.concatenate(device["logprobs"]), np.concatenate(host["logprobs"]), atol=1e-5)
    assert device["loss"] == pytest.approx(host["loss"], abs=1e-5)
    assert device["grad_norm"] == pytest.approx(host["grad_norm"], rel=1e-4)
    np.testing.assert_allclose(np.concatenate(device["scores"]), np.concatenate(host["scores"]), atol=1e-3)
    assert host["sampled"] == host["trained"] == {}
    if case == "dense":
        work = device["sampled"]
        assert work["download"] <= DOWNLOADS * (TOKENS + 1)
        assert work["upload"] <= UPLOADS * (TOKENS + 1) + 20, "which is for the rows that begin"
        assert work.get("wait", 0) <= 3, "none of them in a pass"
        assert device["trained"]["wait"] <= TRAINING_WAITS
        assert device["trained"]["download"] <= TRAINING_DOWNLOADS
