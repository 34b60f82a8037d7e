"""Traces and durations by the messaging conventions of OpenTelemetry: the extra `opentelemetry`.

Call `instrument()` once in each process, for example in `AppConfig.ready()`. It needs only the
API, and has no visible effect until an SDK is configured.
"""

from django_mq.contrib.opentelemetry.instrumentation import instrument, uninstrument

__all__ = ["instrument", "uninstrument"]
