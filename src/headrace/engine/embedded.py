"""The embedded engine as a kind of engine. This module is imported with a run file, so it does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities
from headrace.engine.config import EngineKind, EngineSetup, OpenedEngine


@contextmanager
def _open_native(setup: EngineSetup) -> Iterator[OpenedEngine]:
    from headrace.engine.native.opening import opened

    yield opened(setup)


NATIVE = EngineKind(
    capabilities=Capabilities(
        interrupts=frozenset(Interrupt),
        truncates=True,
        kept_sets=True,
        routing=True,
        adapters=True,
        max_rank=None,
        any_adapters=True,
        entropies=True,
        scores=True,
        exact_scores=True,
        forks=True,
        reuses_stale=True,
        pins=True,
        seeds=True,
        deterministic=True,
        releases=True,
        embedded=True,
        other_models=True,
    ),
    open=_open_native,
)
"""The description of the embedded engine."""
