"""The ordered queues of a worker: the times at which it keeps them or gives them up."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from django.db import connection

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.messages import ClaimedRow, Delivery
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.policy import suspect_turns
from django_mq.policy.line_marks import FRONT
from django_mq.store import ordered_queues as line
from django_mq.store.claim import Lane
from django_mq.worker import ordered_queues
from django_mq.worker.claims import MAX_BATCHES, ClaimRouter
from django_mq.worker.queue_options import ClaimOptions
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start, proxied
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


LATER = RetryPolicy(max_attempts=50, backoff=fixed(3600))


def test_a_locked_decision_about_a_line_stops_no_other_queue(start: Start, settings: Any) -> None:
    """A worker froze while claiming from the line, or a long transaction pauses it."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    ran: list[int] = []
    done = threading.Event()

    @handler("#", queue="mail", queues=("mail", "line"), name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        done.set()

    decide("line")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate where queue = 'line' for update")
        message = add(handler="h")
        start()
        assert done.wait(PATIENCE)
    assert ran == [message.pk]


def test_owner_without_an_answer_keeps_its_line(
    start: Start, settings: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(ordered_queues, "LEASE_SECONDS", PATIENCE)  # it cannot be renewed
    done = threading.Event()

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        done.set()

    start()
    said.wait("queue_assigned")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate where queue = 'line' for update")
        add("line", handler="h", ordered=True)
        other.execute("notify django_mq")
        assert not done.wait(2.0)  # longer than a turn
    assert done.wait(PATIENCE)
    assert said.count("queue_unassigned") == 0


@pytest.mark.parametrize(
    ("busy_with", "threads"),
    [
        (["long"], 1),
        (["suspect"], 2),
        *slow(
            (["long", "suspect"], 2),
            (["coroutine"], 1),
            (["coroutine of several", "suspect"], 2),
        ),
    ],
)
def test_busy_owner_gives_up_its_line(
    start: Start,
    settings: Any,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    busy_with: list[str],
    threads: int,
) -> None:
    """PMQ-44: a line does not wait for a long message of another queue.

    Nothing starts beside a suspect, nor when one has waited for long; coroutines fill the slots.
    """
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(suspect_turns, "SUSPECT_WAIT_SECONDS", 0.5)
    gate, done, started = threading.Event(), threading.Event(), threading.Event()

    @handler("#", queue="mail", name="long", timeout=PATIENCE * 2)
    def long(delivery: Delivery) -> None:
        started.set()
        gate.wait(2 * PATIENCE)

    @handler("#", queue="mail", name="coroutine", timeout=PATIENCE * 2)
    async def coroutine(delivery: Delivery) -> None:
        started.set()
        while not gate.is_set():
            await asyncio.sleep(0.01)

    if "coroutine" in busy_with[0]:

        @handler("#", queue="line", name="h")
        async def ah(delivery: Delivery) -> None:
            done.set()

    else:

        @handler("#", queue="line", name="h")
        def h(delivery: Delivery) -> None:
            done.set()

    try:
        owner = start(threads=threads, async_slots=1 if busy_with == ["coroutine"] else 5)
        said.wait("queue_assigned")
        assert owner.worker._run is not None
        lines = owner.worker._run.parts.ordered_queues
        with second_connection() as other:
            for kind in busy_with:
                name = "coroutine" if "coroutine" in kind else "long"
                message = add(handler=name, suspect=kind == "suspect")
                other.execute("notify django_mq")
                until(lambda: stored(message).leased_until is not None)  # noqa: B023
            assert started.wait(PATIENCE)
            start(queues=["line"])
            until(lambda: lines.stuck({"line"}), "the owner is stuck")
            add("line", handler="h", ordered=True)
            other.execute("notify django_mq")
        assert done.wait(PATIENCE)  # while the long one runs
    finally:
        gate.set()


def test_a_worker_that_left_a_line_takes_it_back_as_soon_as_it_can(db: None) -> None:
    """Not at its next turn: until then, messages of other queues might keep it busy again."""
    busy = False
    owner = ordered_queues.OrderedQueues(
        "w", ["line"], on_owned=lambda: None, busy=lambda queue: busy
    )
    with connection.cursor() as cursor:
        owner.maintain(cursor)
        assert owner.owned.keys() == {"line"}
        busy = True
        owner.disown(cursor, ["line"])
        owner.maintain(cursor)
        assert owner.owned == {}
        busy = False
        owner.maintain(cursor)
        assert owner.owned.keys() == {"line"}


def test_adoption_resets_the_mark(db: None) -> None:
    owner = ordered_queues.OrderedQueues(
        "w", ["line"], on_owned=lambda: None, busy=lambda queue: False
    )
    with connection.cursor() as cursor:
        owner.maintain(cursor)
        owner.owned["line"] = FRONT._replace(first=10**9)
        owner._turn_at = 0.0
        owner.maintain(cursor)
        assert owner.owned["line"].first == 10**9
        add("line")  # from a producer that does not know that the queue is ordered
        owner._turn_at = 0.0
        owner._adopt_at["line"] = 0.0
        owner.maintain(cursor)
        assert owner.owned["line"] == FRONT


def test_busy_executors_keep_a_worker_from_no_line_of_coroutines(
    start: Start, settings: Any, gate: threading.Event
) -> None:
    """It takes the line of an owner that is gone, since its slots are free."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    done = threading.Event()

    @handler("#", queue="mail", name="long", timeout=PATIENCE * 2)
    def long(delivery: Delivery) -> None:
        gate.wait(2 * PATIENCE)

    @handler("#", queue="line", name="h")
    async def h(delivery: Delivery) -> None:
        done.set()

    with second_connection() as other:
        line.own(other.cursor(), queue="line", worker="gone", lease=3.0)
    add(handler="long")
    add("line", handler="h", ordered=True)
    start()
    assert done.wait(PATIENCE)


def test_unresolved_message_does_not_overtake_a_failed_one(
    start: Start, settings: Any, said: Said
) -> None:
    """Guarantee 8: the connection is lost when the second, which has no handler yet, is split."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    ran: list[int] = []

    @handler("#", queue="line", name="h", retry=LATER)
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        raise ValueError

    first = add("line", handler="h", ordered=True)
    second = add("line", ordered=True)
    proxy = Proxy(connection.get_connection_params())
    proxy.cut_at("with original as", arrives=False)
    try:
        with proxied(proxy):
            running = start(threads=8)
            said.wait("message_retried")
            until(lambda: said.count("message_retried") > 1 or stored(second).attempts == 0)
            running.stop()
    finally:
        proxy.close()
    assert proxy.cuts == 1
    assert ran == [first.pk]
    assert (stored(second).attempts, stored(second).leased_until) == (0, None)


def test_worker_without_room_renews_its_ownership(
    start: Start, settings: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any poll interval: an owner whose lease lapses is taken for frozen."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(ordered_queues, "TURN_SECONDS", 0.2)
    gate, started = threading.Event(), threading.Event()

    @handler("#", queue="mail", name="h", timeout=PATIENCE * 2)
    def h(delivery: Delivery) -> None:
        started.set()
        gate.wait(PATIENCE)

    try:
        for _ in range(3):
            add(handler="h")
        start()
        assert started.wait(PATIENCE)
        said.wait("queue_assigned")
        wait_for_renewals()
    finally:
        gate.set()


def wait_for_renewals() -> None:
    """Return once the ownership of the line has been renewed repeatedly."""
    seen = set()

    def renewals() -> int:
        seen.add(QueueState.objects.get(queue="line").owned_until)
        return len(seen) - 1

    until(lambda: renewals() > 2, "it is renewed")


def test_drain_keeps_the_line_of_a_running_message(
    start: Start, settings: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PMQ-44: the next owner would take it for frozen, and end its transaction."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(ordered_queues, "TURN_SECONDS", 0.2)
    gate, started = threading.Event(), threading.Event()
    ran: list[int] = []

    @handler("#", queue="line", name="h", timeout=PATIENCE * 2)
    def h(delivery: Delivery) -> None:
        started.set()
        ran.append(delivery.id)
        gate.wait(PATIENCE)

    message = add("line", handler="h", ordered=True)
    first = start()
    try:
        assert started.wait(PATIENCE)
        stopping = threading.Thread(target=first.stop)
        stopping.start()
        until(first.worker.stopping.is_set)
        start()
        said.wait("worker_started", 2)
        wait_for_renewals()
        assert said.count("queue_assigned") == 1
    finally:
        gate.set()
    stopping.join(PATIENCE)
    assert ran == [message.pk]
    assert FailedAttempt.objects.count() == 0
    said.wait("queue_assigned", 2)
    assert not QueuedMessage.objects.exists()


def test_one_claim_takes_several_batches_of_a_line() -> None:
    """Nothing else of the line is claimed meanwhile, so each claim costs it a pause."""
    router = ClaimRouter(
        worker="me",
        owned={"line": FRONT},
        stopped_queues=StoppedQueues(),
    )
    options = ClaimOptions("sync", 30.0, batch_size=2, batch_bytes=1 << 20, ordered=True)
    for _ in range(3 * MAX_BATCHES):
        add("line", ordered=True)
    sizes = []
    with second_connection() as other:
        cursor = other.cursor()
        assert line.own(cursor, queue="line", worker="me", lease=30.0)
        for _ in range(2):  # the first tells the size of a message
            maximum = router.max_per_claim("line", options)
            rows = router.claim(cursor, [Lane("line", 0)], options, limit=maximum).claim.rows
            sizes.append([len(list(batch)) for _, batch in itertools.groupby(rows, claimer_of)])
            QueuedMessage.objects.filter(pk__in=[row.id for row in rows]).delete()
    assert sizes == [[2], [2] * MAX_BATCHES]


def claimer_of(row: ClaimedRow) -> str:
    return row.claimed_by
