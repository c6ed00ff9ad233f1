"""Spans of requests, as a collector of OpenTelemetry gets them."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.server.chat import request_reporter
from tests.e2e.test_server import run_server
from tests.support.engine import PATIENCE, simulated_device
from tests.support.loops import in_a_loop

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    def __init__(self) -> None:
        spans: queue.Queue[Any] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.spans = spans
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    async def span(self) -> tuple[Any, dict[str, Any]]:
        """Waits for a span. Returns the span and its attributes."""
        span = await asyncio.to_thread(self.spans.get, timeout=PATIENCE)
        values = {pair.key: pair.value for pair in span.attributes}
        return span, {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(request_reporter.PROTOCOL, "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    result = Collector()
    result.thread.start()
    yield result
    result.server.shutdown()
    result.server.server_close()
    result.thread.join()


@in_a_loop
async def test_request_is_a_span_of_its_client(collector: Collector) -> None:
    options: dict[str, Any] = {"simulated": simulated_device(step_seconds=0.005), "api_server_count": 1}
    async with run_server({"otlp_traces_endpoint": collector.url}, **options) as served:
        completions = served.client.completions
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        await completions.create(model="simulated", prompt="abc", max_tokens=9, n=2, top_p=0.5, extra_headers=headers)
        span, values = await collector.span()
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
        assert span.kind == span.SPAN_KIND_SERVER and span.status.code == span.status.STATUS_CODE_UNSET
        times = [values.pop(f"gen_ai.latency.{name}") for name in ("time_to_first_token", "e2e")]
        assert 0 < times[0] < times[1]
        assert abs((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 - times[1]) < 1e-3
        assert values == {
            "gen_ai.request.id": "mine",
            "gen_ai.response.model": "simulated",
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 18,
            "gen_ai.request.n": 2,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 0.5,
        }
        stream = await completions.create(model="simulated", prompt="abc", max_tokens=4000, stream=True)
        await stream.__anext__()
        await stream.close()
        span, values = await collector.span()
        assert span.status.code == span.status.STATUS_CODE_ERROR and span.status.message == "abort"
        assert not span.parent_span_id and values["gen_ai.usage.completion_tokens"] >= 1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(request_reporter.PROTOCOL, "http/json")
    with pytest.raises(ValueError, match="grpc or http/protobuf, got 'http/json'"):
        request_reporter.exporter_module()
    monkeypatch.setitem(request_reporter.EXPORTERS, "http/json", "nowhere")
    with pytest.raises(ValueError, match=r"needs opentelemetry\.exporter.*: .* -m pip install .*\[otlp\]"):
        request_reporter.exporter_module()
