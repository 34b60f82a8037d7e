"""Tasks with options, declared with the package's own decorator."""

from __future__ import annotations

from typing import Any

from django_mq import fixed
from django_mq.contrib.tasks import task


@task(max_attempts=3, backoff=fixed(0), queue_name="second", priority=7)
def retried(*args: Any) -> None:
    raise ValueError("again")


@task(max_attempts=3, backoff=fixed(60))
def steady() -> None: ...


@task(atomic=False, timeout=7)
def unbound() -> str:
    return "done"


@task(unique_id=lambda order, **_: f"order-{order}", key=lambda order, **_: f"order/{order}")
def per_order(order: int, text: str = "") -> str:
    return text


@task(takes_context=True)
def bare(context: Any) -> int:
    return int(context.attempt)
