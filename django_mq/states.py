"""The state of a message, as people read it: derived from the row, never stored.

`QueuedMessage.objects.with_state()` and `message.state` use the same expression. If several states
hold, the first one in MessageState counts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.apps import apps
from django.db import models
from django.db.models import Case, Exists, Func, OuterRef, Q, Value, When
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

#: A worker counts as dead after three missed heartbeats of 10 s.
GONE_AFTER = timedelta(seconds=30)


class MessageState(models.TextChoices):
    """The states in order of precedence: a dead message is dead, whatever else holds."""

    DEAD = "dead", _("dead")
    RUNNING = "running", _("running")
    LEASED = "leased", _("leased")
    BLOCKED = "blocked", _("blocked")
    HELD = "held", _("held")
    EXPIRED = "expired", _("expired")
    PAUSED = "paused", _("paused")
    RETRYING = "retrying", _("retrying")
    DELAYED = "delayed", _("delayed")
    PROCESSABLE = "processable", _("processable")


def state_expression() -> Case:
    """Return the SQL expression whose value is the state of a message."""
    live_workers = apps.get_model("django_mq", "WorkerHeartbeat")._default_manager.filter(
        last_seen__gt=Now() - GONE_AFTER,
        running__contains=Func(
            OuterRef("pk"), function="to_jsonb", output_field=models.JSONField()
        ),
    )
    paused_queues = apps.get_model("django_mq", "QueueState")._default_manager.filter(
        Q(paused_at__isnull=False, paused_until__isnull=True)
        | Q(paused_at__isnull=False, paused_until__gt=Now())
        | Q(backoff_until__gt=Now()),
        queue=OuterRef("queue"),
    )
    not_due = Q(processable_after__gt=Now())
    cases: dict[MessageState, Any] = {
        MessageState.DEAD: Q(dead_at__isnull=False),
        MessageState.RUNNING: Q(leased_until__isnull=False) & Q(Exists(live_workers)),
        MessageState.LEASED: Q(leased_until__gt=Now()),
        MessageState.BLOCKED: Q(blocked_by__isnull=False),
        MessageState.HELD: Q(held_since__isnull=False),
        MessageState.EXPIRED: Q(expires_at__lte=Now()),
        MessageState.PAUSED: Q(Exists(paused_queues)),
        MessageState.RETRYING: not_due & Q(attempts__gt=0),
        MessageState.DELAYED: not_due,
    }
    return Case(
        *(When(condition, then=Value(state.value)) for state, condition in cases.items()),
        default=Value(MessageState.PROCESSABLE.value),
        output_field=models.CharField(),
    )


def read_state(message: models.Model) -> MessageState:
    """Return the current state of `message`, read from the database.

    Raises DoesNotExist if the row was removed: acked, cancelled or purged.
    """
    rows = type(message)._default_manager.using(message._state.db).filter(pk=message.pk)
    states = rows.annotate(state=state_expression()).values_list("state", flat=True)
    return MessageState(states.get())
