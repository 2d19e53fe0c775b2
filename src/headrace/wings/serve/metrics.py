"""The metrics of the server in Prometheus' text format: counters of the engine, read at each scrape, and timings of
requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.base.types.messages.controller import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper limits of the histograms' buckets, in seconds."""

_GAUGES = {
    "version": "The weights in use.",
    "running": "Sequences in the batch now.",
    "waiting": "Requests that have not joined the batch.",
    "cache_blocks": "Blocks of the key-value cache.",
    "cache_blocks_used": "Blocks that running sequences hold.",
    "cache_bytes": "Memory of the key-value cache.",
    "routing_bytes": "Memory of the experts that are stored beside it.",
    "pinned_bytes": "Memory of weights that are kept for pinned sequences.",
}
"""Gauges: figures of the engine that rise and fall, each with its help text."""
_COUNTERS = {
    "generated_tokens": "Tokens sampled.",
    "prompt_tokens": "Prompt tokens taken in.",
    "cached_tokens": "Prompt tokens that the prefix cache served.",
    "steps": "Forward passes.",
    "drafted_tokens": "Tokens that speculation drafted.",
    "accepted_tokens": "Drafted tokens that were drawn; each spared its sequence a pass.",
    "preempted": "Times a sequence left the batch because the cache was full.",
}
"""Counters: figures of the engine that only rise, each with its help text."""


class _EngineFigures(Collector):
    """A Prometheus collector that reads the engine's counters at the moment of the scrape. ``stats`` returns them, or
    ``None`` before the engine has started."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        """Create a collector of the figures that ``stats`` returns."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's figures for Prometheus; nothing before the engine has started."""
        stats = self._stats()
        if stats is None:
            return
        for name, words in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_engine_{name}", words, value=getattr(stats, name))
        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"headrace_engine_{name}", words, value=getattr(stats, name))
        yield CounterMetricFamily("headrace_engine_busy_seconds", "Time spent in steps.", value=stats.busy_s)


class ServerMetrics:
    """The metrics of one server, each with its help text. The code that handles requests updates them; ``stats``
    returns the engine's counters, or ``None`` before the engine has started."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        """Create all metrics, at zero."""
        self._registry = CollectorRegistry()
        """Prometheus' registry of all metrics."""
        self._registry.register(_EngineFigures(stats))
        self.requests = Counter(
            "headrace_requests", "Requests answered.", ["path", "status"], registry=self._registry
        )  # fmt: skip
        self.open = Gauge("headrace_requests_open", "Requests being answered now.", registry=self._registry)
        self.left = Counter("headrace_clients_gone", "Requests whose client left first.", registry=self._registry)
        self.choices = Counter(
            "headrace_choices", "Choices sampled, by how they ended.", ["stop_reason"], registry=self._registry
        )
        self.seconds = Histogram(
            "headrace_request_seconds", "From a request's arrival to its end.", ["path"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.first_token_seconds = Histogram(
            "headrace_first_token_seconds", "From a request's arrival to its first token.", ["path"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.token_seconds = Histogram(
            "headrace_token_seconds", "Between two tokens of a choice, the mean of each choice.",
            buckets=tuple(seconds / 10 for seconds in _SECONDS), registry=self._registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
