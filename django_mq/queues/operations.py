"""Ask workers for an action on all messages that match a filter, and follow or cancel it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from django.db import connections

from django_mq.conf import alias_of, get_settings
from django_mq.models import Operation
from django_mq.operations.changes import CHANGES, HEAD_ACTIONS
from django_mq.operations.filter_words import public_words
from django_mq.operations.steps import report_end
from django_mq.policy.message_filter import MessageFilter
from django_mq.policy.names import check_key, check_name
from django_mq.queues.arguments import flag, operator_name, whole_number
from django_mq.queues.transactions import after_commit, writing
from django_mq.store import message_filters as filters
from django_mq.store import operations as operations_store
from django_mq.values import short_repr

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
    everything: bool = False,
    by: str = "",
    user_id: object = "",
    matched: int | None = None,
    using: str | None = None,
) -> Operation:
    """Ask for an action (requeue, run_now, cancel, discard) on all messages that match.

    They match the filter `wanted`, or else all of the other conditions; `type` may end in `*`,
    `since` and `until` limit the time of the broadcast. `everything=True`, instead of a filter,
    stands for every message to which the action applies. A worker begins within a poll interval
    after the commit. It acts on each message that is stored now at most once, 1,000 per
    transaction, in the order of their ids: unlike `queues.requeue()`, it may give a unique id to an
    earlier of several dead letters. Messages in flight, and later ones, are left alone. With
    `heads`, it instead requeues or discards the dead first messages of the lines (order keys,
    ordered queues) of the matching messages.

    `by` names the operator, `user_id` is that user's key for the log of the admin, `matched` is a
    count. Raises TypeError without a filter, and ValueError or InvalidName for bad arguments.
    """
    conditions = MessageFilter(
        queues=None if queue is None else (check_name(queue, "queue"),),
        state=state,
        handler=None if handler is None else check_name(handler, "handler"),
        type=None if type is None else _checked_type(type),
        key=None if key is None else check_key(key, "key"),
        priority=priority,
        fingerprint=fingerprint,
        since=since,
        until=until,
        metadata=metadata,
        heads=flag(heads, "heads") or None,
    )
    chosen = _chosen(action, wanted, conditions, everything=flag(everything, "everything"))
    made = Operation(
        action=action,
        filter=_storable(chosen).as_json(),
        by=operator_name(by),
        user_id=_checked_user(user_id),
        matched=None if matched is None else whole_number(matched, "matched", minimum=0),
    )
    return _store(made, alias_of(using))


def _checked_type(type: str) -> str:
    """Return a type, or the beginning of a type followed by `*`; raise InvalidName for others."""
    if not isinstance(type, str) or not type.endswith("*"):
        return check_name(type, "type")
    beginning = type[:-1]
    return f"{check_name(beginning, 'type')}*" if beginning else "*"


def _checked_user(user_id: object) -> str:
    text = str(user_id)
    if not text.isprintable():
        raise ValueError(f"user_id must be the key of a user, not {short_repr(text)}")
    return text


def _chosen(
    action: object, wanted: MessageFilter | None, conditions: MessageFilter, *, everything: bool
) -> MessageFilter:
    """Return the given filter, an empty one for everything; raise TypeError if there is neither.

    Raises ValueError if there are several, or if the action does not apply.
    """
    if not isinstance(action, str) or action not in CHANGES:
        raise ValueError(
            f"there is no action {short_repr(action)}; there are {', '.join(sorted(CHANGES))}"
        )
    if wanted is not None and not isinstance(wanted, MessageFilter):
        raise ValueError(f"a filter of messages is a MessageFilter, not {short_repr(wanted)}")
    if wanted is not None and conditions != MessageFilter():
        raise ValueError("select messages by a filter, or by queue, state and so on, not both")
    chosen = wanted or conditions
    if chosen.heads and action not in HEAD_ACTIONS:
        raise ValueError(f"{action} is not an action on heads; there are {', '.join(HEAD_ACTIONS)}")
    # `heads` alone is not a filter. A filter given as a value may be empty: the admin showed its
    # count.
    is_filtered = wanted is not None or replace(conditions, heads=None) != MessageFilter()
    if everything and is_filtered:
        raise ValueError("select messages by a filter, or all by everything=True, not both")
    if not everything and not is_filtered:
        raise TypeError(
            "operate() needs a filter: at least one of queue=, state=, handler=, type=, key=,"
            " priority=, fingerprint=, since=, until=, metadata=; or everything=True, to act on"
            " all messages"
        )
    return chosen


def _storable(wanted: MessageFilter) -> MessageFilter:
    """Return a filter whose metadata are encoded as in messages; raises InvalidPayload."""
    if wanted.metadata is None:
        return wanted
    text = get_settings().encode_metadata(dict(wanted.metadata))
    return replace(wanted, metadata=json.loads(text))


def _store(made: Operation, alias: str) -> Operation:
    with connections[alias].cursor() as cursor:
        made.last_id = filters.last_id(cursor)
    made.save(using=alias, force_insert=True)
    made.refresh_from_db(using=alias)
    after_commit(alias, partial(_log, made))
    return made


def _log(made: Operation) -> None:
    words = public_words(made.filter)
    logger.info(
        "operation %d: %s requested%s for all messages that match (%s)",
        made.pk,
        made.action,
        f" by {made.by}" if made.by else "",
        words,
        extra={
            "event": "operation_asked_for",
            "operation": made.pk,
            "action": made.action,
            "by": made.by,
            "filter": words,
        },
    )


def operations(*, limit: int = 100, using: str | None = None) -> list[Operation]:
    """Return the newest operations, at most `limit`."""
    found = Operation.objects.using(alias_of(using)).order_by("-pk")
    return list(found[: whole_number(limit, "limit", maximum=10_000)])


def cancel_operation(id: int, *, using: str | None = None) -> bool:
    """End an operation after its current step; return whether it was open.

    Its changes stay. Raises OperationalError if a step takes longer than a second.
    """
    whole_number(id, "id")
    with writing(alias_of(using)) as cursor:
        progress = operations_store.cancel(cursor, id)
    if progress is None:
        return False
    report_end(id, progress)
    return True
