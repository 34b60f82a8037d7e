"""Store messages with unique ids: look, decide, write; repeat if another session was faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import uniform
from time import monotonic, sleep
from typing import NamedTuple

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from psycopg.errors import DeadlockDetected, LockNotAvailable

from django_mq.exceptions import BroadcastBusy
from django_mq.messages import CopyReceipt
from django_mq.outbox.dedupe_plan import Candidate, DedupeCall, PlannedWrites, ids_text
from django_mq.store import (
    change_waiting,
    limits,
    message_changes,
    promotion,
    put_aside,
    unique_ids,
)
from django_mq.store.insert import draw
from django_mq.store.rows import NewRow
from django_mq.store.unique_ids import StoredUniqueId, UniqueId, UniqueRow

logger = logging.getLogger("django_mq")

#: Seconds, in total, that a broadcast waits for transactions that hold its unique ids.
MAX_WAIT_SECONDS = 3.0
#: The most seconds added at random to MAX_WAIT_SECONDS, so that of two transactions that wait for
#: each other mostly only one gives up.
SPREAD_SECONDS = 1.0
#: Milliseconds that one statement waits, less than the server's deadlock_timeout. After that, all
#: locks are released and the call tries again, so broadcasts that wait for each other do not
#: deadlock.
STATEMENT_WAIT_MS = 200
#: Seconds between two attempts.
RETRY_PAUSE = 0.01
#: Milliseconds that `promote_put_aside()` waits for a session that is ending the message.
PROMOTE_WAIT_MS = 1000
#: Characters of JSON per statement.
MAX_SIZE = 4 * 1024 * 1024


class StoreResult(NamedTuple):
    """The outcome of each candidate, the rows that are due soon, and the rows that left a key.

    `stored_at` is the `created_at` of the last new row, in seconds since 1970; None without any.
    """

    copies: list[CopyReceipt]
    rows: list[NewRow]
    left_keys: list[message_changes.Removed]
    stored_at: float | None


class _ChangedMeanwhile(Exception):
    """Another session changed one of the ids after this one looked."""


def store(
    connection: BaseDatabaseWrapper,
    candidates: Sequence[Candidate],
    admit: Callable[[list[NewRow]], None],
) -> StoreResult:
    """Store new messages, and treat duplicates as their `on_duplicate` says: all or none.

    `admit` may refuse the rows that would be added. Raises DuplicateMessage, and also BroadcastBusy
    if a transaction that holds one of the ids stays open for 3 to 4 s; the caller's transaction
    stays usable.
    """
    call = DedupeCall(candidates)
    seconds = MAX_WAIT_SECONDS + uniform(0.0, SPREAD_SECONDS)  # noqa: S311  # no secret
    deadline = monotonic() + seconds
    while True:
        try:
            return _try_to_store(connection, call, admit)
        except _ChangedMeanwhile:
            pass
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable | DeadlockDetected):
                raise
        if monotonic() >= deadline:
            raise BroadcastBusy(
                f"{ids_text(call.ids)} is locked by another transaction, which is still open after"
                f" {seconds:.1f} s. Try again later, and broadcast near the end of a"
                " transaction"
            )
        sleep(RETRY_PAUSE)


def _try_to_store(
    connection: BaseDatabaseWrapper, call: DedupeCall, admit: Callable[[list[NewRow]], None]
) -> StoreResult:
    """Look, decide and write. Raises _ChangedMeanwhile if another session was faster.

    The writes are then rolled back to their savepoint, so that no id stays locked until the next
    attempt.
    """
    with connection.cursor() as cursor:
        seen = _read_states(cursor, call)
    left = _free_put_aside(seen)
    if not left:
        return _write(connection, call, seen, admit)
    with _writing(connection) as cursor:
        promotion.promote_put_aside(cursor, left)
        seen = _read_states(cursor, call)
        if _free_put_aside(seen):
            raise _ChangedMeanwhile
        return _write(connection, call, seen, admit)


def _read_states(cursor: CursorWrapper, call: DedupeCall) -> dict[UniqueId, StoredUniqueId]:
    return dict(zip(call.ids, unique_ids.read_states(cursor, call.ids), strict=True))


def _free_put_aside(seen: Mapping[UniqueId, StoredUniqueId]) -> list[UniqueId]:
    """Return the ids without a live message for which a row is put aside."""
    return [id for id, each in seen.items() if each.aside and not each.alive]


@contextmanager
def _writing(connection: BaseDatabaseWrapper) -> Iterator[CursorWrapper]:
    """Yield a cursor in a savepoint where statements wait at most STATEMENT_WAIT_MS for a lock."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        before = limits.limit_waits(cursor, most_ms=STATEMENT_WAIT_MS)
        yield cursor
        limits.restore_waits(cursor, before)


