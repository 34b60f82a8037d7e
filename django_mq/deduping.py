"""Messages with unique ids: look, decide, write, and look again if something else came first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import NamedTuple

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from django_mq.drafting import Call, Draft, Wanted, named
from django_mq.exceptions import BroadcastBusy
from django_mq.messages import CopyReceipt
from django_mq.store import freeing, operate, unique
from django_mq.store.insert import draw
from django_mq.store.rows import NewRow
from django_mq.store.unique import Seen, Unique, UniqueId

logger = logging.getLogger("django_mq")

#: Seconds that a broadcast waits in all for transactions that hold its unique ids.
PATIENCE = 3.0
#: Milliseconds that one statement waits, below the server's deadlock_timeout: then everything is
#: let go and tried again, so that broadcasts that wait for each other do not end as a deadlock.
ONE_WAIT = 200
#: Seconds before the next look.
PAUSE = 0.01
#: Milliseconds that what was put aside waits, after its commit, for whoever ends the message.
LAST_WAIT = 1000
#: Characters of JSON in one statement.
MOST = 4 * 1024 * 1024
LOCK_NOT_AVAILABLE, DEADLOCK = "55P03", "40P01"


class Stored(NamedTuple):
    """What became of each row that was wanted, and the rows that a worker may take soon."""

    copies: list[CopyReceipt]
    rows: list[NewRow]


class _Changed(Exception):
    """Something is no longer as it was seen."""


def store(
    connection: BaseDatabaseWrapper,
    wanted: Sequence[Wanted],
    admit: Callable[[list[NewRow]], None],
) -> Stored:
    """Store what is new, and do to what is there what `on_duplicate` says: all or nothing.

    `admit` may refuse the rows that would be added. Raises DuplicateMessage, and BroadcastBusy
    when a transaction that holds one of the ids stays open for 3 s; the caller's stays usable.
    """
    call = Call(wanted)
    deadline = monotonic() + PATIENCE
    while True:
        try:
            return _attempt(connection, call, admit)
        except _Changed:
            pass
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) not in (LOCK_NOT_AVAILABLE, DEADLOCK):
                raise
        if monotonic() >= deadline:
            raise BroadcastBusy(
                f"{named(call.ids)}: a transaction that writes it is still open after"
                f" {PATIENCE:g} s. Try again later, and broadcast near the end of a transaction"
            )
        sleep(PAUSE)


def _attempt(
    connection: BaseDatabaseWrapper, call: Call, admit: Callable[[list[NewRow]], None]
) -> Stored:
    """Look, decide and write. Raises _Changed when somebody else came first.

    Then all of it is rolled back: no id is held while another one is waited for.
    """
    with connection.cursor() as cursor:
        seen = _look(cursor, call)
    left = _left_aside(seen)
    if not left:
        return _write(connection, call, seen, admit)
    with _writing(connection) as cursor:
        freeing.come_forward(cursor, left)
        seen = _look(cursor, call)
        if _left_aside(seen):
            raise _Changed
        return _write(connection, call, seen, admit)


def _look(cursor: CursorWrapper, call: Call) -> dict[UniqueId, Seen]:
    return dict(zip(call.ids, unique.look(cursor, call.ids), strict=True))


def _left_aside(seen: Mapping[UniqueId, Seen]) -> list[UniqueId]:
    """Return the ids that nothing alive has, though something is put aside for them."""
    return [id for id, each in seen.items() if each.aside and not each.alive]


@contextmanager
def _writing(connection: BaseDatabaseWrapper) -> Iterator[CursorWrapper]:
    """Yield a cursor behind a savepoint, where no lock is waited for longer than ONE_WAIT."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        before = operate.limit_waits(cursor, most=ONE_WAIT)
        yield cursor
        operate.restore_waits(cursor, before)


def _write(
    connection: BaseDatabaseWrapper,
    call: Call,
    seen: Mapping[UniqueId, Seen],
    admit: Callable[[list[NewRow]], None],
) -> Stored:
    draft = call.draft(seen)
    ids: dict[int, int] = {}
    if draft:
        with _writing(connection) as cursor:
            ids = _add(cursor, draft, admit)
            _replace(cursor, draft)
            _put_aside(connection, cursor, draft)
    soon = [each.row for _, each in draft.adding]
    soon += [each.row for each, sets_due in draft.replacing if sets_due]
    return Stored(call.copies(draft, ids), soon)


def _add(
    cursor: CursorWrapper, draft: Draft, admit: Callable[[list[NewRow]], None]
) -> dict[int, int]:
    """Insert the rows; return their ids by place, which rise with it."""
    if not draft.adding:
        return {}
    admit([each.row for _, each in draft.adding])
    _, drawn = draw(cursor, len(draft.adding))
    rows = [each._replace(id=id) for (_, each), id in zip(draft.adding, drawn, strict=True)]
    for chunk in _chunks(sorted(rows, key=_in_order)):
        if len(unique.add(cursor, chunk)) < len(chunk):
            raise _Changed
    return {place: id for (place, _), id in zip(draft.adding, drawn, strict=True)}


def _replace(cursor: CursorWrapper, draft: Draft) -> None:
    if not draft.replacing:
        return
    replaced = unique.replace(cursor, draft.replacing)
    if len(replaced) < len(draft.replacing):
        raise _Changed
    left = [
        operate.Gone(each.id, each.queue, each.handler, each.left_key, "", None)
        for each in replaced
        if each.left_key is not None
    ]
    operate.free_followers(cursor, left)


def _put_aside(connection: BaseDatabaseWrapper, cursor: CursorWrapper, draft: Draft) -> None:
    if draft.aside:
        unique.put_aside(cursor, draft.aside)
        _bring_forward_after_commit(
            connection.alias, [UniqueId(*_in_order(r)) for r in draft.aside]
        )


def _bring_forward_after_commit(alias: str, ids: list[UniqueId]) -> None:
    """Look once more after the commit: the message may have ended without seeing what is aside.

    Nothing depends on it: the workers' chores look, too, and so does the next broadcast.
    """

    def bring_forward() -> None:
        try:
            with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
                operate.limit_waits(cursor, most=LAST_WAIT)
                freeing.lock(cursor, ids)
                freeing.come_forward(cursor, ids)
        except Exception:
            logger.debug("what was put aside is left to the chores", exc_info=True)

    transaction.on_commit(bring_forward, using=alias, robust=True)


def _in_order(each: Unique) -> tuple[str, str, str, str]:
    return each.row.queue, each.row.handler, each.row.type, each.unique_id or ""


def _chunks(rows: list[Unique]) -> Iterator[list[Unique]]:
    chunk: list[Unique] = []
    size = 0
    for each in rows:
        chunk.append(each)
        size += len(each.row.payload) + len(each.row.metadata)
        if size >= MOST:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
