"""drain() eases off a queue whose handlers fail, as workers do; due() ends the waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.test import TestCase, TransactionTestCase, override_settings

from django_mq import Retry, RetryPolicy, Snooze, fixed, handler, queues
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage
from django_mq.testing import drain, due
from tests.testing.drain.conftest import send

BACKOFF = {"QUEUES": {"eases": {"backoff": {"multiplier": 100, "maximum": 1000, "jitter": 0}}}}


def level() -> int:
    return queues.state("eases").backoff_level


class Promises:
    """The same in a TestCase, where all is one transaction, and without."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        registry = isolated()
        registry.__enter__()
        self.addCleanup(registry.__exit__, None, None, None)  # type: ignore[attr-defined]
        self.ends: list[Exception] = []

        for name, atomic in (("bound", True), ("unbound", False)):

            @handler(
                f"test.{name}",
                name=name,
                queue="eases",
                atomic=atomic,
                retry=RetryPolicy(max_attempts=9, backoff=fixed(0)),
            )
            def answers(delivery: Any) -> None:
                if self.ends:
                    raise self.ends[0]

    def test_a_failure_stops_the_queue_until_the_probe_of_a_later_time(self) -> None:
        for type in ("test.bound", "test.unbound"):
            self.ends[:] = [ValueError("no")]
            for _ in range(3):
                send(type)
            assert drain(errors="keep").deliveries == 1
            assert level() == 1
            assert due() == 0  # no message waits for a time of its own
            assert drain(errors="keep").deliveries == 1
            assert level() == 2
            self.ends.clear()
            due("another")
            due(until=10)
            assert drain() == 0
            due("eases")
            assert drain() == 1  # the probe
            assert level() == 1
            due(until=timedelta(days=1))
            assert drain() == 2  # another one, then the rest
            assert level() == 0
            assert not QueuedMessage.objects.exists()

    def test_a_probe_that_is_held_leaves_the_queue_to_the_next_message(self) -> None:
        self.ends[:] = [ValueError("no")]
        send("test.bound")
        drain(errors="keep")
        self.ends.clear()
        QueuedMessage.objects.create(
            queue="eases", type="test.gone", handler="gone", payload={}, priority=9
        )
        due()
        assert drain() == 1
        assert level() == 0

    def test_retry_and_snooze_stop_it_only_with_backoff(self) -> None:
        for end, expected in (
            (Retry(9), 0),
            (Snooze(9), 0),
            (Retry(9, backoff=True), 1),
            (Snooze(9, backoff=True), 1),
        ):
            self.ends[:] = [end]
            send("test.bound")
            drain(errors="keep")
            assert level() == expected, end
            QueuedMessage.objects.all().delete()
            queues.end_backoff("eases")


@override_settings(DJANGO_MQ=BACKOFF)
class InOneTransaction(Promises, TestCase):
    pass


@override_settings(DJANGO_MQ=BACKOFF)
class InTransactionsOfTheirOwn(Promises, TransactionTestCase):
    pass
