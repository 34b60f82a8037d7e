"""Change the payload, due time or priority of a waiting message."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any, Final

from django_mq.conf import alias_of, get_settings
from django_mq.conf.local_time import aware
from django_mq.exceptions import InvalidOption, InvalidPayload, NotWaiting
from django_mq.messages import Message
from django_mq.messages.classes import class_of_type
from django_mq.outbox.options import check_integer, moments
from django_mq.policy.column_bounds import MAX_PRIORITY, MIN_PRIORITY
from django_mq.policy.routing import TASKS
from django_mq.queues.arguments import whole_number
from django_mq.queues.transactions import after_commit, wake, writing
from django_mq.store import editing
from django_mq.values import short_repr

logger = logging.getLogger("django_mq")

UNCHANGED: Final[Any] = object()


def edit(
    id: int,
    *,
    payload: Any = UNCHANGED,
    due: datetime | None = None,
    priority: int | None = None,
    digest: str | None = None,
    using: str | None = None,
) -> None:
    """Change a message that waits: due, delayed, retrying, held or blocked.

    `payload` replaces the whole payload, and must fit the message class of its type, if there is
    one; the payload of a Django task is an object with args and kwargs. `due` is an aware datetime.
    None leaves due time or priority as it is. `digest` is the MD5 of the payload as the server
    writes it: the change is refused if the payload has changed since. The order within a key and
    in an ordered queue stays the same.

    Raises NotWaiting, InvalidPayload or InvalidOption; OperationalError if another session has
    locked the message for more than a second.
    """
    whole_number(id, "id")
    settings = get_settings()
    text = None if payload is UNCHANGED else settings.encode_payload(payload)
    if priority is not None:
        check_integer(priority, "priority", MIN_PRIORITY, MAX_PRIORITY)
    if due is not None:
        due = _due(due, settings.max_delay)
    alias = alias_of(using)
    with writing(alias, role="mq_admin") as cursor:
        row = editing.lock(cursor, id)
        if row is None or not row.waits:
            raise NotWaiting(f"message {id} does not wait: it is in flight, dead or gone")
        if digest is not None and digest != row.digest:
            raise NotWaiting(f"the payload of message {id} has changed: look at it again")
        if due is not None and row.expires_at is not None and due >= aware(row.expires_at):
            raise InvalidOption(f"due: message {id} expires before that time")
        if text is not None:
            _check_payload(row, text)
        editing.write(cursor, id, payload=text, due=due, priority=priority)
    extra = {"event": "message_edited", "message_ids": (id,)}
    after_commit(alias, lambda: logger.info("message %d edited", id, extra=extra))
    wake(alias)


def _due(value: object, max_delay: float) -> datetime | None:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidOption(f"due must be an aware datetime, not {short_repr(value)}")
    return moments(Message("due", after=value), max_delay)[0]


def _check_payload(row: editing.EditableRow, text: str) -> None:
    """Check a payload as a handler will read it: the encoder writes, say, a datetime as text."""
    if row.type.startswith(TASKS):
        _check_arguments(json.loads(text))
    known = class_of_type(row.type)
    if known is None or row.schema_version > known.version:
        return
    if known.gap(row.schema_version) is None:
        known.load(json.loads(text), row.schema_version)


def _check_arguments(payload: Any) -> None:
    """Check the payload of a Django task, whose result cannot be read without its arguments."""
    given = payload if isinstance(payload, dict) else {}
    if not isinstance(given.get("args"), list) or not isinstance(given.get("kwargs"), dict):
        raise InvalidPayload(
            "the payload of a task is an object with args, a list, and kwargs, an object"
        )
