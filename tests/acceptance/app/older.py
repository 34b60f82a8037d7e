"""What a worker has before a rolling deploy: it knows the first version of one type alone."""

from __future__ import annotations

from typing import Any

from django_mq import handler

from . import handlers


@handler("acceptance.versioned", queue="work", name="versioned")
def versioned(delivery: Any) -> None:
    handlers.begin(delivery)
    handlers.effect(delivery)
