"""Runs of benchmarks and fault tests: in this process without output, and as a subprocess, as a user would run them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headrace.control.metrics.summary import Summary
from headrace.run.session import load_config, train

_PROGRAM = "from headrace.run.cli import main; main()"


def train_quietly(run_file: Path, run_dir: Path, *settings: str) -> Summary:
    """Train ``run_file`` in ``run_dir`` with the overrides ``settings``, ``section.key=value``, without a view and a
    report, and return the summary."""
    quiet = ("observe.view=none", "observe.report=false", f"run.dir={run_dir}")
    return train(load_config(run_file, [*quiet, *settings]))


@asynccontextmanager
async def run_training(arguments: Sequence[str], *, resume: bool) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start ``headrace train`` with the command-line ``arguments`` (and ``--resume`` if ``resume`` is true), and yield
    its process, whose output can be read from pipes. At the end of the context, a process that still runs is killed."""
    words = ["train", *arguments, *(["--resume"] if resume else [])]
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield program
    finally:
        with suppress(ProcessLookupError):
            program.kill()
        await program.wait()
