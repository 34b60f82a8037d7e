"""Ask workers for an action on all messages that match a filter, and follow or cancel it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import connections

from django_mq.conf import alias_of
from django_mq.models import Operation
from django_mq.operations.changes import CHANGES
from django_mq.operations.heads import ACTIONS
from django_mq.policy.message_filter import MessageFilter
from django_mq.queues.arguments import whole_number
from django_mq.queues.transactions import writing
from django_mq.store import message_filters as filters
from django_mq.store import operations as store

logger = logging.getLogger("django_mq")


def operate(
    action: str,
    wanted: MessageFilter | None = None,
    *,
    queue: str | None = None,
    state: str | None = None,
    handler: str | None = None,
    type: str | None = None,
    key: str | None = None,
    priority: int | None = None,
    fingerprint: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    metadata: Mapping[str, Any] | None = None,
    heads: bool = False,
    by: str = "",
    user_id: object = "",
    matched: int | None = None,
    using: str | None = None,
) -> Operation:
    """Ask for an action (requeue, run_now, cancel, discard) on all messages that match.

    They match the filter `wanted`, or else all of the other conditions; `since` and `until` bound
    the time of the broadcast. Without any, the action covers every message that it applies to. A
    worker begins within a poll interval of the commit. It acts on each message that is stored now
    at most once, 1,000 per transaction. Messages in flight, and later ones, are left alone. With
    `heads`, it requeues or discards the dead first messages of the lines (order keys, ordered
    queues) of the matching messages instead.

    `by` names the operator, `user_id` is that user's key for the log of the admin, `matched` a
    count.
    """
    if action not in CHANGES:
        raise ValueError(f"there is no action {action!r}; there are {', '.join(sorted(CHANGES))}")
    conditions = MessageFilter(
        queues=None if queue is None else (queue,),
        state=state,
        handler=handler,
        type=type,
        key=key,
        priority=priority,
        fingerprint=fingerprint,
        since=since,
        until=until,
        metadata=metadata,
        heads=heads or None,
    )
    if wanted is not None and conditions != MessageFilter():
        raise ValueError("select messages by a filter, or by queue, state and so on, not both")
    wanted = wanted or conditions
    if wanted.heads and action not in ACTIONS:
        raise ValueError(f"{action} is not an action on heads; there are {', '.join(ACTIONS)}")
    alias = alias_of(using)
    with connections[alias].cursor() as cursor:
        last = filters.last_id(cursor)
    made = Operation(
        action=action,
        filter=wanted.as_json(),
        by=by,
        user_id=str(user_id),
        matched=matched,
        last_id=last,
    )
    made.save(using=alias, force_insert=True)
    made.refresh_from_db(using=alias)
    logger.info(
        "operation %d: %s requested for all messages that match",
        made.pk,
        action,
        extra={"event": "operation_asked_for", "operation": made.pk, "action": action},
    )
    return made


def operations(*, limit: int = 100, using: str | None = None) -> list[Operation]:
    """Return the newest operations, at most `limit`."""
    found = Operation.objects.using(alias_of(using)).order_by("-pk")
    return list(found[: whole_number(limit, "limit", maximum=10_000)])


def cancel_operation(id: int, *, using: str | None = None) -> bool:
    """End an operation after its current step; return whether it was open.

    Its changes stay. Raises OperationalError if a step takes longer than a second.
    """
    with writing(alias_of(using)) as cursor:
        progress = store.cancel(cursor, whole_number(id, "id"))
    if progress is None:
        return False
    logger.info(
        "operation %d: cancelled after %d changed",
        id,
        progress.done,
        extra={"event": "operation_ended", "operation": id, "state": progress.state},
    )
    return True
