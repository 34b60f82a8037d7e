"""Tasks in a module that OPTIONS names."""

from __future__ import annotations

from django_mq.contrib.tasks import task


@task
def add(a: int, b: int) -> int:
    return a + b
