"""Benchmarks: figures of this machine, held against their targets. A new one is a file here and a row of the table."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from headrace.bench.base import Report, Row, Target, show
from headrace.errors import ConfigError, nearest

_BENCHMARKS = {
    "agents": "headrace.bench.agents",
    "algo": "headrace.bench.algo",
    "distill": "headrace.bench.distill",
    "engine": "headrace.bench.engine",
    "fleet": "headrace.bench.fleet",
    "learner": "headrace.bench.learner",
    "ledger": "headrace.bench.ledger",
    "loop": "headrace.bench.loop",
    "plan": "headrace.bench.plan",
    "scoring": "headrace.bench.scoring",
    "sync": "headrace.bench.sync",
}
"""Name of the benchmark and the module whose ``measure`` runs it."""


def run_benchmark(name: str, tell: Callable[[str], None] = lambda line: None, **options: object) -> Report:
    """Run the benchmark ``name`` with its own ``options``; ``tell`` hears what is going on. :class:`ConfigError` if
    there is no such benchmark or option."""
    if name not in _BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}", remedy=nearest(name, _BENCHMARKS))
    measure = importlib.import_module(_BENCHMARKS[name]).measure
    known = set(inspect.signature(measure).parameters) - {"tell"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"benchmark {name} has no option --{unknown[0]}", remedy=f"leave --{unknown[0]} out")
    report: Report = measure(tell, **options)
    return report


__all__ = ["Report", "Row", "Target", "run_benchmark", "show"]
