"""Rings the doorbell when a transaction that stored messages commits: once, and not too often."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from time import monotonic

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.preparing import fetch_prepared, own_cursor
from django_mq.store import doorbell

logger = logging.getLogger("django_mq")

#: Seconds. A worker looks again 25 ms after a ring, so it sees what rings left out here announced.
PAUSE = 0.02

# By alias, when this process last began to ring. No lock: two rings at once do no harm. A forked
# child inherits it rightly: the clock is the machine's, and the parent's ring is on its way.
_last: dict[str, float] = {}


def ring_after_commit(connection: BaseDatabaseWrapper) -> None:
    """Ring when the open transaction commits; at once if there is none.

    Nothing depends on it, so no error reaches the caller.
    """
    if not connection.in_atomic_block and not connection.get_autocommit():
        return  # the caller commits by hand, and Django knows no hooks then: the poll finds it
    ring = _ringer(connection.alias)
    # Once a transaction: a rollback that drops that hook takes these messages along. Looking at
    # the last one alone keeps it cheap where a transaction has thousands of hooks of its own.
    if connection.run_on_commit and connection.run_on_commit[-1][1] is ring:
        return
    connection.on_commit(ring, robust=True)


@cache
def _ringer(alias: str) -> Callable[[], None]:
    def ring() -> None:
        now = monotonic()
        if now - _last.get(alias, -PAUSE) < PAUSE:
            return
        _last[alias] = now
        try:
            connection = connections[alias]
            # Prepared, since a worker that sleeps waits for it: on a connection that was idle for
            # 50 ms it is heard after 0.33 ms, and after 0.51 by a cursor.
            with connection.wrap_database_errors:
                rang = fetch_prepared(connection, doorbell.RING, ()) is not None
            if not rang:
                with own_cursor(connection) as cursor:
                    doorbell.ring(cursor)
        except Exception:
            _last.pop(alias, None)
            logger.debug(
                "the doorbell of %s did not ring; the next poll finds it", alias, exc_info=True
            )

    return ring
