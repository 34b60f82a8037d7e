"""Spans of a worker process, as lines of a file, set up like docs/watching.md says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.dispatch import receiver
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from django_mq.contrib.opentelemetry import instrument
from django_mq.signals import worker_started

FILE = "spans.json"

instrument()


@receiver(worker_started)
def start_exporting(**kwargs: Any) -> None:
    lines = (Path(os.environ["ACCEPTANCE_DIR"]) / FILE).open("a", encoding="utf-8")
    exporter = ConsoleSpanExporter(
        out=lines, formatter=lambda span: span.to_json(indent=None) + "\n"
    )
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
    trace.set_tracer_provider(provider)
