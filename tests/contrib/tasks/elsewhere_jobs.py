"""A task that is declared for a backend of another package, here Django's own."""

from __future__ import annotations

from django_mq.contrib.tasks import task


@task(backend="elsewhere")
def note(n: int) -> int:
    return n
