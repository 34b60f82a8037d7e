"""The state of a message, as users see it: derived from the row, never stored.

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
from django.db.models.lookups import In

#: A worker counts as dead after three missed heartbeats of 10 s.
GONE_AFTER = timedelta(seconds=30)
_JSON = models.JSONField()


class MessageState(models.TextChoices):
    """The states in order of precedence: a dead message is dead, whatever else is true of it."""

    DEAD = "dead", "dead"
    RUNNING = "running", "running"
    LEASED = "leased", "leased"
    BLOCKED = "blocked", "blocked"
    HELD = "held", "held"
    EXPIRED = "expired", "expired"
    PAUSED = "paused", "paused"
    RETRYING = "retrying", "retrying"
    DELAYED = "delayed", "delayed"
    PROCESSABLE = "processable", "processable"


def state_expression() -> Case:
    """Return the SQL expression whose value is the state of a message."""
    # Evaluated once per statement, not once per message: a list may have 10,000 leased ones.
    live_workers = apps.get_model("django_mq", "WorkerHeartbeat")._default_manager.filter(
        last_seen__gt=Now() - GONE_AFTER
    )
    running = live_workers.values_list(
        Func("running", template="jsonb_path_query(%(expressions)s, '$[*]')", output_field=_JSON)
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
        MessageState.RUNNING: Q(leased_until__isnull=False)
        & Q(In(Func("pk", function="to_jsonb", output_field=_JSON), running.query)),
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
