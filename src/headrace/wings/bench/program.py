"""Runs ``headrace train`` as a subprocess, as a user would."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

_PROGRAM = "from headrace.run.cli import main; main()"


@asynccontextmanager
async def training(arguments: Sequence[str], *, resume: bool) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start ``headrace train`` with the command-line ``arguments`` (with ``resume``, to go on with a run), and yield
    its process, whose output can be read from pipes. The process is killed if it still runs at the end of the body."""
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
