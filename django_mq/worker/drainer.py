"""Run what is due on the caller's own connection, here and now: for tests."""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg
from asgiref.sync import async_to_sync

from django_mq.conf import get_settings
from django_mq.messages import Delivery
from django_mq.store import lines, looking
from django_mq.store.claim import Lane
from django_mq.worker.board import Board, Places
from django_mq.worker.calling import call
from django_mq.worker.claiming import Claims, Terms
from django_mq.worker.database import Outage, statement_cursor
from django_mq.worker.ending import settle_all
from django_mq.worker.leased import LeasedDelivery
from django_mq.worker.ownership import PIECE
from django_mq.worker.policies import policies
from django_mq.worker.shut import Shut
from django_mq.worker.slices import Slices
from django_mq.worker.sorting import Sorter
from django_mq.worker.unbound import ended_unbound

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.messages import ClaimedRow
    from django_mq.worker.tasks import Task

#: A queue that is not empty after so many deliveries never will be: handlers feed each other.
MOST_DELIVERIES = 100_000
#: The worker that messages are claimed for.
NAME = "drain"


class Drainer:
    """One message at a time, each in a savepoint where its slice would be a transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, *, queue: str | None) -> None:
        self._connection = connection
        self._queue = queue
        self._settings = get_settings()
        self._sorter = Sorter(self._settings)
        self._policy = policies(self._settings)
        numbers = count(1)
        self._owned: set[str] = set()
        self._claims = Claims(
            worker=NAME,
            claimer=lambda: f"{NAME}:{next(numbers)}",
            owned=self._owned,
            holding=lambda queue: False,
            probing=lambda queue, claimer: None,
            shut=Shut(),
        )

    def run(self) -> int:
        """Run until nothing is due; return how many deliveries there were."""
        delivered = 0
        while rows := self._claim():
            for row in rows:
                task = self._sorter.sort(self._cursor(), Delivery(row))
                if task is None:
                    continue
                delivered += 1
                if delivered > MOST_DELIVERIES:
                    raise RuntimeError(
                        f"more than {MOST_DELIVERIES} deliveries: handlers feed each other"
                    )
                if task.handler.atomic:
                    self._run_slices(task)
                else:
                    self._run_unbound(task)
        return delivered

    def _run_slices(self, task: Task) -> None:
        slices = Slices(
            self._connection,
            places=Places(Board(1), 0, 1),
            outage=Outage(threading.Event()),
            policy=self._policy,
            settled=lambda ended: None,
            slice_seconds=self._settings.slice_seconds,
        )
        # For one message alone: a handler that is not atomic may ask another one, and that runs
        # in a drain within this one.
        with contextlib.closing(slices):
            again = [task]
            while again:
                again = slices.run(again).again

    def _claim(self) -> list[ClaimedRow]:
        cursor = self._cursor()
        seen = looking.look(cursor)
        self._claims.saw(seen)
        for each in seen:
            if each.due and self._queue in (None, each.queue):
                terms = self._terms(each.queue)
                lane = Lane(each.queue, each.priority)
                claim = self._claims.take(cursor, [lane], terms, limit=1).claim
                while claim.further and not claim.rows:
                    claim = self._claims.take(cursor, [lane], terms, limit=1).claim
                if claim.rows:
                    return claim.rows
        return []

    def _terms(self, queue: str) -> Terms:
        options = self._settings.queue(queue)
        if options.ordered:
            self._own(queue)
        return Terms(
            kind="both",
            lease=options.lease,
            batch_size=1,
            batch_bytes=options.batch_bytes,
            ordered=options.ordered,
            skip_dead=options.on_dead_head == "skip",
            limit=options.max_in_flight,
        )

    def _own(self, queue: str) -> None:
        """Nobody else serves a queue that is drained; what is beside its line comes into it."""
        self._owned.add(queue)
        lines.own(self._cursor(), queue=queue, worker=NAME, lease=self._settings.lease)
        while lines.adopt(self._cursor(), queue=queue, limit=PIECE) == PIECE:
            pass

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
        return statement_cursor(self._connection.connection)


class _NoClock:
    """Nobody ends a handler here."""

    def extend(self, seconds: float) -> None:
        """There is no timeout to move."""
