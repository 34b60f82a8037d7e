"""Spans of a worker process, as lines of a file, set up as docs/watching.md says.

They are exported by the flush at the end of the process: the processor's own delay is an hour.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.dispatch import receiver
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from django_mq.contrib.opentelemetry import instrument
from django_mq.signals import worker_started, worker_stopped

FILE = "spans.json"

provider = TracerProvider()

instrument()


@receiver(worker_started)
def start_exporting(**kwargs: Any) -> None:
    lines = (Path(os.environ["ACCEPTANCE_DIR"]) / FILE).open("a", encoding="utf-8")
    exporter = ConsoleSpanExporter(
        out=lines, formatter=lambda span: span.to_json(indent=None) + "\n"
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    trace.set_tracer_provider(provider)


@receiver(worker_stopped)
def flush(**kwargs: Any) -> None:
    provider.force_flush()
