"""Run what is due on the caller's own connection, here and now: for tests."""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg
from asgiref.sync import async_to_sync

from django_mq.conf import get_settings
from django_mq.store import claim
from django_mq.store.claim import Lane
from django_mq.worker.board import Board, Places
from django_mq.worker.calling import call
from django_mq.worker.database import Outage, statement_cursor
from django_mq.worker.ending import settle_all
from django_mq.worker.leased import LeasedDelivery
from django_mq.worker.policies import policies
from django_mq.worker.slices import Slices
from django_mq.worker.sorting import Sorter
from django_mq.worker.unbound import ended_unbound

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.messages import ClaimedRow
    from django_mq.worker.hand import Task

#: A queue that is not empty after so many deliveries never will be: handlers feed each other.
MOST_DELIVERIES = 100_000


class Drainer:
    """One message at a time, each in a savepoint where its slice would be a transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, *, queue: str | None) -> None:
        self._connection = connection
        self._queue = queue
        self._settings = get_settings()
        self._sorter = Sorter(self._settings)
        self._policy = policies(self._settings)
        self._claims = count(1)

    def run(self) -> int:
        """Run until nothing is due; return how many deliveries there were."""
        slices = Slices(
            self._connection,
            places=Places(Board(1), 0, 1),
            outage=Outage(threading.Event()),
            policy=self._policy,
            settled=lambda ids, any_back: None,
            slice_seconds=self._settings.slice_seconds,
        )
        delivered = 0
        with contextlib.closing(slices):
            while rows := self._claim():
                for task in self._sorter.sort(self._cursor(), rows):
                    delivered += 1
                    if delivered > MOST_DELIVERIES:
                        raise RuntimeError(
                            f"more than {MOST_DELIVERIES} deliveries: handlers feed each other"
                        )
                    if task.handler.atomic:
                        again = [task]
                        while again:
                            again = slices.run(again).again
                    else:
                        self._run_unbound(task)
        return delivered

    def _claim(self) -> list[ClaimedRow]:
        lanes = [
            Lane(seen.queue, seen.priority)
            for seen in claim.look(self._cursor())
            if seen.due and self._queue in (None, seen.queue)
        ]
        if not lanes:
            return []
        return claim.claim(
            self._cursor(),
            lanes=lanes,
            claimer=f"drain:{next(self._claims)}",
            lease=self._settings.lease,
            limit=1,
            max_bytes=self._settings.batch_bytes,
        ).rows

    def _run_unbound(self, task: Task) -> None:
        delivery = LeasedDelivery(
            task.delivery._row,
            alias=self._connection.alias,
            lease=self._settings.lease,
            clock=_NoClock(),
        )
        function: Any = task.handler.function
        if task.handler.is_async:
            function = async_to_sync(function)
        result, error = call(function, delivery, delivery)
        ended = ended_unbound(delivery, self._policy(delivery._row), result, error, 0.0)
        settle_all(self._cursor(), [ended])

    def _cursor(self) -> psycopg.Cursor[Any]:
        self._connection.ensure_connection()
        return statement_cursor(self._connection)


class _NoClock:
    """Nobody ends a handler here."""

    def extend(self, seconds: float) -> None:
        """There is no timeout to move."""
