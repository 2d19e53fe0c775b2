"""An engine that says on its log what it has sampled so far, with settings and abilities of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from headrace.engine.config import ENGINES, EngineSettings, EngineSetup, OpenedEngine
from headrace.extend import EngineKind


class QuietSettings(EngineSettings):
    """``[engine.server]`` of this engine."""

    volume: int = 0
    """How loud it is."""

    def sentence(self, kind: str) -> str:
        return f"A {kind} engine samples at volume {self.volume}."


@contextmanager
def open_engine(setup: EngineSetup) -> Iterator[OpenedEngine]:
    """Open the embedded engine, and record in its facts how loud it is."""
    with ENGINES.load("native").open(setup) as engine:
        yield replace(engine, facts={**engine.facts, "volume": setup.config.server.model_dump()["volume"]})


QUIET = EngineKind(
    capabilities=replace(ENGINES.load("native").capabilities, pins=False, entropies=False),
    open=open_engine,
    settings=QuietSettings,
    unread=frozenset({"max_pinned_versions"}),
)
