"""Sender of traces to a collector by OTLP over HTTP, with OpenTelemetry's library: the extra
`otel`.

The library reads address, headers and batch sizes from its standard variables. It sends in a thread
of its own, from a queue that drops the excess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from unbroken.core.job.record.spans import Span, Trace
from unbroken.log_lines import Log

log = Log(__name__)

SERVICE = "unbroken-operator"
"""Service name, unless OTEL_SERVICE_NAME is set."""
_LIBRARY = logging.getLogger("opentelemetry")
_FULL = "Queue full"


class Sender:
    """Sends traces. Raises ValueError or RuntimeError if the library's variables are invalid."""

    def __init__(self) -> None:
        self._ids = _Ids()
        self._losses = _Losses()
        named = Resource.create({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
        exporter = _Watched(OTLPSpanExporter(), self._losses)
        # At the end of the program it would wait for the collector.
        self._provider = TracerProvider(
            resource=named, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("unbroken")
        _LIBRARY.addHandler(self._losses)
        _LIBRARY.propagate = False

    def send(self, trace: Trace) -> None:
        """Queue a trace for sending; return at once."""
        self._ids.trace = trace.id
        whole = self._started(trace.whole, Context())
        within = otel.set_span_in_context(whole, Context())
        for stage in trace.stages:
            self._started(stage, within).end(_nanoseconds(stage.end))
        if trace.problem:
            whole.set_status(otel.Status(otel.StatusCode.ERROR, trace.problem))
        whole.end(_nanoseconds(trace.whole.end))

    def close(self) -> None:
        """Send pending traces; it blocks for half a minute if the collector does."""
        self._provider.shutdown()
        _LIBRARY.removeHandler(self._losses)
        _LIBRARY.propagate = True

    def _started(self, span: Span, within: Context) -> otel.Span:
        self._ids.span = span.id
        start = _nanoseconds(span.start)
        return self._tracer.start_span(
            span.name, within, attributes=span.attributes, start_time=start
        )


def _nanoseconds(at: float) -> int:
    """Exactly the microseconds that an Incident object has."""
    return round(at * 1e6) * 1000


class _Ids(IdGenerator):
    """Provides the ids for the next span."""

    def __init__(self) -> None:
        self.trace = self.span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _Losses(logging.Handler):
    """Logs once that spans are lost, and once that they arrive again.

    It reads the library's log, which has a line or more for each attempt.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._reason = ""
        self._is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the library."""
        if record.levelno == logging.WARNING or not self._reason:
            # The reason of a failed attempt; the error after the last attempt does not contain it.
            self._reason = record.getMessage()
        if record.getMessage().startswith(_FULL):
            self.lost()

    def lost(self) -> None:
        """Note that spans are lost."""
        if not self._is_reported:
            self._is_reported = True
            log.warning("traces are lost", error=self._reason)

    def arrived(self) -> None:
        """Note that spans were accepted."""
        if self._is_reported:
            log.info("traces are sent again")
        self._is_reported, self._reason = False, ""


class _Watched(SpanExporter):
    """An exporter whose losses are logged."""

    def __init__(self, exporter: SpanExporter, losses: _Losses) -> None:
        self._exporter = exporter
        self._losses = losses

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._losses.arrived()
        else:
            self._losses.lost()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
