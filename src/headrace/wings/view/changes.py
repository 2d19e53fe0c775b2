"""Server-sent events: a line whenever a run has written something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from headrace.wings.view.run import OpenRun

EVERY_S = 0.4
"""How often the directories are looked at: a page shows what was written within a second."""
ALIVE_S = 15.0
"""A comment so often keeps proxies from closing a silent stream."""


async def changes(runs: Sequence[OpenRun], ending: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Events ``change`` with the numbers of the runs that changed, until the server ends."""
    stamps = [run.stamp() for run in runs]
    yield b"retry: 1000\nevent: hello\ndata: {}\n\n"
    silent_s = 0.0
    while not ending():
        await asyncio.sleep(EVERY_S)
        silent_s += EVERY_S
        fresh = [run.stamp() for run in runs]
        changed = [number for number, (old, new) in enumerate(zip(stamps, fresh, strict=True)) if old != new]
        stamps = fresh
        if changed:
            silent_s = 0.0
            yield b"event: change\ndata: " + msgspec.json.encode({"runs": changed}) + b"\n\n"
        elif silent_s >= ALIVE_S:
            silent_s = 0.0
            yield b": alive\n\n"
