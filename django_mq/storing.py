"""Rows into the caller's transaction: is there room, whose turn is it, what rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import bell, deduping
from django_mq.addressing import Addresser
from django_mq.backlog import admit
from django_mq.conf import Settings
from django_mq.drafting import Wanted
from django_mq.messages import CopyReceipt
from django_mq.preparing import fetch_prepared, own_cursor
from django_mq.store.backlog import lock_lines
from django_mq.store.insert import FEW, insert, nobody, one_statement
from django_mq.store.rows import NewRow


class Storer:
    """Stores the rows of one call; what their queues ask for was met by `addresser`."""

    def __init__(
        self, connection: BaseDatabaseWrapper, settings: Settings, addresser: Addresser
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._limits = addresser.limits
        self._in_commit_order = addresser.in_commit_order

    def insert(
        self, rows: Sequence[NewRow], *, sent: Callable[[Sequence[int]], None] = nobody
    ) -> list[int]:
        """Insert rows without unique ids, all or none; return their ids, in order.

        `sent` gets these ids, too: of many rows part by part, before all are there.
        """
        if len(rows) <= FEW and not self._needs_block():
            # One statement is all or none by itself, and nothing is left that it could refuse.
            return self.insert_chunk(rows, sent=sent)
        with transaction.atomic(using=self._connection.alias):
            return self.insert_chunk(rows, sent=sent)

    def insert_chunk(
        self, rows: Sequence[NewRow], *, sent: Callable[[Sequence[int]], None] = nobody
    ) -> list[int]:
        """Insert rows as `insert()` does; the caller sees to all or none."""
        if not rows:
            return []
        if self._limits:
            admit(self._connection, self._limits, rows)
        if self._in_commit_order:
            self._join_lines(rows)
        with self._connection.wrap_database_errors:
            ids = self._insert(rows, sent)
        self._ring(rows)
        return ids

    def _insert(self, rows: Sequence[NewRow], sent: Callable[[Sequence[int]], None]) -> list[int]:
        if len(rows) <= FEW:
            found = fetch_prepared(self._connection, *one_statement(rows))
            if found is not None:
                ids = sorted(map(int, found))
                sent(ids)
                return ids
        with own_cursor(self._connection) as cursor:
            return insert(cursor, rows, sent=sent)

    def dedupe(self, wanted: Sequence[Wanted]) -> list[CopyReceipt]:
        """Store rows of which some have unique ids, all or none; say what became of each."""
        block = transaction.atomic(using=self._connection.alias)
        with block if self._needs_block() else nullcontext():
            if self._in_commit_order:
                self._join_lines([each.row for each in wanted])
            stored = deduping.store(
                self._connection, wanted, partial(admit, self._connection, self._limits)
            )
            self._ring(stored.rows)
        return stored.copies

    def _needs_block(self) -> bool:
        """Say whether rows join a line where no transaction is open (REQUIRE_ATOMIC off)."""
        return bool(self._in_commit_order) and not self._connection.in_atomic_block

    def _join_lines(self, rows: Sequence[NewRow]) -> None:
        """Wait for the lines whose ids are to rise in the order of commits: no id is drawn yet."""
        names: set[str] = set()
        for row in rows:
            whole_queue = self._in_commit_order.get(row.queue)
            if whole_queue:
                names.add(row.queue)
            elif whole_queue is not None and row.key is not None:
                names.add(f"{row.queue} {row.handler} {row.key}")  # no name has a space in it
        if names:
            with self._connection.cursor() as cursor:
                lock_lines(cursor, names)

    def _ring(self, rows: Sequence[NewRow]) -> None:
        # A worker looks at least each poll interval, so it meets by itself what is due later. How
        # far away an absolute moment is only the database knows: its delay is 0.
        settings = self._settings
        if settings.wakeup == "poll":
            return
        for row in rows:
            if row.delay <= settings.poll_interval:
                bell.ring_after_commit(self._connection)
                return
