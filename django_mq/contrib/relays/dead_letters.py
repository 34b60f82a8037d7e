"""Broadcast the dead letters of an inbox again, once its settings are corrected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from django.db.models import QuerySet

from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming, default_type, incoming_of
from django_mq.contrib.relays.sending import INBOX
from django_mq.models import QueuedMessage

logger = logging.getLogger("django_mq")

#: How many dead letters one transaction replaces.
AT_ONCE = 100
#: What `undecodable_payload()` has had in each version.
NAMES = ["raw", "content_type", "headers", "id"]


def broadcast_again(consumer: Consumer) -> int:
    """Store what the broker once delivered, by the present settings; return how many stay dead.

    `consumer` counts those that it stores. The order is that in which they came in, also while
    another process does the same: it waits for the locks of this one.
    """
    ids = list(_letters(consumer).order_by("pk").values_list("pk", flat=True))
    for first in range(0, len(ids), AT_ONCE):
        _broadcast_some(consumer, ids[first : first + AT_ONCE])
    return _letters(consumer).count()


def _broadcast_some(consumer: Consumer, ids: Sequence[int]) -> None:
    with consumer.transaction():
        letters = _letters(consumer).filter(pk__in=ids).order_by("pk").select_for_update()
        found = [incoming for letter in letters if (incoming := _incoming_of(letter))]
        refused = {incoming.token for incoming, _ in consumer.broadcast(found)}
        done = [incoming.token for incoming in found if incoming.token not in refused]
        _letters(consumer).filter(pk__in=done).delete()
    if done:
        logger.info(
            "inbox %s: dead letters broadcast again: %d",
            consumer.name,
            len(done),
            extra={"event": "inbox_repaired", "inbox": consumer.name, "message_ids": done},
        )


def _letters(consumer: Consumer) -> QuerySet[QueuedMessage]:
    """Return the inbox's dead letters, also those that were requeued and held until they died.

    One that a handler took after it was requeued is a message like any other. Messages that the
    inbox could broadcast, and that died, have other payloads.
    """
    return (
        QueuedMessage.objects.using(consumer.alias)
        .dead()
        .filter(type=default_type(consumer.name), handler="")
        .filter(**{f"metadata__{INBOX}": consumer.name}, payload__has_keys=NAMES)
    )


def _incoming_of(letter: QueuedMessage) -> Incoming | None:
    """Return what the broker delivered; None if somebody edited the payload."""
    try:
        return replace(incoming_of(letter.payload), token=letter.pk)
    except Exception:
        return None
