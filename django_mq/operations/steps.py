"""One step of an operation: up to 1,000 messages in one transaction; and the operation's end."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from django.db import DatabaseError, connections, transaction
from django.db.backends.utils import CursorWrapper

from django_mq.operations.changes import CHANGES, Done
from django_mq.operations.heads import dead_heads
from django_mq.operations.log_entries import log_end
from django_mq.policy.message_filter import MessageFilter
from django_mq.policy.plain_text import one_line
from django_mq.store import message_filters as filters
from django_mq.store import operations
from django_mq.store.operations import OperationRow, Progress

logger = logging.getLogger("django_mq")

#: Messages per transaction, which keeps their locks short.
CHUNK = 1000


class OperationStep(NamedTuple):
    """The number of `changed` messages. The caller rings the workers if one may now run."""

    changed: int
    may_run: bool


class StepRefused(Exception):
    """The database refused a step of the operation `id`; its transaction is no longer usable."""

    def __init__(self, id: int, error: DatabaseError) -> None:
        super().__init__(id)
        self.id = id
        self.error = error


def take_step(cursor: CursorWrapper) -> OperationStep | None:
    """Carry out a step of the oldest operation that no other worker has; None if there is none.

    The step runs in the caller's transaction. Each message is acted on at most once: the next step
    begins behind the last id of this one. An operation whose action this version does not know is
    left to newer workers. Raises StepRefused from a database error.
    """
    row = operations.take(cursor, CHANGES)
    if row is None:
        return None
    try:
        wanted = MessageFilter.from_json(json.loads(row.filter))
    except Exception as error:  # otherwise this operation, the oldest, would block all the others
        end(cursor, row, "failed", error=f"its filter cannot be read: {error}")
        return OperationStep(0, may_run=False)
    try:
        found = filters.page(
            cursor, wanted, action=row.action, after=row.after_id, last=row.last_id, limit=CHUNK
        )
        ids = dead_heads(cursor, found.ids, row.id) if wanted.heads else found.ids
        done = CHANGES[row.action](cursor, ids) if ids else Done([], may_run=False)
    except DatabaseError as error:
        raise StepRefused(row.id, error) from error
    changed = len(done.ids)
    skipped = len(ids) - changed
    if found.after is None:
        end(cursor, row, "done", done=changed, skipped=skipped)
    else:
        operations.advance(cursor, row.id, after=found.after, done=changed, skipped=skipped)
    return OperationStep(changed, done.may_run)


def carry_out_all(alias: str) -> bool:
    """Carry out all open operations now, for tests; return whether that may have made one due."""
    may_run = False
    step: OperationStep | None = OperationStep(0, may_run=False)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        while step is not None:
            may_run |= step.may_run
            try:
                with transaction.atomic(using=alias):
                    step = take_step(cursor)
            except StepRefused as refused:
                fail_step(cursor, refused.id, refused.error)
    return may_run


def fail_step(cursor: CursorWrapper, id: int, error: DatabaseError) -> None:
    """End an operation whose step the database refused, unless another worker has it."""
    if row := operations.take(cursor, CHANGES, id=id):
        text = f"{type(error).__name__}: {error}".splitlines()[0]  # the other lines quote rows
        end(cursor, row, "failed", error=text)


def end(
    cursor: CursorWrapper,
    row: OperationRow,
    state: str,
    *,
    done: int = 0,
    skipped: int = 0,
    error: str = "",
) -> None:
    """End a locked operation and log it, here and in the admin's log for the requesting user."""
    progress = operations.advance(
        cursor,
        row.id,
        after=row.last_id if state == "done" else row.after_id,
        done=done,
        skipped=skipped,
        state=state,
        error=one_line(error),
    )
    text = f"{row.action.replace('_', ' ').capitalize()}: {_ending(progress)}"
    log_end(row.id, row.action, row.user_id, text, cursor.db.alias)
    report_end(row.id, progress)


def report_end(id: int, progress: Progress) -> None:
    """Write the end of an operation to the log."""
    logger.log(
        logging.WARNING if progress.state == "failed" else logging.INFO,
        "operation %d: %s on all messages that matched: %s",
        id,
        progress.action,
        _ending(progress),
        extra={"event": "operation_ended", "operation": id, **progress._asdict()},
    )


def _ending(progress: Progress) -> str:
    return f"{progress.state}, {progress.done:,} changed, {progress.skipped:,} skipped"
