"""The handlers of a worker after a rolling deploy: a newer version of a type, and a new type."""

from __future__ import annotations

from typing import Any

from django_mq import handler, periodic

from . import handlers


@handler("acceptance.versioned", queue="work", name="versioned", schema_version=2)
def versioned(delivery: Any) -> None:
    handlers.begin(delivery)
    handlers.effect(delivery)


@handler("acceptance.fresh", queue="work", name="fresh")
def fresh(delivery: Any) -> None:
    handlers.begin(delivery)
    handlers.effect(delivery)


periodic("versioned", "acceptance.versioned", {"version": 2}, every=3600)
