"""Forks without a run around them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.base.environ import write_token
from headrace.launch.forking import ForkedProcess, ForkServer


@asynccontextmanager
async def part(server: ForkServer, directory: Path, name: str) -> AsyncIterator[ForkedProcess]:
    """A fork that lives as long as the body."""
    theirs, ours = os.pipe()
    with (directory / f"{name}.log").open("ab") as log:
        try:
            write_token(ours, "a token")
            try:
                made = await server.fork(name, str(directory), {}, (theirs, log.fileno()))
            finally:
                os.close(theirs)
            yield made
        finally:
            os.close(ours)
