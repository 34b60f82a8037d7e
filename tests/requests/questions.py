"""A stored request, and its handler."""

from __future__ import annotations

from typing import Any

from django_mq import RetryPolicy, handler

NEVER = RetryPolicy.never()


def echo(**options: Any) -> None:
    @handler("test.echo", name="echo", **options)
    def echo(delivery: Any) -> Any:
        return delivery.payload
