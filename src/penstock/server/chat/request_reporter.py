"""What a server reports of each request that ends: a line of the log, and a span for OpenTelemetry.

The packages of OpenTelemetry are imported only where --otlp-traces-endpoint is given. Names and attributes of a span
are vLLM's.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from penstock.engine.cluster.logs import event
from penstock.engine.protocol.messages import SamplingParams
from penstock.installing import how_to_install
from penstock.server.options import ServerOptions

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # a variable of OpenTelemetry
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}  # by the variable's value: a part of the exporter's module
CLOSE_TIMEOUT_S = 2.0  # for the last spans, when the server ends: a collector may be away


class RequestReport(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None  # from the request's arrival; None: there was no token
    seconds: float  # from the request's arrival to its end
    reason: str  # the finish reasons of its samples, `error` or `abort`


Report = Callable[[RequestReport], None]


def exporter_module() -> str:
    """Returns the name of the module that sends spans. Raises ValueError if the packages are not installed."""
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in EXPORTERS:
        raise ValueError(f"expected {PROTOCOL} to be {' or '.join(EXPORTERS)}, got {protocol!r}")
    module = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}.trace_exporter"
    try:
        missing = [name for name in ("opentelemetry.sdk.trace", module) if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:
        missing = [str(error.name)]
    if missing:
        raise ValueError(f"--otlp-traces-endpoint needs {missing[0]}, not installed here: {how_to_install('otlp')}")
    return module


class SpanSender:
    """Sends a span for each request, from a thread of its own."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter: Any = importlib.import_module(exporter_module()).OTLPSpanExporter
        options = {"insecure": True} if "grpc" in exporter.__module__ else {}
        self._model = model
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint, **options)))
        self._tracer = self._provider.get_tracer("penstock.server")

    def send(
        self, headers: Mapping[str, str], request_id: str, params: SamplingParams | None, report: RequestReport
    ) -> None:
        """`headers`: of the request, perhaps with the span of the client, of which this span is a part."""
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.prompt_tokens": report.prompt_tokens,
            "gen_ai.usage.completion_tokens": report.completion_tokens,
            "gen_ai.latency.e2e": report.seconds,
        }
        if report.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = report.first_token_s
        if params is not None:
            attributes["gen_ai.request.n"] = params.n
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        end = time.time_ns()
        context = self._propagator.extract(headers)
        span = self._tracer.start_span(
            "llm_request", context, self._kind, attributes, start_time=end - int(report.seconds * 1e9)
        )
        if report.reason in ("error", "abort"):
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR, report.reason)
        span.end(end)

    def close(self) -> None:
        """Sends the last spans, for CLOSE_TIMEOUT_S at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class RequestReporter:
    def __init__(self, spans: SpanSender | None, *, has_log: bool) -> None:
        self._spans = spans
        self._has_log = has_log

    @classmethod
    def create(cls, options: ServerOptions, model: str) -> RequestReporter | None:
        """Returns None if the options ask for no report."""
        endpoint = options.otlp_traces_endpoint
        spans = SpanSender(endpoint, model) if endpoint else None
        return cls(spans, has_log=options.enable_log_requests) if spans or options.enable_log_requests else None

    def of(self, request: Request, params: SamplingParams | None = None) -> Report:
        """Returns what takes the report of a request when it ends."""
        return functools.partial(self._report, request.headers, request.state.request_id, params)

    def _report(
        self, headers: Mapping[str, str], request_id: str, params: SamplingParams | None, report: RequestReport
    ) -> None:
        if self._has_log:
            event("request", request_id=request_id, **report._asdict())
        if self._spans is not None:
            self._spans.send(headers, request_id, params, report)

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()
