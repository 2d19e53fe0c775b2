"""A context manager that runs ``headrace train`` as a subprocess, as a user would, for benchmarks and fault tests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

_PROGRAM = "from headrace.run.cli import main; main()"


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
