"""The benchmarks of ``headrace bench``, which measure this machine and compare the figures with targets. A benchmark is
a module of this package with a function ``measure``, and an entry of :data:`BENCHMARKS`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError, nearest

if TYPE_CHECKING:
    from headrace.wings.bench.base import Report

BENCHMARKS = {
    "agents": "two agents with long tails of length: tokens trained per second, paced and behind a barrier",
    "algo": "loss and correction as a part of a learner's step",
    "controller": "episodes and tokens that one controller carries, over the sockets of a thousand engines",
    "distill": "the demo's model taught by a larger one, and by its own past",
    "engine": "generated tokens per second beside transformers and vLLM; first token; commit gaps",
    "fleet": "several engines: what routing costs, whom a slow one slows, what commits and deaths cost",
    "gpu": "a GPU, stage by stage: kernels, engine, learner, sync, a run; one JSON file; --pretend without one",
    "learner": "training steps beside a padded loop over transformers; memory of log π",
    "learning": "held-out reward over tokens and seconds, over seeds, by age, pacing and clip",
    "ledger": "transitions and episodes recorded per second, and what they cost a run",
    "loop": "the demo over three seeds: accuracy, asynchronous beside synchronous time, ages",
    "plan": "how large a run the planner simulates in a minute, and how well it predicts runs of this machine",
    "sandboxes": "sessions: start, command, snapshot, fork; 32 of them at once",
    "scoring": "what a slow judge, a process reward and the sandbox cost the learner",
    "speculation": "tokens per second with drafts from history beside without: rows seen before, rows seen first",
    "sync": "transports and codecs of weights: how long the learner and the engine stand still",
    "tinker": "the client of the Tinker protocol: start, round trips, several adapters beside one",
}
"""The description of each benchmark, by the name of the benchmark, which is also the name of its module."""


def run_benchmark(name: str, on_progress: Callable[[str], None] = lambda line: None, **options: object) -> Report:
    """Run the benchmark ``name`` and return its report. ``options`` are the keyword arguments of its function
    ``measure``, such as ``quick``; ``on_progress`` is called with lines of progress.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown benchmark, and for an option that it does not have.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}", remedy=nearest(name, BENCHMARKS))
    measure = importlib.import_module(f"headrace.wings.bench.{name}").measure
    known = set(list(inspect.signature(measure).parameters)[1:])  # the first parameter is ``on_progress``
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"benchmark {name} has no option --{unknown[0]}", remedy=f"leave --{unknown[0]} out")
    report: Report = measure(on_progress, **options)
    return report


__all__ = ["BENCHMARKS", "run_benchmark"]
