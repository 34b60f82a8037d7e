"""Whether a delivery may start without asking the server: it is ours, and has not expired."""

from __future__ import annotations

from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.tasks import Task
from django_mq.messages import LONG_AGO, Delivery


def is_sure(task: Task, since: float) -> bool:
    """Return whether `task` may start unlocked: it was claimed or renewed after `since`.

    `since` is a time of the lease clock; no lease given later can have lapsed. Suspects and
    messages of a line are always locked first.
    """
    delivery = task.delivery
    return task.line is None and not delivery._row.suspect and delivery._sure_at >= since


def has_expired(delivery: Delivery) -> bool:
    """Return whether `delivery` has expired, judged by its claim.

    The answer may be true a round trip early, but is never late.
    """
    asked_at, expires_in = delivery._asked_at, delivery._row.expires_in
    return expires_in is not None and LONG_AGO < asked_at <= lease_clock() - expires_in
