"""Workers ring for messages that they free but may not claim themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, handler
from django_mq.messages import Delivery, Fence
from django_mq.models import QueuedMessage
from django_mq.worker import DeadWorker
from tests.database import listening
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, Said

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


def test_drain_rings_for_released_messages(start: Start, said: Said, settings: Any) -> None:
    """The other workers may sleep for a poll interval."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "LEASE": 1800}
    begun, goes_on = threading.Event(), threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)

    for _ in range(5):
        add(handler="h")
    running = start()
    assert begun.wait(PATIENCE)
    leased = QueuedMessage.objects.filter(leased_until__isnull=False)
    until(lambda: leased.count() > 1)  # a worker that has just started holds only a few
    with listening() as bell:
        running.worker.stop(timeout=0)
        until(lambda: leased.count() == 1)
        heard = len(bell.heard())
        goes_on.set()
        assert running.join()
        assert heard + len(bell.heard()) == 2  # for its releases, and after the last handler


def lost_message() -> QueuedMessage:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    return add(handler="h", leased=600, claimed_by="dead:4", attempts=1, max_attempts=5)


def recover(running: Running, message: QueuedMessage) -> None:
    done = threading.Event()
    lost = [Fence(message.pk, 1, "dead:4")]
    running.worker.recover(DeadWorker(worker="dead", reason="was killed", lost=lost), done.set)
    assert done.wait(PATIENCE)


def test_the_recovery_of_a_dead_sibling_rings(start: Start, said: Said, settings: Any) -> None:
    """The recovering process may have no room."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "LEASE": 1800}

    lost = lost_message()
    running = start()
    said.wait("worker_started")
    with listening() as bell:
        recover(running, lost)
        assert bell.heard() != []
    assert running.stop()


def test_a_finished_message_frees_its_line_before_its_handler_returns(
    start: Start, said: Said
) -> None:
    """Its worker looks at the line when the handler returns; others may claim from it now."""
    heard: list[list[str]] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        with listening() as bell:
            with delivery.finish():
                before = bell.heard()
            heard.extend((before, bell.heard()))

    add(handler="h", key="k")
    assert start(until_empty=True).join()
    assert heard == [[], [""]]


@pytest.fixture
def polling(settings: Any) -> None:
    """Workers do not listen, and the poll is too far away to matter."""
    settings.DJANGO_MQ = {"WAKEUP": "poll", "POLL_INTERVAL": 600, "LEASE": 1800}


def test_where_workers_poll_an_idle_one_rings_for_nothing(start: Start, polling: None) -> None:
    with listening() as bell:
        assert start(until_empty=True).join()
        assert bell.heard() == []


def test_where_workers_poll_the_end_of_a_message_rings_for_nothing(
    start: Start, polling: None
) -> None:
    """It frees the next of its key, and brings forward what is put aside for its unique id."""

    @handler("a.b", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        if delivery.payload == 0:
            with transaction.atomic():
                broadcast("a.b", 1, key="k", unique_id="u", on_duplicate="requeue")
            with delivery.finish():
                pass

    with listening() as bell:
        with transaction.atomic():
            broadcast("a.b", 0, key="k", unique_id="u")
        assert start(until_empty=True).join()
        assert not QueuedMessage.objects.exists()
        assert bell.heard() == []


def test_where_workers_poll_a_recovery_rings_for_nothing(
    start: Start, said: Said, polling: None
) -> None:
    lost = lost_message()
    running = start()
    said.wait("worker_started")
    with listening() as bell:
        recover(running, lost)
        assert running.stop()
        assert bell.heard() == []
