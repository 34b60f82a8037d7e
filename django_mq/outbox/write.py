"""Write rows in the caller's transaction: check the backlog, keep commit order, ring workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.errors import DeadlockDetected, LockNotAvailable, QueryCanceled

from django_mq.exceptions import BroadcastBusy
from django_mq.outbox import deduplicate, notify
from django_mq.outbox.backlog import admit
from django_mq.outbox.dedupe_plan import Candidate
from django_mq.store.backlog import join_lines
from django_mq.store.insert import MAX_INSERT_ROWS, ignore_ids, insert
from django_mq.store.rows import NewRow, Rows

if TYPE_CHECKING:
    from django_mq.conf import QueueOptions, Settings

#: Waits that a timeout of the caller's session, or a deadlock, has ended.
_REFUSED_WAITS = LockNotAvailable | QueryCanceled | DeadlockDetected


class CallQueues:
    """The queues of one call's rows that have a `max_backlog` or are in commit order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: Their `max_backlog`, by name.
        self.max_backlogs: dict[str, int] = {}
        #: Queues with `key_order="commit"`, by name: whether the queue is ordered, so that all its
        #: rows share one line.
        self.in_commit_order: dict[str, bool] = {}

    def add(self, queue: str) -> QueueOptions:
        """Add the queue of a row; return the options of the queue."""
        options = self.settings.queue(queue)
        if options.max_backlog is not None:
            self.max_backlogs[queue] = options.max_backlog
        if options.key_order is not None:
            self.in_commit_order[queue] = options.ordered
        return options


class RowWriter:
    """Writes the rows of one call, observing the options of their `queues`."""

    def __init__(
        self, connection: BaseDatabaseWrapper, queues: CallQueues, *, has_savepoint: bool = False
    ) -> None:
        self.connection = connection
        self._settings = queues.settings
        self._max_backlogs = queues.max_backlogs
        self._in_commit_order = queues.in_commit_order
        self._has_savepoint = has_savepoint

    def insert(self, rows: Rows, *, on_ids: Callable[[Sequence[int]], None] = ignore_ids) -> None:
        """Insert rows without unique ids, all or none.

        `on_ids` is called with the ids; with many rows, in several parts as they become known.
        """
        if not rows:
            return
        # A single statement is atomic and needs no savepoint: the rows were checked, so the server
        # does not refuse them.
        if self._has_savepoint or (len(rows) <= MAX_INSERT_ROWS and not self._needs_block()):
            self._insert(rows, on_ids)
        else:
            with transaction.atomic(using=self.connection.alias):
                self._insert(rows, on_ids)

    def _insert(self, rows: Rows, on_ids: Callable[[Sequence[int]], None]) -> None:
        if self._max_backlogs:
            admit(self.connection, self._max_backlogs, rows.templates)
        if self._in_commit_order:
            self._join_lines(rows.templates)
        # Django's cursor does not wrap the errors of COPY.
        with self.connection.wrap_database_errors, self.connection.cursor() as cursor:
            insert(cursor, rows, on_ids=on_ids)
        self._ring(rows.templates)

    def dedupe(self, candidates: Sequence[Candidate]) -> deduplicate.StoreResult:
        """Store rows, some with unique ids, all or none; return the outcome of each."""
        block = transaction.atomic(using=self.connection.alias)
        with block if self._needs_block() else nullcontext():
            if self._in_commit_order:
                self._join_lines([each.row for each in candidates])
            stored = deduplicate.store(
                self.connection, candidates, partial(admit, self.connection, self._max_backlogs)
            )
            self._ring(stored.rows)
            notify.ring_for_next(self.connection, self._settings, stored.left_keys)
        return stored

    def _needs_block(self) -> bool:
        """Return whether rows join a line outside a transaction (REQUIRE_ATOMIC is off)."""
        return bool(self._in_commit_order) and not self.connection.in_atomic_block

    def _join_lines(self, rows: Sequence[NewRow]) -> None:
        """Lock the lines whose ids must rise in commit order, before any id is drawn."""
        names: set[str] = set()
        for row in rows:
            whole_queue = self._in_commit_order.get(row.queue)
            if whole_queue:
                names.add(row.queue)
            elif whole_queue is not None and row.key is not None:
                names.add(f"{row.queue} {row.handler} {row.key}")  # only keys have spaces
        if names:
            self._lock(names)

    def _lock(self, names: set[str]) -> None:
        """Lock lines in a savepoint: a refused wait leaves the caller's transaction usable."""
        try:
            with (
                transaction.atomic(using=self.connection.alias),
                self.connection.cursor() as cursor,
            ):
                join_lines(cursor, names)
        except DatabaseError as error:
            if not isinstance(error.__cause__, _REFUSED_WAITS):
                raise
            raise BroadcastBusy(
                "another transaction that broadcast to the same key or ordered queue is still"
                f" open ({str(error).splitlines()[0]}). Try again, and commit soon after"
                " broadcast()"
            ) from error

    def _ring(self, rows: Sequence[NewRow]) -> None:
        # Workers look at least once per poll interval, so rows that are due after that need no
        # ring. Only the database knows how far away an absolute moment is: such a row has delay 0.
        for row in rows:
            if row.delay <= self._settings.poll_interval:
                notify.ring_after_commit(self.connection)
                return
