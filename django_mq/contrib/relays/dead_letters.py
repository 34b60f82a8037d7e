"""Broadcast the dead letters of an inbox again, once its settings are corrected."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming, default_type, incoming_of, message_of
from django_mq.contrib.relays.sending import INBOX
from django_mq.models import QueuedMessage

#: How many dead letters one transaction replaces.
AT_ONCE = 100


def broadcast_again(consumer: Consumer) -> int:
    """Store what the broker once delivered, by the present settings; return how many stay dead.

    `consumer` counts those that it stores. The order is that in which they came in.
    """
    ids = list(_letters(consumer).order_by("pk").values_list("pk", flat=True))
    for first in range(0, len(ids), AT_ONCE):
        chunk = ids[first : first + AT_ONCE]
        with transaction.atomic(using=consumer.alias):
            found = _letters(consumer).filter(pk__in=chunk).order_by("pk")
            good = {}
            for letter in found.select_for_update(skip_locked=True):
                if incoming := _repaired(consumer, letter):
                    good[letter.pk] = incoming
            _letters(consumer).filter(pk__in=good).delete()
            consumer.store(list(good.values()))
    return _letters(consumer).count()


def _letters(consumer: Consumer) -> QuerySet[QueuedMessage]:
    return (
        QueuedMessage.objects.using(consumer.alias)
        .dead()
        .filter(type=default_type(consumer.name), handler="")
        .filter(**{f"metadata__{INBOX}": consumer.name})
    )


def _repaired(consumer: Consumer, letter: QueuedMessage) -> Incoming | None:
    """Return the message of a dead letter if it can be broadcast now."""
    try:
        incoming = incoming_of(letter.payload)
        message_of(incoming, consumer.name, consumer.inbox)
    except Exception:  # of a payload that somebody edited, too: it stays dead
        return None
    return incoming
