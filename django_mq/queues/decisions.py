"""Pause, resume and limit a queue, or end its backoff.

With `dry_run` nothing changes; the call returns or raises what the real call would. Each function
raises OperationalError if another session keeps the queue's row locked for a second. A queue that
is unknown here is changed, with a warning in the log: a deploy may add it later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

from django.db import transaction
from django.db.backends.utils import CursorWrapper

from django_mq import signals
from django_mq.conf import alias_of, get_settings
from django_mq.conf.local_time import local_text
from django_mq.policy.column_bounds import MAX_INTEGER
from django_mq.policy.names import check_name
from django_mq.queues.arguments import MAX_SECONDS
from django_mq.queues.known_queues import warning_if_unknown
from django_mq.queues.transactions import after_commit, wake, writing
from django_mq.store import decisions, queue_backoff
from django_mq.values import When, checked_when, short_repr

logger = logging.getLogger("django_mq")

#: The largest value of the column.
MAX_IN_FLIGHT = MAX_INTEGER


def pause(
    queue: str, *, until: When | None = None, dry_run: bool = False, using: str | None = None
) -> datetime | None:
    """Stop workers from claiming from `queue`; return when the pause ends, None if it does not.

    `until` is seconds from now, a timedelta, an aware datetime, or None for no end. Messages that
    already run are not affected. Workers are woken, since the new end may be earlier than the one
    that they know. Raises ValueError for a time in the past or too far ahead.
    """
    check_name(queue, "queue")
    when = None if until is None else checked_when(until)
    at, delay = (when, None) if isinstance(when, datetime) else (None, when)
    words = f"until {until}" if delay is None else f"for {delay:,.12g} seconds"
    if delay == 0:
        raise ValueError(
            f"queue {queue} cannot be paused {words}: give a longer time, or pause it without an"
            " end"
        )
    ahead = delay if at is None else (at - datetime.now(UTC)).total_seconds()
    if ahead is not None and ahead > MAX_SECONDS:
        raise ValueError(
            f"queue {queue} cannot be paused {words}: that is too far ahead; pause it without"
            " an end"
        )
    alias = alias_of(using)
    with _deciding(queue, alias, dry_run=dry_run) as cursor:
        paused = decisions.pause(cursor, queue=queue, at=at, delay=delay)
    if paused is None:
        raise ValueError(f"queue {queue} cannot be paused {words}: that time has passed")
    if not dry_run:
        after_commit(
            alias,
            lambda: logger.info(
                "queue %s paused until %s",
                queue,
                "it is resumed" if paused.until is None else local_text(paused.until),
                extra={"event": "queue_paused", "queue": queue},
            ),
        )
        wake(alias)
    return paused.until


def resume(queue: str, *, dry_run: bool = False, using: str | None = None) -> bool:
    """End the pause of `queue` and wake the workers; return whether it was paused.

    A backoff continues: `end_backoff()` ends it.
    """
    check_name(queue, "queue")
    alias = alias_of(using)
    with _deciding(queue, alias, dry_run=dry_run) as cursor:
        was_paused = decisions.resume(cursor, queue=queue)
    if was_paused and not dry_run:
        extra = {"event": "queue_resumed", "queue": queue}
        after_commit(alias, lambda: logger.info("queue %s resumed", queue, extra=extra))
        wake(alias)
    return was_paused


def limit(
    queue: str, max_in_flight: int | None, *, dry_run: bool = False, using: str | None = None
) -> int | None:
    """Limit how many messages of `queue` the fleet has in flight; return the limit that applies.

    0 stops all claims; None restores the limit of the settings, which may be None (no limit).
    Workers apply it within a second. Messages that already run are not affected. Raises
    ValueError unless `max_in_flight` is None or a whole number from 0.
    """
    check_name(queue, "queue")
    if max_in_flight is not None and (
        type(max_in_flight) is not int or not 0 <= max_in_flight <= MAX_IN_FLIGHT
    ):
        raise ValueError(
            f"max_in_flight must be a whole number from 0 to {MAX_IN_FLIGHT:,}, or None for the"
            f" limit of the settings, not {short_repr(max_in_flight)}"
        )
    alias = alias_of(using)
    with _deciding(queue, alias, dry_run=dry_run) as cursor:
        decisions.limit(cursor, queue=queue, max_in_flight=max_in_flight)
    holds = effective_limit(queue, max_in_flight)
    if not dry_run:
        after_commit(
            alias,
            lambda: logger.info(
                "queue %s: %s",
                queue,
                "no limit in flight" if holds is None else f"at most {holds:,} in flight",
                extra={"event": "queue_limited", "queue": queue, "max_in_flight": holds},
            ),
        )
        wake(alias)
    return holds


def effective_limit(queue: str, decided: int | None) -> int | None:
    """Return the limit that applies: one that an operator set overrides the settings."""
    return get_settings().queue(queue).max_in_flight if decided is None else decided


def end_backoff(queue: str, *, dry_run: bool = False, using: str | None = None) -> bool:
    """Return `queue` to its full rate and wake the workers; return whether it was backing off.

    Use it when the cause is fixed and you do not want to wait for the probes. If handlers fail
    again, the queue backs off again. A pause continues.
    """
    check_name(queue, "queue")
    alias = alias_of(using)
    with _deciding(queue, alias, dry_run=dry_run) as cursor:
        moved = queue_backoff.end_backoff(cursor, queue=queue)
        if moved is not None and not dry_run:
            text = "is no longer backing off: an operator ended the backoff"
            say = partial(
                signals.announce_queue, signals.backoff_ended, queue, text, level=0, until=None
            )
            transaction.on_commit(say, using=alias, robust=True)
    if moved is not None and not dry_run:
        wake(alias)
    return moved is not None


@contextmanager
def _deciding(queue: str, alias: str, *, dry_run: bool) -> Iterator[CursorWrapper]:
    """Yield a cursor for a decision about `queue`, and warn if its name may be misspelt."""
    with writing(alias, dry_run=dry_run) as cursor:
        warning = "" if dry_run else warning_if_unknown(cursor, queue)
        yield cursor
    if warning:
        extra = {"event": "unknown_queue", "queue": queue}
        after_commit(alias, lambda: logger.warning("%s", warning, extra=extra))
