"""Test an inbox without its broker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from django_mq.conf import alias_of, get_settings
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming

__all__ = ["receive"]


def receive(
    inbox: str,
    body: Any = b"",
    *,
    id: str | None = "",
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
    key: str | None = None,
    using: str | None = None,
) -> bool:
    """Store what `mq_consume INBOX` stores for one message of the broker.

    `body` is bytes, or a value that becomes JSON. `id` is the broker's own id of the message: by
    default a new one, None if it has none. `key` is that of Kafka's record. `drain()` then runs the
    handlers. Returns False if the message was dropped because it came before.

    Raises Undecodable, with the reason, if the inbox would store a dead letter; KeyError if the
    settings have no such inbox.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    own_id = uuid4().hex if id == "" else id
    incoming = Incoming(raw, dict(headers or {}), content_type, own_id, key=key)
    consumer = Consumer(inbox, get_settings().inboxes[inbox], using=alias_of(using))
    for _, refused in consumer.broadcast([incoming]):
        raise refused
    return consumer.stored == 1
