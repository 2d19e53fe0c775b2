"""Metrics for Prometheus: the newest step at ``http://HOST:PORT/metrics``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.config import Section
from headrace.errors import ConfigError
from headrace.observe.writers.base import MetricWriter, RunFacts
from headrace.types.metrics import find

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric


class Prometheus(Section):
    """An endpoint that is asked. It has no password: it listens on this machine unless told otherwise."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=9464, ge=1, le=65535)
    """A run that resumes wants the same one again."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Raises :class:`~headrace.errors.ConfigError` if the port cannot be had."""
        from prometheus_client import CollectorRegistry, start_http_server

        newest = _Newest(run.name)
        registry = CollectorRegistry()
        registry.register(newest)
        try:
            server, thread = start_http_server(self.port, self.host, registry)
        except OSError as error:
            raise ConfigError(
                f"observe.writers: prometheus cannot listen on {self.host}:{self.port}: {error.strerror}",
                remedy="choose another port",
            ) from None
        newest.ends_with(server.shutdown, server.server_close, thread.join)
        return newest


class _Newest:
    """A collector: the newest step as gauges; environment, agent, reason and the like are labels."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._values: Mapping[str, float] = {}
        self._ends: tuple[Callable[[], object], ...] = ()

    def ends_with(self, *ends: Callable[[], object]) -> None:
        self._ends = ends

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._values = {**values, "step": float(step), "step_unix_s": unix_s}

    def close(self) -> None:
        for end in self._ends:
            end()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._values.items():
            found = find(name)
            stem, words, kind, label = name, f"{name}, of the loss", "", ""
            if found is not None:
                row, label = found
                stem, words, kind = row.stem, f"{row.what} ({row.unit or 'a number'})", row.label
            full = "headrace_" + re.sub(r"[^A-Za-z0-9_]+", "_", stem)
            if full not in families:
                families[full] = GaugeMetricFamily(full, words, labels=["run", *([kind] if kind else [])])
            families[full].add_metric([self._run, *([label] if kind else [])], value)
        yield from families.values()
