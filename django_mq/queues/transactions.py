"""Short transactions with bounded lock waits, and the wakeup after commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import ProgrammingError, connections, transaction
from django.db.backends.utils import CursorWrapper

from django_mq.outbox import notify
from django_mq.outbox.blocks import in_own_atomic
from django_mq.policy.missing_right import name_roles
from django_mq.store.limits import READ_COMMITTED, Limits, apply, limit_waits, restore_waits
from django_mq.store.readers import ONE_SNAPSHOT


@contextmanager
def reading(
    alias: str, *, limits: Limits | None = None, one_snapshot: bool = False
) -> Iterator[CursorWrapper]:
    """Yield a cursor whose locks and settings end with the block, which is rolled back.

    A rollback needs no WAL flush for rows that were only locked. `limits` apply to statements,
    which then run without JIT. With `one_snapshot` all statements see the same rows, unless the
    block is part of the caller's transaction.
    """
    own = connections[alias].get_autocommit()
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        if one_snapshot and own:
            cursor.execute(ONE_SNAPSHOT)
        if limits is not None:
            apply(cursor, limits)
        yield cursor
        transaction.set_rollback(True, using=alias)


@contextmanager
def limited_throughout(alias: str, settings: str) -> Iterator[None]:
    """Run `settings`, statements of `set local`, at the start of each transaction of the block.

    A statement outside a transaction gets one of its own. Call this outside a transaction. A
    function under `@transaction.atomic` reuses its block, so the second of two calls in a row would
    not run `settings` again.
    """
    connection = connections[alias]
    latest: Any = None

    def bounded(execute: Callable[..., Any], *statement: Any) -> Any:
        nonlocal latest
        if not connection.in_atomic_block:
            with transaction.atomic(using=alias):
                return bounded(execute, *statement)
        if latest is not (outermost := connection.atomic_blocks[0]):
            latest = outermost
            # By the driver: the block may still set its isolation level, and a wrapper of another
            # package might put a query before these statements.
            with connection.wrap_database_errors, connection.connection.cursor() as cursor:
                cursor.execute(settings)
        return execute(*statement)

    with connection.execute_wrapper(bounded):
        yield


def wake(alias: str) -> None:
    """Wake the workers after the commit."""
    notify.ring_after_commit(connections[alias])


def after_commit(alias: str, log: Callable[[], None]) -> None:
    """Log a change once the caller's `atomic()` block is committed; at once outside of one.

    After a rollback it is not logged. A TestCase's block does not count: it never commits.
    """
    connection = connections[alias]
    if in_own_atomic(connection):
        connection.on_commit(log, robust=True)
    else:
        log()


@contextmanager
def writing(
    alias: str, *, dry_run: bool = False, role: str = "mq_operator"
) -> Iterator[CursorWrapper]:
    """Yield a cursor in `atomic()` that waits at most a second for any lock.

    A transaction of its own is READ COMMITTED, whatever the project's isolation level, so that it
    sees concurrent commits. In the caller's transaction, the caller's lock timeout is restored.
    `dry_run` rolls everything back. If the login lacks a right, a note of the error names `role`.
    """
    connection = connections[alias]
    own = connection.get_autocommit()
    try:
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            if own:
                cursor.execute(READ_COMMITTED)
            before = limit_waits(cursor)
            yield cursor
            if dry_run:
                transaction.set_rollback(True, using=alias)
            elif not own:
                restore_waits(cursor, before)
    except ProgrammingError as error:
        name_roles(error, role)
        raise
