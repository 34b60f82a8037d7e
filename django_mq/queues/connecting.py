"""Which database, transactions that hold and wait for little, and a ring after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from django_mq import bell
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage
from django_mq.store import operate


def alias_of(using: str | None) -> str:
    """Return `using`, else the alias of the settings, else what the router says."""
    return using or get_settings().database or router.db_for_write(QueuedMessage)


@contextmanager
def reading(alias: str) -> Iterator[CursorWrapper]:
    """Yield a cursor whose locks and settings end with the block: it is rolled back.

    Nothing is written to the log for a row that was only locked, and nothing is waited for.
    """
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        yield cursor
        transaction.set_rollback(True, using=alias)


def wake(alias: str) -> None:
    """Ring for the workers when what was changed here commits, unless they only poll."""
    if get_settings().wakeup != "poll":
        bell.ring_after_commit(connections[alias])


@contextmanager
def writing(alias: str, *, dry_run: bool = False) -> Iterator[CursorWrapper]:
    """Yield a cursor in `atomic()`, where no lock is waited for longer than a second.

    In a transaction of its own it sees what others committed meanwhile, at whatever isolation
    level the project has. In the caller's, the caller's limit is put back. `dry_run` takes back
    what was done.
    """
    connection = connections[alias]
    own = _own_transaction(connection)
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        if own:
            cursor.execute(operate.READ_COMMITTED)
        before = operate.limit_waits(cursor)
        yield cursor
        if dry_run:
            transaction.set_rollback(True, using=alias)
        elif not own:
            operate.restore_waits(cursor, before)


def _own_transaction(connection: BaseDatabaseWrapper) -> bool:
    return connection.get_autocommit() and not connection.in_atomic_block
