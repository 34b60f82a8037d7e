"""An executor that runs handlers outside a transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connections

from django_mq import handler
from django_mq.executor.connections import plain_connection
from django_mq.executor.nonatomic import NonAtomic
from django_mq.executor.scoreboard import Scoreboard
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.executor.tasks import Task
from django_mq.store import claim_keyed
from django_mq.store.claim import Lane
from tests.database import second_connection
from tests.executor.test_lazy_transaction import Sent
from tests.rows import add
from tests.worker.conftest import Bench, ShortOutage, run_context


class NonAtomicBench(Bench):
    """One executor's `NonAtomic`, in the thread of the test."""

    def __init__(self) -> None:
        self.fresh = False
        self.wrapper = plain_connection(DEFAULT_DB_ALIAS)
        self.scoreboard = Scoreboard(200)
        self.settled: list[int] = []
        self.back: list[bool] = []
        self._claims = 0
        self.session = Session(self.wrapper)
        context = run_context(ShortOutage(threading.Event()), self._settled, lease=60.0)
        self.nonatomic = NonAtomic(
            self.session,
            context,
            entries=ExecutorEntries(self.scoreboard, 0, 200),
            settlement=Settlement(self.session, context),
        )

    def traced(self, path: Path) -> tuple[Sent, Task]:
        """Run one of two messages, so that the connection is not new; trace what follows.

        Returns the trace and the other message.
        """
        for _ in range(2):
            add(handler="h")
        first, second = self.claim()
        self.nonatomic.run([first])
        sent = Sent(self, path / "trace")
        sent.start()
        return sent, second

    def claim_with_keys(self) -> list[Task]:
        """Claim the due messages, several of a key, in the order of their ids."""
        with second_connection() as other:
            claimed = claim_keyed.claim(
                other.cursor(),
                lanes=[Lane("mail", 0)],
                claimer="bench:1",
                lease=60.0,
                limit=10,
                max_bytes=1 << 20,
                skip_dead=False,
            )
        return sorted(map(self.task, claimed.rows), key=lambda task: task.delivery.id)

    def go(self) -> list[bool]:
        """Claim the due messages and run them; return whether each was started."""
        return [self.nonatomic.run([task]) for task in self.claim()]


@pytest.fixture
def nonatomic(transactional_db: None) -> Iterator[NonAtomicBench]:
    before = connections[DEFAULT_DB_ALIAS]
    bench = NonAtomicBench()
    connections[DEFAULT_DB_ALIAS] = bench.wrapper
    yield bench
    bench.wrapper.close()
    connections[DEFAULT_DB_ALIAS] = before


def on(**options: Any) -> Callable[[Any], Any]:
    return handler("#", queue="mail", name="h", atomic=False, **options)


def take_over(id: int) -> None:
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set claimed_by = 'other:1', attempts = attempts + 1,"
            " leased_until = now() + interval '1 h' where id = %s",
            [id],
        )
