"""The kernels for CUDA, interpreted on a CPU, give what the definition gives.

Triton decides to interpret when it is imported, so the tests proper run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from headrace.models.paged import triton as paged_triton
from tests.models.test_paged_attention import GEOMETRIES, RULES, SHAPES, case, check

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed (extra: cuda)")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that interprets")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_give_what_the_definition_gives(cases: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", cases, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@inside
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_and_prompts_by_kernels_are_attention(shape: str, rule: str) -> None:
    check(paged_triton.TritonAttention, case(0, *GEOMETRIES["mixed"])[0], shape, rule)


@inside
@pytest.mark.parametrize("rule", ["plain", "all"])
def test_context_that_is_shared_out_is_joined_again(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_triton, "TILES", (16,))
    long_and_short = case(0, [700, 3, 64], [1, 1, 1])[0]
    check(paged_triton.TritonAttention, long_and_short, "grouped", rule)


@inside
def test_heads_without_room_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_triton, "TILE_BYTES", 1 << 10)
    monkeypatch.setattr(paged_triton, "kernel", None)  # it is not called
    check(paged_triton.TritonAttention, case(0, *GEOMETRIES["mixed"])[0], "grouped", "all")


@inside
def test_low_precision_is_as_close_as_it_can_be() -> None:
    """Of the two, float16: Triton's interpreter takes the bits of a bfloat16 matrix for integers."""
    check(paged_triton.TritonAttention, case(0, *GEOMETRIES["mixed"])[0], "grouped", "all", torch.float16)
