"""What operators decide about a queue as a whole: pause, resume, limit, end a backoff.

`dry_run` changes nothing, and returns or raises what the deed would.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial

from django.db import transaction

from django_mq import signals
from django_mq.conf import get_settings
from django_mq.exceptions import When, moment
from django_mq.queues.checking import LONGEST
from django_mq.queues.connecting import alias_of, wake, writing
from django_mq.routing import check_name
from django_mq.store import queue_backoff
from django_mq.store import queues as store

logger = logging.getLogger("django_mq")

#: The column of the table takes no more.
MOST_IN_FLIGHT = 2**31 - 1


def pause(
    queue: str, *, until: When | None = None, dry_run: bool = False, using: str | None = None
) -> datetime | None:
    """Let no worker claim from `queue` until then: seconds, a timedelta, an aware datetime, or
    None for good. What runs already goes on. Returns until when, or None.

    Raises ValueError for a time that is past or has no date; OperationalError when the queue's
    row stays locked for a second.
    """
    check_name(queue, "queue")
    when = None if until is None else moment(until)
    at, delay = (when, None) if isinstance(when, datetime) else (None, when)
    ahead = delay if at is None else (at - datetime.now(UTC)).total_seconds()
    if ahead is not None and ahead > LONGEST:
        raise ValueError(f"queue {queue} cannot be paused until {until}: pause it for good")
    with writing(alias_of(using), dry_run=dry_run) as cursor:
        paused = store.pause(cursor, queue=queue, at=at, delay=delay)
    if paused is None:
        raise ValueError(f"queue {queue} cannot be paused until {until}: that is past")
    if not dry_run:
        logger.info(
            "queue %s paused until %s",
            queue,
            paused.until or "it is resumed",
            extra={"event": "queue_paused", "queue": queue},
        )
    return paused.until


def resume(queue: str, *, dry_run: bool = False, using: str | None = None) -> bool:
    """End the pause of `queue` and wake the workers; say whether it was paused.

    A backoff goes on: `end_backoff()` ends it. Raises OperationalError when the queue's row
    stays locked for a second.
    """
    check_name(queue, "queue")
    alias = alias_of(using)
    with writing(alias, dry_run=dry_run) as cursor:
        was_paused = store.resume(cursor, queue=queue)
    if was_paused and not dry_run:
        logger.info("queue %s resumed", queue, extra={"event": "queue_resumed", "queue": queue})
        wake(alias)
    return was_paused


def limit(
    queue: str, max_in_flight: int | None, *, dry_run: bool = False, using: str | None = None
) -> int | None:
    """Let the fleet have at most so many messages of `queue` in flight, from now on.

    0 holds all; None: what the settings say. What runs already goes on. Workers obey within a
    second. Returns the limit that holds then, None for none.

    Raises ValueError for what is no whole number from 0 on; OperationalError when the queue's
    row stays locked for a second.
    """
    check_name(queue, "queue")
    if max_in_flight is not None and (
        type(max_in_flight) is not int or not 0 <= max_in_flight <= MOST_IN_FLIGHT
    ):
        raise ValueError(
            f"max_in_flight is a number from 0 to {MOST_IN_FLIGHT:,}, or None for what the"
            f" settings say, not {max_in_flight!r}"
        )
    alias = alias_of(using)
    with writing(alias, dry_run=dry_run) as cursor:
        store.limit(cursor, queue=queue, max_in_flight=max_in_flight)
    holds = effective_limit(queue, max_in_flight)
    if not dry_run:
        logger.info(
            "queue %s limited to %s in flight",
            queue,
            "any number" if holds is None else holds,
            extra={"event": "queue_limited", "queue": queue, "max_in_flight": holds},
        )
        wake(alias)
    return holds


def effective_limit(queue: str, decided: int | None) -> int | None:
    """Return the limit that holds: what was decided while running goes before the settings."""
    return get_settings().queue(queue).max_in_flight if decided is None else decided


def end_backoff(queue: str, *, dry_run: bool = False, using: str | None = None) -> bool:
    """Let `queue` run at its full rate again and wake the workers; say whether it backed off.

    For whoever knows that the cause is mended and does not want to wait for the probes. Should
    it fail again, it backs off again. A pause goes on. Raises OperationalError when the queue's
    row stays locked for a second.
    """
    check_name(queue, "queue")
    alias = alias_of(using)
    with writing(alias, dry_run=dry_run) as cursor:
        moved = queue_backoff.end_backoff(cursor, queue=queue)
        if moved is not None and not dry_run:
            text = "does not back off any more: it was ended by hand"
            say = partial(
                signals.announce_queue, signals.backoff_ended, queue, text, level=0, until=None
            )
            transaction.on_commit(say, using=alias, robust=True)
    if moved is not None and not dry_run:
        wake(alias)
    return moved is not None
