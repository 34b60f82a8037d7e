"""The handlers of a worker before a rolling deploy: the first version of a single type."""

from __future__ import annotations

from typing import Any

from django_mq import handler, periodic

from . import handlers


@handler("acceptance.versioned", queue="work", name="versioned")
def versioned(delivery: Any) -> None:
    handlers.begin(delivery)
    handlers.effect(delivery)


periodic("versioned", "acceptance.versioned", {"version": 1}, every=3600)
