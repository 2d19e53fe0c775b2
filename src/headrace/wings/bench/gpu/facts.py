"""The stage ``facts``: facts about the machine, and its *ceilings*, the highest rates of copies and products, to which
the rates of other stages are compared."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial

import torch

from headrace.base.environ import visible_gpus
from headrace.models.gpus import VisibleGpus
from headrace.wings.bench.gpu.base import GIB, StageContext
from headrace.wings.bench.gpu.probe import probe

QUERY = ("name", "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "clocks.max.sm", "power.limit")
"""The properties of the GPU that ``nvidia-smi`` is asked for."""


def run(stage: StageContext) -> None:
    """Record versions, memory and links in ``stage``, and measure the ceilings."""
    card = probe()
    stage.add_row(what="card", name=card.name, capability=".".join(map(str, card.capability)), gib=card.total / GIB)
    stage.add_row(
        what="versions", python=platform.python_version(), torch=card.torch, cuda=card.cuda, triton=card.triton
    )
    names = VisibleGpus.detect().names
    stage.add_row(what="GPUs", visible=visible_gpus(), torch_sees=card.count, driver_names=list(names or ()))
    stage.add_row(what="links", **_query_driver())
    if stage.pretend:
        copied, side = 1 << 16, 32
    else:
        copied, side = 1 << 30, 8192
    _measure_copies(stage, copied)
    for dtype in (torch.bfloat16, torch.float32):
        _measure_products(stage, side if dtype == torch.bfloat16 else side // 2, dtype)


def _query_driver() -> Mapping[str, str]:
    """Return the properties :data:`QUERY` of the first GPU, which ``nvidia-smi`` prints; if the program is missing or
    fails, return the reason as ``left_out``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"left_out": "nvidia-smi is not installed"}
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode or not done.stdout.strip():
        return {"left_out": f"nvidia-smi failed: {done.stderr.strip()[-200:]}"}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(QUERY, values, strict=False))


def _measure_copies(stage: StageContext, num_bytes: int) -> None:
    """Measure and record the rates of copies of ``num_bytes`` bytes: to the device and back, with pinned and with
    pageable memory, and within the device; bytes read and bytes written are both counted. ``stage`` records the
    results."""
    device = torch.device(stage.request.device)
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    pairs = {
        "upload_pinned": (there, pinned, 1), "upload_pageable": (there, pageable, 1),
        "download_pinned": (pinned, there, 1), "download_pageable": (pageable, there, 1),
        "copy_device": (other, there, 2),
    }  # fmt: skip
    rates = {
        f"{name}_gb_s": times * num_bytes / stage.shortest_s(partial(to.copy_, of)) / 1e9
        for name, (to, of, times) in pairs.items()
    }
    stage.add_row(what="copies", mib=num_bytes / 2**20, **rates)
    stage.add_figures(**rates)


def _measure_products(stage: StageContext, side: int, dtype: torch.dtype) -> None:
    """Measure and record the rate of products of square matrices with ``side`` rows in the number format ``dtype``."""
    name = str(dtype).removeprefix("torch.")
    left, right = (torch.full((side, side), 0.5, dtype=dtype, device=stage.request.device) for _ in range(2))
    seconds = stage.shortest_s(lambda: left @ right, times=10)
    rate = 2 * side**3 / seconds / 1e12
    stage.add_row(what=f"products in {name}", side=side, tflops=rate)
    stage.add_figures(**{f"product_{name}_tflops": rate})
