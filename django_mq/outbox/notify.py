"""Ring the workers after the commit of a transaction that made messages due.

A transaction rings once, and a process at most once per RING_INTERVAL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from time import monotonic

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.conf import Settings
from django_mq.outbox.blocks import commits_by_hand
from django_mq.store import notify
from django_mq.store.message_changes import Removed

logger = logging.getLogger("django_mq")

#: Seconds between two rings. A worker looks again 25 ms after a ring, so it also finds the rows
#: whose rings are skipped here.
RING_INTERVAL = 0.02

# When this process last began to ring, by alias. No lock: two rings at once do no harm. A forked
# child may keep it: the clock is the machine's, and the parent rings in any case.
_last: dict[str, float] = {}


def ring_after_commit(connection: BaseDatabaseWrapper) -> None:
    """Ring when the open transaction commits; at once if there is none.

    No error reaches the caller: a lost ring costs at most a poll interval.
    """
    if commits_by_hand(connection):
        return  # the poll finds the rows
    ring = _ringer(connection.alias)
    # Once per transaction: a rollback that drops the hook also drops these messages. Comparing only
    # with the last hook keeps this cheap in a transaction with thousands of hooks.
    if connection.run_on_commit and connection.run_on_commit[-1][1] is ring:
        return
    if notify.is_enabled():
        connection.on_commit(ring, robust=True)


def ring_for_next(
    connection: BaseDatabaseWrapper, settings: Settings, removed: Iterable[Removed]
) -> None:
    """Ring like `ring_after_commit()` if any of `removed` left a line: its next may run now."""
    if any(settings.in_line(row.queue, row.key) for row in removed):
        ring_after_commit(connection)


@cache
def _ringer(alias: str) -> Callable[[], None]:
    def ring() -> None:
        now = monotonic()
        if now - _last.get(alias, -RING_INTERVAL) < RING_INTERVAL:
            return
        _last[alias] = now
        try:
            with connections[alias].cursor() as cursor:
                notify.ring(cursor)
        except Exception:
            _last.pop(alias, None)
            logger.debug(
                "could not send NOTIFY in database %s; the next poll finds the messages",
                alias,
                exc_info=True,
            )

    return ring
