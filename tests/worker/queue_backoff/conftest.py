"""A fleet whose threads note ends of deliveries, and a clock that jumps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from django_mq import signals
from django_mq.conf import get_settings
from django_mq.executor.ended import Ended, Settled, failure_end
from django_mq.messages import ClaimedRow, Delivery
from django_mq.models import QueueState
from django_mq.policy.backoff import RetryPolicy
from django_mq.store import queue_backoff
from django_mq.worker.queue_backoff import BackoffLevels
from tests.database import second_connection

Cursor = psycopg.Cursor[Any]


@pytest.fixture(autouse=True)
def _settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "QUEUES": {
            "mail": {"backoff": {}},
            "never": {"backoff": {"maximum": 0}},
            "mixed": {},
        }
    }


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    with second_connection() as own, own.cursor() as cursor:
        yield cursor


@pytest.fixture
def heard() -> Iterator[list[tuple[str, int]]]:
    """Record every change: the signal's name and the new level."""
    found: list[tuple[str, int]] = []
    receivers: list[Callable[..., None]] = []
    for name in ("backoff_started", "backoff_changed", "backoff_ended"):

        def receive(
            sender: str, queue: str, level: int, until: Any, name: str = name, **more: Any
        ) -> None:
            assert sender == queue == "mail"
            assert (until is None) is (level == 0)
            found.append((name, level))

        getattr(signals, name).connect(receive)
        receivers.append(receive)
    yield found
    for name, receive in zip(
        ("backoff_started", "backoff_changed", "backoff_ended"), receivers, strict=True
    ):
        getattr(signals, name).disconnect(receive)


def now(cursor: Cursor) -> datetime:
    cursor.execute("select statement_timestamp()")
    found: datetime = cursor.fetchall()[0][0]
    return found


class Fleet:
    """Workers that share a database, and a clock that jumps to the end of each wait.

    No wait ends by itself, however slow the machine is.
    """

    def __init__(self, cursor: Cursor, size: int = 3) -> None:
        self.cursor = cursor
        self.workers = [
            BackoffLevels(
                get_settings(),
                stop_queue=lambda queue, before, n=n: self.stopped.update({(n, queue): before}),
                random=random.Random(n).random,
            )
            for n in range(size)
        ]
        #: By worker and queue: messages claimed before this time must not start; None: no limit.
        self.stopped: dict[tuple[int, str], datetime | None] = {}
        self.seconds = 0.0
        self.longest = 0.0
        self._wait = 0.0
        self._claims = 0

    def claim(self, queue: str = "mail", worker: int = 0) -> Delivery:
        """Return the delivery of a claim made now."""
        self._claims += 1
        at = now(self.cursor)
        return Delivery(
            ClaimedRow(
                id=self._claims, queue=queue, type="t", handler="h", schema_version=1,
                payload="{}", metadata="{}", priority=0, key=None, attempts=1, max_attempts=20,
                retry=None, claimed_by=f"w{worker}:{self._claims}", wants_result=False,
                suspect=False, held_for=None, created=at.timestamp(), claimed=at.timestamp(),
            )
        )  # fmt: skip

    def end(self, delivery: Delivery, error: BaseException | None, worker: int = 0) -> bool:
        """End the handler of `delivery`; return whether there is a step to write."""
        return self.workers[worker].record([ended(delivery, error)])

    def write(self, worker: int = 0) -> None:
        """Write what is to be written; a new wait of the queue then lasts until `wait()`."""
        found = QueueState.objects.filter(queue="mail")
        before, began = found.first(), now(self.cursor)
        self.workers[worker].write(self.cursor)
        state = found.first()
        if state is None or not (until := state.backoff_until):
            return
        if before is None or until != before.backoff_until:
            changed = state.backoff_changed_at
            from_ = changed if changed and changed >= began else now(self.cursor)
            self._wait = (until - from_).total_seconds()
            assert until - began > timedelta(seconds=1)
            found.update(backoff_until=until + timedelta(hours=1))

    @property
    def state(self) -> QueueState:
        return QueueState.objects.get(queue="mail")

    @property
    def allowance(self) -> str:
        """The number of the queue's messages that the fleet may have in flight: all, one, none."""
        stand = queue_backoff.backoff_states(self.cursor, ["mail"]).get("mail")
        if stand is None or stand.level == 0:
            return "all"
        may = queue_backoff.start_probe(self.cursor, queue="mail", claimer="ask:1", lease=30.0)
        queue_backoff.cancel_probe(self.cursor, queue="mail", claimer="ask:1")
        return "one" if may else "none"

    def wait(self) -> None:
        """Let the wait of the queue pass."""
        assert self.state.backoff_until is not None
        self.longest = max(self.longest, self._wait)
        self.seconds += self._wait
        QueueState.objects.filter(queue="mail").update(backoff_until=now(self.cursor))

    def probe(self, error: BaseException | None, worker: int = 0) -> int:
        """One worker gets the probe, the others none; return the level after it ended."""
        delivery = self.claim(worker=worker)
        claimer = delivery._row.claimed_by
        assert queue_backoff.start_probe(self.cursor, queue="mail", claimer=claimer, lease=30.0)
        for other in range(len(self.workers)):
            assert not queue_backoff.start_probe(
                self.cursor, queue="mail", claimer=f"w{other}:0", lease=30.0
            )
        self.workers[worker].probe_started("mail", claimer)
        assert self.end(delivery, error, worker)
        self.write(worker)
        return self.state.backoff_level


def ended(delivery: Delivery, error: BaseException | None) -> Ended:
    if error is None:
        return Ended(delivery, Settled.ACKED)
    return failure_end(delivery, RetryPolicy(), error, seconds=0.0)


@pytest.fixture
def fleet(cursor: Cursor) -> Fleet:
    return Fleet(cursor)
