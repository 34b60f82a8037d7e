"""The chore that dead-letters expired messages, and unblocks the next messages of their lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from django_mq.conf import Settings
from django_mq.conf.error_logs import error_name, log_failure
from django_mq.executor import reports, settle_effects
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.statements import within_transaction
from django_mq.messages import ClaimedRow, Delivery
from django_mq.store import Cursor, expiry, notify
from django_mq.store.conditions import BEGINNING
from django_mq.store.server_errors import LOST

logger = logging.getLogger("django_mq")

#: Messages that expire in one piece: few, since their payloads are read for the signals.
PIECE_MESSAGES = 50
#: Rows that one walk over expired messages examines, including those in flight, which it skips.
WALKED_ROWS = 1000


def expire(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Dead-letter messages that expired after `at`; return where the next piece starts."""
    after, walked = at or BEGINNING, WALKED_ROWS
    try:
        if len(expire_few(cursor, after)) == PIECE_MESSAGES and (
            found := expiry.next_expired(cursor, after=after, window=walked)
        ):
            return found
    except psycopg.errors.LockNotAvailable:
        walked = PIECE_MESSAGES  # another session holds the unique id of a message: skip these
    except LOST:
        raise
    except psycopg.Error as error:
        log_failure("chore_failed", error, "the database refuses to let a message expire")
        return _expire_singly(cursor, after)
    return expiry.expiry_walked(cursor, after=after, window=walked)


def _expire_singly(cursor: Cursor, after: str) -> str | None:
    """Dead-letter a few messages, one by one; pass over those that the database refuses."""
    ids = expiry.expired(cursor, after=after, window=PIECE_MESSAGES)
    for id in ids:
        try:
            _dead_letter(cursor, partial(expiry.expire_one, cursor, id))
        except LOST:
            raise
        except psycopg.Error as error:
            logger.debug("message %s cannot expire: %s", id, error_name(error))
    return expiry.expiry_walked(cursor, after=after, window=PIECE_MESSAGES)


def expire_few(cursor: Cursor, after: str = BEGINNING) -> list[Ended]:
    """Dead-letter a few messages that expired after `after`; return how they ended."""
    few = partial(expiry.expire, cursor, limit=PIECE_MESSAGES, after=after, window=WALKED_ROWS)
    return _dead_letter(cursor, few)


def _dead_letter(cursor: Cursor, expire: Callable[[], list[ClaimedRow]]) -> list[Ended]:
    with within_transaction(cursor):
        ended = [Ended(Delivery(row), Settled.DEAD_UNSTARTED, reason="expired") for row in expire()]
        settle_effects.write_skipping_refused(cursor, ended)
    reports.all_ended(ended)
    if any(each.delivery._row.ordered or each.delivery._row.key is not None for each in ended):
        notify.ring_if_room(cursor)  # the thread that claims is another one
    return ended
