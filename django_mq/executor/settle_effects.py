"""The effects of settling on other rows, in the transaction that settles.

They store the reply, unblock the next message of the key, and make the unique id free or quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter

import psycopg

from django_mq.conf.error_logs import log_failure
from django_mq.executor.ended import ACKED, Ended, Settled
from django_mq.executor.replies import EncodedResults
from django_mq.messages import ClaimedRow
from django_mq.policy.outcomes import DeadLettered
from django_mq.store import Cursor, free_unique_ids, kept_results, keys, results
from django_mq.store.free_unique_ids import EndedMessage
from django_mq.store.kept_results import KeptResult
from django_mq.store.results import Reply
from django_mq.store.server_errors import LOST
from django_mq.store.unique_ids import UniqueId

logger = logging.getLogger("django_mq")

# The end of an ordered row changes no other row, but must not be settled by `ack_alone()`: after a
# lost connection, the transaction's id tells whether it was committed.
_effect_fields = attrgetter("key", "unique_id", "wants_result", "ordered")
_NO_EFFECTS = (None, None, False, False)


def needing_transaction(ended: Sequence[Ended]) -> list[Ended]:
    """Return the deliveries whose end needs a transaction; most change only their own row.

    Those that `finish()` acked need none any more: it has written their effects.
    """
    return [
        each
        for each in ended
        if _effect_fields(each.delivery._row) != _NO_EFFECTS
        and each.settled is not Settled.FINISHED
    ]


def write(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Write the effects of deliveries whose rows were just settled, in the same transaction.

    `finish()` calls this, too, for the delivery that it acks.
    """
    for effect in EFFECTS.values():
        effect(cursor, ended)


def write_skipping_refused(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Write the effects of settled messages, and skip those that the database refuses.

    A trigger or a changed table may refuse an effect of one message, and would do so every time:
    that effect is logged and skipped. The chores find messages that wait behind the message or were
    put aside. Raises the errors of a lost database.
    """
    more = needing_transaction(ended)
    if not more:
        return
    try:
        _write_or_nothing(cursor, write, more)
        return
    except LOST:
        raise
    except psycopg.Error:
        logger.debug(
            "the database refused effects of settled messages: trying one by one",
            exc_info=True,
        )
    for each in more:
        for what, effect in EFFECTS.items():
            try:
                _write_or_nothing(cursor, effect, [each])
            except LOST:
                raise
            except psycopg.Error as error:
                log_failure(
                    "settle_refused",
                    error,
                    f"message %s (queue %s) is settled, but the database refused to {what}",
                    each.delivery.id,
                    each.delivery.queue,
                    message_id=each.delivery.id,
                    queue=each.delivery.queue,
                )


def _write_or_nothing(
    cursor: Cursor, effect: Callable[[Cursor, Sequence[Ended]], None], ended: Sequence[Ended]
) -> None:
    with cursor.connection.transaction():
        effect(cursor, ended)


def _store_replies(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Store the requested replies: the value, or the error of the last attempt."""
    replies: list[Reply] = []
    kept: list[KeptResult] = []
    for each in ended:
        row = each.delivery._row
        if not row.wants_result or (reply := _reply_of(each)) is None:
            continue
        if row.is_django_task:
            seconds = each.seconds if each.settled is ACKED else None
            kept.append(KeptResult(reply, row, seconds))
        else:
            replies.append(reply)
    if replies:
        results.store(cursor, replies)
    if kept:
        kept_results.keep(cursor, kept)


def _reply_of(ended: Ended) -> Reply | None:
    """Return the reply; None if the message runs again."""
    delivery, outcome = ended.delivery, ended.outcome
    if isinstance(outcome, DeadLettered):
        failure = outcome.failure
        return Reply(delivery.id, delivery.handler, None, failure.error_class, failure.text)
    if ended.settled is Settled.DEAD_UNSTARTED:
        return Reply(delivery.id, delivery.handler, None, results.UNANSWERED, ended.reason)
    if isinstance(ended.result, EncodedResults):
        return Reply(delivery.id, delivery.handler, ended.result[delivery.id])
    return None


def _free_lines(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Unblock the messages that wait in their keys behind messages that are over."""
    rows = [each.delivery._row for each in ended if each.is_over]
    keys.free_next(
        cursor,
        [
            keys.KeyLine(row.queue, row.handler, row.key, row.id)
            for row in rows
            if row.key is not None
        ],
    )


def _free_unique_ids(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Free the unique ids of messages that are over."""
    done = [
        _ended_message(each.delivery._row, success=each.settled is ACKED)
        for each in ended
        if each.delivery._row.unique_id is not None and each.is_over
    ]
    if done:
        free_unique_ids.end(cursor, done)


#: The steps of `write()`, in order, by their names in log lines.
EFFECTS: dict[str, Callable[[Cursor, Sequence[Ended]], None]] = {
    "store its reply": _store_replies,
    "free the next message of its key": _free_lines,
    "free its unique id": _free_unique_ids,
}


def _ended_message(row: ClaimedRow, *, success: bool) -> EndedMessage:
    id = UniqueId(row.queue, row.handler, row.type, row.unique_id or "")
    return EndedMessage(row.id, id, success)
