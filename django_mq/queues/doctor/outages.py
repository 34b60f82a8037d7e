"""Queues and handlers that make no progress.

Mostly a service that the handlers need is away, or somebody forgot to end a pause.
"""

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
from django_mq.store import read_figures
from django_mq.store.readers import prepare_to_read

#: The span of D026, and the fewest attempts that it reports: a single message, which makes at most
#: eleven in that time with the default policy, is no reason for a warning.
MINUTES, ATTEMPTS = 10, 12
#: For how long a message must have been due: pauses for a deployment or a repair are shorter.
FORGOTTEN_AFTER = timedelta(hours=1)


def paused(alias: str) -> Iterator[Finding]:
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


def backing_off(alias: str) -> Iterator[Finding]:
    """D025: a queue backs off, and messages wait in it."""
    with short_cursor(alias):
        states = QueueState.objects.using(alias).filter(backoff_level__gt=0)
        asked = sorted(states.values_list("queue", flat=True))
    for queue, found in counts_of(asked, using=alias).items():
        if not found.backoff_level or not found.depth or found.paused:
            continue
        until = f"until {local_text(found.backoff_until)}" if found.backoff_until else "and probes"
        depth = found.shown("depth")
        work = "1 message waits" if depth == "1" else f"{depth} messages wait"
        resume = command_on(alias, f"mq_resume {queue} --backoff")
        yield Finding(
            id="D025",
            level="warning",
            text=f"The queue {queue} backs off {until} (level {found.backoff_level}), and {work}"
            " in it.",
            hint=f"{_reasons(alias, queue)} After the repair the queue returns to full rate by"
            f" itself; manage.py {resume} skips its probes.",
        )


def unsuccessful(alias: str) -> Iterator[Finding]:
    """D026: a handler has acked nothing lately, and its attempts failed or were snoozed."""
    with short_cursor(alias) as cursor:
        prepare_to_read(cursor)
        found = read_figures.unsuccessful(cursor, since=MINUTES * 60.0)
    for each in found:
        if each.handler and each.attempts >= ATTEMPTS:
            yield Finding(
                id="D026",
                level="warning",
                text=f"The handler {each.handler} in the queue {each.queue} acked nothing in the"
                f" last {MINUTES} minutes: {each.attempts:,} attempts failed or were snoozed.",
                hint="The handler fails, or a service that it needs is away."
                f" {_reasons(alias, each.queue)}",
            )


def _reasons(alias: str, queue: str) -> str:
    return (
        f"manage.py {command_on(alias, f'mq_errors --queue {queue}')} lists the errors of failed"
        f" attempts; {command_on(alias, 'mq_why ID')} shows the last error of a message, also of"
        f" one that was snoozed ({command_on(alias, f'mq_peek {queue}')} lists the ids)."
    )
