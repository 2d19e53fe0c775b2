"""The trace of a run for OpenTelemetry: every span is sent to a collector by OTLP over HTTP.

A *span* is what one part of the run did between two moments; its *lane* names that part, such as ``engine-1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError, DataError
from headrace.base.types.trace import Span
from headrace.run.observe.rundata import RunData

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_SPANS_AT_ONCE = 512
"""The maximum number of spans in one request."""


def send_trace(run: RunData, url: str) -> int:
    """Send the spans of ``run`` to the collector at ``url``, such as ``http://HOST:4318/v1/traces``. Return the number
    of spans.

    Raises :class:`~headrace.base.errors.ConfigError` if the packages are missing or the collector refuses the spans,
    and :class:`~headrace.base.errors.DataError` for a run without a step, whose clock is not known.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        problem = "sending a trace needs the packages of OpenTelemetry"
        raise ConfigError(problem, remedy="pip install 'headrace[otel]'") from None
    exporter = OTLPSpanExporter(endpoint=url, timeout=10)
    try:
        return export(run, exporter, url)
    finally:
        exporter.shutdown()


def export(run: RunData, exporter: SpanExporter, collector: str) -> int:
    """Pass the spans of ``run`` to ``exporter``, at most :data:`MAX_SPANS_AT_ONCE` in one request, and return their
    number. Raises the errors of :func:`send_trace`; ``collector`` names the collector in their messages."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    steps = run.session
    if not steps or not run.spans:
        raise DataError(f"{run.directory} has no step with a trace", remedy="name a run that has trained a step")
    offset_s = steps[0].unix_s - steps[0].clock_s
    otel_spans = list(_convert_spans(run, offset_s))
    for first in range(0, len(otel_spans), MAX_SPANS_AT_ONCE):
        if exporter.export(otel_spans[first : first + MAX_SPANS_AT_ONCE]) is not SpanExportResult.SUCCESS:
            raise ConfigError(
                f"{collector} has not taken the spans after the first {first}", remedy="is a collector listening there?"
            )
    return len(otel_spans)


def _convert_spans(run: RunData, offset_s: float) -> Iterator[Any]:
    """Yield the spans of ``run`` as spans of OpenTelemetry, all in one new trace, with one service for each lane. The
    times of ``run.spans`` are seconds of the machine's clock; adding ``offset_s`` makes them seconds since 1970."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import SpanContext, TraceFlags

    ids = RandomIdGenerator()
    trace_id = ids.generate_trace_id()
    name = run.directory.resolve().name
    resources = {
        lane: Resource({"service.name": f"headrace {lane}", "headrace.run": name})
        for lane in {span.lane for span in run.spans}
    }
    for span in run.spans:
        yield ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(1)),
            resource=resources[span.lane],
            attributes=_make_attributes(span),
            start_time=int((span.start_s + offset_s) * 1e9),
            end_time=int((span.end_s + offset_s) * 1e9),
        )


def _make_attributes(span: Span) -> dict[str, str | int]:
    """Return the attributes of ``span`` for OpenTelemetry: its lane, and its step and its episode if it has them. A
    span without a step has the step −1."""
    attributes: dict[str, str | int] = {"headrace.lane": span.lane}
    if span.step >= 0:
        attributes["headrace.step"] = span.step
    if span.of is not None:
        attributes["headrace.episode"] = str(span.of)
    return attributes