def _write(
    connection: BaseDatabaseWrapper,
    call: DedupeCall,
    seen: Mapping[UniqueId, StoredUniqueId],
    admit: Callable[[list[NewRow]], None],
) -> StoreResult:
    writes = call.writes(seen)
    ids: dict[int, int] = {}
    stored_at = None
    left: list[message_changes.Removed] = []
    if writes:
        with _writing(connection) as cursor:
            ids, stored_at = _add(cursor, writes, admit)
            left = _replace(cursor, writes)
            _move(cursor, writes)
            _put_aside(connection, cursor, writes)
    soon = [each.row for _, each in writes.adding]
    soon += [each.row for each, sets_due in writes.replacing if sets_due]
    soon += [each.row for each in writes.moving]
    return StoreResult(call.copies(writes, ids), soon, left, stored_at)


def _add(
    cursor: CursorWrapper, writes: PlannedWrites, admit: Callable[[list[NewRow]], None]
) -> tuple[dict[int, int], float | None]:
    """Insert the rows; return their ids by index, and when the last was stored.

    Ids rise with the index.
    """
    if not writes.adding:
        return {}, None
    stored: dict[int, float] = {}
    admit([each.row for _, each in writes.adding])
    drawn = draw(cursor, len(writes.adding)).ids
    rows = [each._replace(id=id) for (_, each), id in zip(writes.adding, drawn, strict=True)]
    for chunk in _chunks(sorted(rows, key=_id_of)):
        stored = unique_ids.add(cursor, chunk)
        if len(stored) < len(chunk):
            raise _ChangedMeanwhile
    ids = {index: id for (index, _), id in zip(writes.adding, drawn, strict=True)}
    return ids, max(stored.values())


def _replace(cursor: CursorWrapper, writes: PlannedWrites) -> list[message_changes.Removed]:
    """Write new contents; return the rows that left a key, as if removed from its line."""
    if not writes.replacing:
        return []
    replaced = change_waiting.replace(cursor, writes.replacing)
    if len(replaced) < len(writes.replacing):
        raise _ChangedMeanwhile
    left = [
        message_changes.Removed(each.id, each.queue, each.handler, each.previous_key, "", None)
        for each in replaced
        if each.previous_key is not None
    ]
    message_changes.free_followers(cursor, left)
    return left


def _move(cursor: CursorWrapper, writes: PlannedWrites) -> None:
    """Write new due times of waiting rows."""
    if writes.moving and change_waiting.move(cursor, writes.moving) < len(writes.moving):
        raise _ChangedMeanwhile


def _put_aside(
    connection: BaseDatabaseWrapper, cursor: CursorWrapper, writes: PlannedWrites
) -> None:
    if writes.aside:
        put_aside.put_aside(cursor, writes.aside)
        _promote_after_commit(connection.alias, list(map(_id_of, writes.aside)))


def _promote_after_commit(alias: str, ids: list[UniqueId]) -> None:
    """Look again after the commit: the session that ended the message may not have seen the row.

    An optimisation: the workers' chores and the next broadcast also look. Broadcasts in a row share
    a hook: a rollback that drops it also drops their rows.
    """
    hooks = connections[alias].run_on_commit
    last = hooks[-1][1] if hooks else None
    if isinstance(last, _Promotion):
        last.ids.update(ids)
    else:
        transaction.on_commit(_Promotion(alias, ids), using=alias, robust=True)


class _Promotion:
    """The hook that stores messages which were put aside, if their unique ids are free."""

    def __init__(self, alias: str, ids: list[UniqueId]) -> None:
        self.ids = set(ids)
        self._alias = alias

    def __call__(self) -> None:
        connection = connections[self._alias]
        ids = sorted(self.ids)
        own = connection.get_autocommit()
        try:
            with transaction.atomic(using=self._alias), connection.cursor() as cursor:
                if own:  # after the lock, it sees what that session wrote
                    cursor.execute(limits.READ_COMMITTED)
                limits.limit_waits(cursor, most_ms=PROMOTE_WAIT_MS)
                promotion.lock(cursor, ids)
                promotion.promote_put_aside(cursor, ids)
        except Exception:
            logger.debug(
                "could not store messages that were put aside for a unique id; a worker will do so",
                exc_info=True,
            )


def _id_of(each: UniqueRow) -> UniqueId:
    return UniqueId(each.row.queue, each.row.handler, each.row.type, each.unique_id or "")


def _chunks(rows: list[UniqueRow]) -> Iterator[list[UniqueRow]]:
    chunk: list[UniqueRow] = []
    size = 0
    for each in rows:
        chunk.append(each)
        size += len(each.row.payload) + len(each.row.metadata)
        if size >= MAX_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
