"""Benchmarks: figures of this machine, held against their targets. A new one is a file here and a row of the table."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from headrace.bench.base import Report, Row, Target, show
from headrace.errors import ConfigError, nearest

_BENCHMARKS = {
    "algo": "headrace.bench.algo",
    "loop": "headrace.bench.loop",
}
"""Name of the benchmark and the module whose ``measure`` runs it."""


def run_benchmark(name: str, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run the benchmark ``name``; ``tell`` hears what is going on. :class:`ConfigError` if there is none."""
    if name not in _BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}", remedy=nearest(name, _BENCHMARKS))
    report: Report = importlib.import_module(_BENCHMARKS[name]).measure(tell)
    return report


__all__ = ["Report", "Row", "Target", "run_benchmark", "show"]
