"""Broadcasts with a unique id, and the state of their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import transaction

from django_mq import Delivery, broadcast, handler


def send(n: int = 0, type: str = "a.b", **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(type, n, **{"unique_id": "u", **options})


def subscribe(function: Callable[..., Any], **options: Any) -> list[Any]:
    """Subscribe a handler that notes its messages and calls `function`; return the notes."""
    got: list[Any] = []

    def handle(delivery: Delivery) -> None:
        got.append(delivery.payload)
        function(delivery)

    handler("a.b", **{"name": "h", "queue": "mail", **options})(handle)
    return got


def free() -> bool:
    """Say whether the id can be taken, without changing anything."""
    with transaction.atomic():
        found = broadcast("a.b", unique_id="u").outcome == "added"
        transaction.set_rollback(True)
    return found
