"""Traces and durations by the messaging conventions of OpenTelemetry: the extra `opentelemetry`.

Call `instrument()` once in each process, for example in `AppConfig.ready()`. It needs only the
API, and has no visible effect until an SDK is configured. The trace context travels in metadata.

Source: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

try:
    from opentelemetry import metrics, propagate, trace
except ImportError as error:
    text = "this module needs opentelemetry-api: pip install 'django-mq[opentelemetry]'"
    raise ModuleNotFoundError(text, name=error.name) from error
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from django_mq.conf import get_settings
from django_mq.conf.error_logs import traced
from django_mq.conf.version import VERSION
from django_mq.exceptions import Reject, Retry, Snooze, UnreadablePayload
from django_mq.executor import calls
from django_mq.messages import Delivery
from django_mq.outbox import origin
from django_mq.policy.chosen_end import chosen_end
from django_mq.policy.redacted_error import HIDDEN_EVERYWHERE

__all__ = ["instrument", "uninstrument"]

logger = logging.getLogger("django_mq")

SYSTEM = "django_mq"
#: The maximum number of links per span: a batch handler's list may have thousands of producers.
MAX_LINKS = 128
#: Seconds, as the conventions recommend: the SDK's own boundaries are made for milliseconds.
DURATION_BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)

#: Characters that PostgreSQL refuses in JSON.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

_active: _Instrumentation | None = None


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Trace broadcasts and handlers of this process from now on.

    - A broadcast within a recorded span makes a span of kind PRODUCER, whose context the messages
      carry in their metadata (`traceparent`, as the configured propagator writes it).
    - Each call of a handler is a span of kind CONSUMER in a trace of its own, with a link to the
      span that broadcast the message, or links to the spans of the first 128 messages of a list.
    - `messaging.process.duration` is a histogram of the calls in seconds, with the buckets of the
      conventions: from 5 ms to 10 s.

    An error of a propagator, sampler or span processor neither refuses a broadcast nor fails an
    attempt; the first one is logged.

    Call it before the worker starts. The providers default to the global ones.
    """
    global _active
    uninstrument()
    _active = _Instrumentation(
        trace.get_tracer("django_mq", VERSION, tracer_provider),
        metrics.get_meter("django_mq", VERSION, meter_provider),
    )
    origin.metadata_sources.append(_active.inject)
    calls.surroundings.append(_active.process)


def uninstrument() -> None:
    """Stop the tracing that `instrument()` started."""
    global _active
    if _active is not None:
        origin.metadata_sources.remove(_active.inject)
        calls.surroundings.remove(_active.process)
        _active = None


class _Instrumentation:
    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._durations = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDARIES,
        )
        self._has_warned = False

    def inject(self) -> Mapping[str, str]:
        """Return the context for messages that are broadcast now: empty without a span."""
        try:
            found = self._carrier().items()
            return {name: text for name, text in found if not _UNSTORABLE.search(name + text)}
        except Exception as error:
            self._warn(error)
            return {}

    @contextmanager
    def process(self, argument: Delivery | Sequence[Delivery]) -> Iterator[None]:
        """Trace a call of a handler with `argument`; if tracing fails, the handler runs anyway."""
        tracing: AbstractContextManager[None] = self._tracing(argument)
        try:
            tracing.__enter__()
        except Exception as error:
            self._warn(error)
            tracing = nullcontext()
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            try:
                if raised is None:
                    tracing.__exit__(None, None, None)
                else:
                    tracing.__exit__(type(raised), raised, raised.__traceback__)
            except Exception as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Log `error`, once per process: it may repeat with each message."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "tracing failed; messages are sent and handled without it. Further failures are"
                " not logged",
                exc_info=traced(error, HIDDEN_EVERYWHERE),
                extra={"event": "tracing_failed"},
            )

    def _carrier(self) -> dict[str, str]:
        if not trace.get_current_span().is_recording():
            return {}
        attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "broadcast",
            "messaging.operation.type": "create",
        }
        carrier: dict[str, str] = {}
        with self._tracer.start_as_current_span(
            "broadcast", kind=SpanKind.PRODUCER, attributes=attributes
        ):
            propagate.inject(carrier)
        return carrier

    @contextmanager
    def _tracing(self, argument: Delivery | Sequence[Delivery]) -> Iterator[None]:
        deliveries = [argument] if isinstance(argument, Delivery) else list(argument)
        first = deliveries[0]
        labels = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "process",
            "messaging.destination.name": first.queue,
            "django_mq.handler": first.handler,
        }
        began = perf_counter()
        with (
            self._tracer.start_as_current_span(
                f"process {first.queue}",
                context=Context(),  # a trace of its own: a link leads to the producer's
                kind=SpanKind.CONSUMER,
                attributes={**labels, **_attributes(deliveries, listed=argument is not first)},
                links=[link for each in deliveries[:MAX_LINKS] if (link := _link(each))],
                record_exception=False,
                set_status_on_exception=False,
            ) as span
        ):
            try:
                yield
            except BaseException as error:
                end = chosen_end(error)
                if not isinstance(end, Retry | Snooze):
                    labels["error.type"] = _fail(span, end)
                raise
            finally:
                self._durations.record(perf_counter() - began, labels)


def _attributes(deliveries: Sequence[Delivery], *, listed: bool) -> dict[str, Any]:
    first = deliveries[0]
    found: dict[str, Any] = {
        "messaging.operation.type": "process",
        "django_mq.message.type": first.type,
        "django_mq.message.attempt": first.attempt,
    }
    if listed:
        return found | {"messaging.batch.message_count": len(deliveries)}
    found["messaging.message.id"] = str(first.id)
    chain = _metadata(first).get("mq.correlation_id")
    return found | ({"messaging.message.conversation_id": chain} if chain else {})


def _link(delivery: Delivery) -> Link | None:
    """Return a link to the span that broadcast `delivery`, if its metadata names one."""
    carrier = {name: text for name, text in _metadata(delivery).items() if isinstance(text, str)}
    producer = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
    return Link(producer) if producer.is_valid else None


def _metadata(delivery: Delivery) -> Mapping[str, Any]:
    try:
        found: Any = delivery.metadata
    except UnreadablePayload:
        return {}
    return found if isinstance(found, dict) else {}  # another program may have written the row


def _fail(span: Span, error: BaseException) -> str:
    """Record an error and return its class; record its text only if the log may have it."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    span.set_attribute("error.type", name)
    if get_settings().log_error_texts:
        span.set_status(StatusCode.ERROR, str(error))
        span.record_exception(error)
    else:
        span.set_status(StatusCode.ERROR, "rejected" if isinstance(error, Reject) else name)
    return name
