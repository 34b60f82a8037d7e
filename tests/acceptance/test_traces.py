"""A trace leads from a browser's request through the broadcast to a worker's handler."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from django_mq import broadcast
from django_mq.contrib.opentelemetry import instrument, uninstrument
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker

#: The header that a browser or a proxy sends.
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

provider = TracerProvider()


def place_order(request: HttpRequest) -> HttpResponse:
    """Act like an instrumented view: a span within the caller's trace, around all its work."""
    tracer = provider.get_tracer("shop")
    context = propagate.extract(request.headers)
    with (
        tracer.start_as_current_span("POST", context=context, kind=SpanKind.SERVER),
        transaction.atomic(),
    ):
        broadcast("acceptance.write", {"name": "order"})
    return HttpResponse()


urlpatterns = [path("orders/", place_order)]


@pytest.fixture
def exported(settings: Any) -> Iterator[InMemorySpanExporter]:
    """The spans of this process, which serves the request."""
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = []
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(provider)
    yield exporter
    uninstrument()


def test_from_a_request_to_the_handler_of_another_process(
    start: Callable[..., Worker], queue: Queue, witness: Witness, exported: InMemorySpanExporter
) -> None:
    worker = start("--processes", 2, ACCEPTANCE_IMPORT="tests.acceptance.app.traces")
    worker.has_started(2)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    assert Client().post("/orders/", headers=headers).status_code == 200
    queue.wait_empty(worker)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    written = witness.directory / "spans.json"
    [span] = [json.loads(line) for line in written.read_text().splitlines()]

    server, producer = sorted(exported.get_finished_spans(), key=lambda each: each.kind.value)
    assert (server.kind, producer.kind) == (SpanKind.SERVER, SpanKind.PRODUCER)
    assert server.context is not None
    assert producer.context is not None
    assert producer.parent == server.context
    assert trace.format_trace_id(producer.context.trace_id) == TRACE
    assert (span["name"], span["kind"]) == ("process work", "SpanKind.CONSUMER")
    assert span["parent_id"] is None
    [link] = span["links"]
    assert int(link["context"]["trace_id"], 16) == producer.context.trace_id
    assert int(link["context"]["span_id"], 16) == producer.context.span_id
    [(_, _, pid)] = queue.effects()
    assert pid in worker.children()
