"""Pauses that somebody may have forgotten to end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django.db.models import Q
from django.db.models.functions import Now

from django_mq.conf import command_on
from django_mq.conf.local_time import local_text
from django_mq.models import QueueState
from django_mq.policy.durations import span
from django_mq.queues.doctor.findings import Finding, short_cursor
from django_mq.queues.message_counts import counts_of

#: For how long a message must have been due: pauses for a deployment or a repair are shorter.
FORGOTTEN_AFTER = timedelta(hours=1)


def forgotten(alias: str) -> Iterator[Finding]:
    """D027: a queue is paused, and a message in it has been due for long."""
    with short_cursor(alias):
        states = QueueState.objects.using(alias).filter(
            Q(paused_until=None) | Q(paused_until__gt=Now()), paused_at__isnull=False
        )
        since = dict(states.order_by("queue").values_list("queue", "paused_at"))
    for queue, found in counts_of(list(since), using=alias).items():
        if not found.paused or found.oldest is None or found.oldest < FORGOTTEN_AFTER:
            continue
        end = f", until {local_text(found.paused_until)}" if found.paused_until else ""
        resume = command_on(alias, f"mq_resume {queue}")
        yield Finding(
            id="D027",
            level="warning",
            text=f"The queue {queue} has been paused since {local_text(since[queue])}{end}, and its"
            f" oldest message has been due for {span(found.oldest)}.",
            hint=f"If the reason for it is gone: manage.py {resume}.",
        )
