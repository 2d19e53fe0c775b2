"""The writer of metrics for Prometheus: an HTTP endpoint at ``http://HOST:PORT/metrics`` that serves the metrics of the
newest step. A request must have the token in the run directory."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config.tls import refuse_incomplete_tls, server_context
from headrace.base.types.metrics import find
from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric


TOKEN_FILE = "metrics.token"
"""The file in the run directory with the token, which only this user can read. A resumed run uses the same token.
The settings of Prometheus must name this file: ``authorization: {credentials_file: RUN/metrics.token}``."""
IDLE_TIMEOUT_S = 10
"""The time after which a connection without a request is closed, in seconds."""
MAX_CONNECTIONS = 64
"""The maximum number of connections at once."""


class Prometheus(WriterSection):
    """The settings of the writer ``prometheus``: an HTTP endpoint serves the metrics of the newest step, and Prometheus
    reads them with the token in ``metrics.token`` of the run directory."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=9464, ge=1, le=65535)
    """The port to listen on."""
    tls_certificate: str = ""
    """The PEM file with the certificate of the endpoint; unset: no TLS."""
    tls_key: str = ""
    """The PEM file with the key of the certificate."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        """Refuse a certificate without its key, and a key without its certificate."""
        refuse_incomplete_tls("observe.writers", self.tls_certificate, self.tls_key)
        return self

    def open(self, run: RunFacts) -> MetricWriter:
        """Start the HTTP endpoint in a thread, and return the writer of ``run``. The endpoint serves the newest step of
        this writer; ``close`` stops the endpoint. Raises :class:`~headrace.base.errors.ConfigError` if the port cannot
        be bound."""
        from prometheus_client import CollectorRegistry, make_asgi_app

        from headrace.base.net.auth import TokenAuth
        from headrace.base.net.shell import HttpServer, ShellLimits, listening_socket

        newest = _NewestStep(run.name)
        registry = CollectorRegistry()
        registry.register(newest)
        app = TokenAuth(make_asgi_app(registry), token=_read_or_create_token(run.run_dir / TOKEN_FILE))
        if self.tls_certificate:
            server_context(self.tls_certificate, self.tls_key)
        server = HttpServer(
            app,
            ShellLimits(
                idle_timeout_s=IDLE_TIMEOUT_S, max_connections=MAX_CONNECTIONS,
                tls_certificate=self.tls_certificate, tls_key=self.tls_key,
            ),
        )  # fmt: skip
        listening = listening_socket(
            self.host,
            self.port,
            setting=f"observe.writers: prometheus at {self.host}:{self.port}",
            remedy="choose another port",
        )
        thread = threading.Thread(target=server.run, args=([listening],), name="prometheus", daemon=True)
        thread.start()
        newest.register_stop_calls(partial(setattr, server, "should_exit", True), thread.join)
        return newest


def _read_or_create_token(file: Path) -> str:
    """Return the token in ``file``, which a request to the endpoint must contain. If the file is missing, create it
    with a new random token, readable for this user alone."""
    if not file.exists():
        file.touch(0o600)
        file.write_text(secrets.token_urlsafe(24), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


class _NewestStep:
    """The writer for Prometheus, which stores the metrics of the newest step alone. It is also the collector that the
    Prometheus client calls for each request: each metric is a gauge, whose labels are the run and an environment, an
    agent, a reason or the like."""

    def __init__(self, run: str) -> None:
        """Start without values. ``run`` is the name of the run, the label ``run`` of every gauge."""
        self._run = run
        self._values: Mapping[str, float] = {}
        """The metrics of the newest step, by name."""
        self._stop_calls: tuple[Callable[[], object], ...] = ()
        """The functions that stop the HTTP server, in the order in which they are called."""

    def register_stop_calls(self, *stop_calls: Callable[[], object]) -> None:
        """Register ``stop_calls``, which stop the HTTP server: :meth:`close` calls them in their order."""
        self._stop_calls = stop_calls

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Replace the served values by the metrics of the optimizer step ``step``, which ended at ``unix_s`` (seconds
        since 1970); both are served as gauges too."""
        self._values = {**values, "step": float(step), "step_unix_s": unix_s}

    def close(self) -> None:
        """Stop the HTTP server and wait for its thread."""
        for stop in self._stop_calls:
            stop()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest step as gauges, one family for each metric, with the run and the metric's own
        label. The Prometheus client calls this method for every request."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._values.items():
            metric_and_label = find(name)
            stem, words, kind, label = name, f"{name}, of the loss", "", ""
            if metric_and_label is not None:
                row, label = metric_and_label
                stem, words, kind = row.stem, f"{row.meaning} ({row.unit or 'a number'})", row.label
            full = "headrace_" + re.sub(r"[^A-Za-z0-9_]+", "_", stem)
            if full not in families:
                families[full] = GaugeMetricFamily(full, words, labels=["run", *([kind] if kind else [])])
            families[full].add_metric([self._run, *([label] if kind else [])], value)
        yield from families.values()
