"""Tasks under measurement: Django's own, run by its backend in this package."""

from __future__ import annotations

from typing import Any

import django

from benchmarks.app.recording import recorder

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task(takes_context=True)
def noop(context: Any, **payload: Any) -> None:
    """Nothing."""
    recorder.called(int(context.task_result.id))
