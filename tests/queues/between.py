"""Messages that end between two statements of one answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from django_mq.models import QueuedMessage


@contextmanager
def ending_after(statement: str, *messages: QueuedMessage) -> Iterator[None]:
    """Within the block, `messages` are acked before the first read after a raw `statement`."""
    seen, left = False, [message.pk for message in messages]

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal seen
        if seen and left and sql.startswith("SELECT"):
            ids, left[:] = list(left), []
            QueuedMessage.objects.filter(pk__in=ids).delete()
        seen |= statement in sql
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield
    assert not left, "nothing was read after the statement"
