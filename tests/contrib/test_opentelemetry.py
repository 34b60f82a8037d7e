"""Spans of a broadcast and of the handlers that it reaches, in the SDK's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.util._once import Once

from django_mq import Reject, RetryPolicy, Snooze, broadcast, broadcast_many, handler, handlers
from django_mq.contrib.opentelemetry import instrument, uninstrument
from django_mq.executor.calls import surrounded
from django_mq.messages import Delivery, Message
from django_mq.models import QueuedMessage
from django_mq.signals import worker_started, worker_stopped
from django_mq.testing import drain, due
from tests.docs.pages import namespace
from tests.rows import add, add_all
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db


class Traced:
    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.tracer = self.provider.get_tracer("tests")

    def spans(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]

    def durations(self) -> list[HistogramDataPoint]:
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "messaging.process.duration"
            for point in metric.data.data_points
            if isinstance(point, HistogramDataPoint)
        ]


@pytest.fixture
def traced() -> Iterator[Traced]:
    found = Traced()
    instrument(found.provider, found.meters)
    with handlers.isolated():
        yield found
    uninstrument()


def test_each_copy_links_to_the_broadcast(traced: Traced) -> None:
    inner: list[int] = []

    def note() -> None:
        with traced.tracer.start_as_current_span("inner") as span:
            inner.append(span.get_span_context().trace_id)

    handler("a.b", queue="mail", name="h")(lambda delivery: note())
    handler("a.b", queue="mail", name="i")(lambda delivery: note())
    with traced.tracer.start_as_current_span("request") as request, transaction.atomic():
        broadcast("a.b", {"n": 1}, metadata={"tier": "gold"})
    stored = QueuedMessage.objects.values_list("metadata", flat=True)
    assert [sorted(each) for each in stored] == [["tier", "traceparent"]] * 2
    drain()
    [producer] = traced.spans(SpanKind.PRODUCER)
    assert producer.parent is not None
    assert producer.parent.span_id == request.get_span_context().span_id
    assert producer.context is not None
    consumers = traced.spans(SpanKind.CONSUMER)
    assert [span.name for span in consumers] == ["process mail"] * 2
    for span, trace_id in zip(consumers, inner, strict=True):
        assert [link.context.span_id for link in span.links] == [producer.context.span_id]
        assert span.parent is None
        assert span.context is not None
        assert span.context.trace_id == trace_id != producer.context.trace_id
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "django_mq"
        assert span.attributes["messaging.destination.name"] == "mail"
        assert span.attributes["django_mq.message.type"] == "a.b"
        assert span.status.is_unset
    assert {
        (each.attributes["django_mq.handler"], each.count)
        for each in traced.durations()
        if each.attributes
    } == {("h", 1), ("i", 1)}


def test_durations_fall_into_the_buckets_of_the_conventions(traced: Traced) -> None:
    """With the SDK's own, 0, 5, 10 and so on, every call of less than 5 s would be in one."""
    handler("a.b", queue="mail", name="h")(lambda delivery: None)
    add(handler="h", type="a.b")
    drain()
    [point] = traced.durations()
    assert tuple(point.explicit_bounds) == (
        *(0.005, 0.01, 0.025, 0.05, 0.075),
        *(0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    )
    assert sum(point.bucket_counts) == 1


def test_broadcast_of_a_handler_belongs_to_its_trace(traced: Traced) -> None:
    @handler("a.b", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        broadcast("c.d")

    with transaction.atomic():
        broadcast("a.b")
    assert not traced.spans(SpanKind.PRODUCER)  # that one was not traced
    drain()
    [consumer], [producer] = (traced.spans(k) for k in (SpanKind.CONSUMER, SpanKind.PRODUCER))
    assert producer.parent == consumer.context
    metadata = QueuedMessage.objects.get(type="c.d").metadata
    assert set(metadata) == {"traceparent", "mq.correlation_id", "mq.causation_id", "mq.hops"}
    assert consumer.attributes is not None
    assert consumer.links == ()


def test_a_message_with_baggage_runs(traced: Traced, settings: Any) -> None:
    """Workers hold a message with more metadata than they expect, so baggage must fit, or go."""
    settings.DJANGO_MQ = {"MAX_METADATA_BYTES": 10_000}

    @handler("a.b", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        read.append(delivery.metadata)

    read: list[Any] = []
    found = Context()
    for number in range(4):  # the propagator writes 8,192 bytes of it at most
        found = baggage.set_baggage(f"b{number}", "x" * 4000, found)
    token = context.attach(found)
    try:
        with traced.tracer.start_as_current_span("request"), transaction.atomic():
            broadcast("a.b", metadata={"own": "x" * 9000})
            broadcast("a.b", metadata={"own": "x"})
    finally:
        context.detach(token)
    assert drain() == 2
    without, metadata = read
    assert set(without) == {"own", "traceparent"}
    assert set(metadata) == {"own", "traceparent", "baggage"}
    assert len(metadata["baggage"]) > 8000


def test_a_list_links_to_all_of_its_producers(traced: Traced) -> None:
    got: list[Delivery] = []
    handler("a.b", queue="mail", name="h")(lambda delivery: got.append(delivery))
    for _ in range(2):
        with traced.tracer.start_as_current_span("request"), transaction.atomic():
            broadcast_many([Message("a.b"), Message("a.b")])
    drain()  # one by one: a worker's call includes them all
    traced.exporter.clear()
    with surrounded(got):
        pass
    [consumer] = traced.spans(SpanKind.CONSUMER)
    producers = [each.metadata["traceparent"].rpartition("-")[0] for each in got]
    linked = [
        f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in consumer.links
    ]
    assert linked == producers
    assert len(set(linked)) == 2
    assert consumer.attributes is not None
    assert consumer.attributes["messaging.batch.message_count"] == 4


def test_a_long_list_links_to_its_first_128_producers(traced: Traced) -> None:
    got: list[Delivery] = []
    handler("a.b", queue="mail", name="h")(lambda delivery: got.append(delivery))
    parent = "00-0af7651916cd43dd8448eb211c80319c-{:016x}-01"
    rows = ({"metadata": {"traceparent": parent.format(n)}} for n in range(1, 131))
    add_all({"handler": "h", "type": "a.b", **row} for row in rows)
    assert drain() == 130
    traced.exporter.clear()
    with surrounded(got):
        pass
    [consumer] = traced.spans(SpanKind.CONSUMER)
    assert [link.context.span_id for link in consumer.links] == [*range(1, 129)]


def test_failures_without_their_texts(traced: Traced, settings: Any) -> None:
    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        if delivery.type == "reject":
            raise Reject("secret")
        raise ValueError("secret")

    add(handler="h", type="reject")
    add(handler="h", type="fails", metadata={"traceparent": "nonsense", "n": 1})
    drain(errors="keep")
    spans = traced.spans(SpanKind.CONSUMER)
    assert {span.attributes["error.type"] for span in spans if span.attributes} == {
        "builtins.ValueError",
        "django_mq.exceptions.Reject",
    }
    assert all(not span.status.is_ok and not span.events for span in spans)
    assert "secret" not in "".join(span.to_json() for span in spans)


def test_a_snooze_in_an_exception_group_is_no_failure(traced: Traced) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ExceptionGroup("tasks", [Snooze(600)])

    add(handler="h")
    assert drain() == 1
    [span] = traced.spans(SpanKind.CONSUMER)
    assert span.attributes is not None
    assert "error.type" not in span.attributes


def test_without_an_sdk_nothing_is_carried() -> None:
    instrument()
    try:
        with handlers.isolated(), transaction.atomic():
            broadcast("a.b")
        assert QueuedMessage.objects.get().metadata == {}
    finally:
        uninstrument()


class Failing(SpanProcessor):
    """A span processor that fails at one of its calls, for spans of this kind."""

    def __init__(self, at: str, kind: SpanKind) -> None:
        self.at, self.kind = at, kind

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._fail("start", span)

    def on_end(self, span: ReadableSpan) -> None:
        self._fail("end", span)

    def _fail(self, at: str, span: ReadableSpan) -> None:
        if (at, span.kind) == (self.at, self.kind):
            raise RuntimeError("no collector")


@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("kind", [SpanKind.PRODUCER, SpanKind.CONSUMER], ids=["sent", "handled"])
def test_a_span_processor_that_fails_harms_no_message(
    traced: Traced, caplog: pytest.LogCaptureFixture, at: str, kind: SpanKind
) -> None:
    traced.provider.add_span_processor(Failing(at, kind))
    ran: list[Any] = []

    @handler("a.b", queue="mail", name="h", retry=RetryPolicy(max_attempts=2))
    def run(delivery: Delivery) -> None:
        ran.append(delivery.payload["n"])
        if delivery.attempt == 1:
            raise KeyError("first")

    with traced.tracer.start_as_current_span("request"):
        for n in range(2):
            with transaction.atomic():
                assert broadcast("a.b", {"n": n})
    errors = drain(errors="keep")
    due()
    errors += drain(errors="keep")
    assert [type(each) for each in errors] == [KeyError, KeyError]
    assert sorted(ran) == [0, 0, 1, 1]
    assert not QueuedMessage.objects.exists()
    assert [each.message for each in caplog.records if "tracing" in each.message] == [
        "tracing failed; messages are sent and handled without it. Further failures are not logged"
    ]


@pytest.mark.parametrize("text", ["\ud800", "\x00"], ids=["surrogate", "NUL"])
def test_baggage_that_cannot_be_stored_is_left_out(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(propagate, "inject", lambda carrier: carrier.update(a="b", tenant=text))
    with traced.tracer.start_as_current_span("request"), transaction.atomic():
        assert broadcast("a.b")
    assert QueuedMessage.objects.get().metadata == {"a": "b"}


class Recipe:
    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.metrics = KeptMetrics()


class KeptMetrics(MetricExporter):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 0, **kwargs: Any
    ) -> MetricExportResult:
        self.names += [
            metric.name
            for resource in metrics_data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        pass


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """Run the snippets of docs/watching.md about the SDK, with exporters that keep their input."""
    found = Recipe()
    place = "opentelemetry.exporter.otlp.proto.http"
    spans = namespace(f"{place}.trace_exporter", OTLPSpanExporter=lambda: found.spans)
    points = namespace(f"{place}.metric_exporter", OTLPMetricExporter=lambda: found.metrics)
    for module in (spans, points):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # An hour: only a flush exports.
    for name in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL"):
        monkeypatch.setenv(name, "3600000")
    for module, set_once in (
        (trace, "_TRACER_PROVIDER_SET_ONCE"),
        (metrics._internal, "_METER_PROVIDER_SET_ONCE"),
    ):
        monkeypatch.setattr(module, set_once, Once())
        monkeypatch.setattr(module, set_once.removesuffix("_SET_ONCE"), None)
    names: dict[str, Any] = {"__name__": "recipe"}
    for code in snippets(ROOT / "docs/watching.md", "python"):
        if "opentelemetry" in code:
            exec(compile(code, "watching.md", "exec"), names)  # noqa: S102
    names["ShopConfig"].ready(None)
    with handlers.isolated():
        yield found
    uninstrument()
    worker_started.disconnect(names["start_exporting"])
    worker_stopped.disconnect(names["flush"])
    trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]
    metrics.get_meter_provider().shutdown()  # type: ignore[attr-defined]


def test_worker_exports_its_spans_at_its_end(recipe: Recipe) -> None:
    worker_started.send(sender="w", worker="w", queues=())
    handler("a.b", queue="mail", name="h")(lambda delivery: None)
    add(handler="h", type="a.b")
    drain()
    assert not recipe.spans.get_finished_spans()
    worker_stopped.send(sender="w", worker="w", drained=True)
    assert [span.name for span in recipe.spans.get_finished_spans()] == ["process mail"]
    assert recipe.metrics.names == ["messaging.process.duration"]
