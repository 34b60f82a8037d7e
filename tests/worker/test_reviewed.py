"""What a hostile reader found: each of these once went wrong."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DataError, IntegrityError, connection, transaction
from django.utils import timezone
from psycopg.errors import DeadlockDetected

from django_mq import Snooze, broadcast, broadcast_many, handler
from django_mq.addressing import MOST_ADDRESSES, Addresser
from django_mq.conf import get_settings
from django_mq.handlers import isolated
from django_mq.messages import Delivery, Message
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import chores
from django_mq.testing import deliver, drain
from django_mq.worker import Worker, claiming
from tests.rows import add
from tests.worker.conftest import Bench

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("when", ["infinity", "-infinity", "0044-03-15 BC", "20000-01-01"])
def test_a_time_that_python_cannot_read_is_refused(when: str) -> None:
    """Guarantee 20, S17: a row that others write cannot stop the workers."""
    with (
        pytest.raises((IntegrityError, DataError)),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("select mq_broadcast('q', 't', '{}', '{}', %s::timestamptz)", [when])


def test_attempts_cannot_overflow() -> None:
    message = add()
    with pytest.raises(IntegrityError), transaction.atomic():
        QueuedMessage.objects.filter(pk=message.pk).update(attempts=2**31 - 1)


@pytest.mark.parametrize("when", ["infinity", "-infinity"])
@pytest.mark.parametrize("column", ["leased_until", "held_since", "dead_at"])
def test_nor_is_another_time_of_a_message(column: str, when: str) -> None:
    """S17: the claims, or the look for what lapsed, would fail for ever."""
    message = add()
    claimer = ", claimed_by = 'x:1'" if column == "leased_until" else ""
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"update django_mq_queuedmessage set {column} = %s {claimer} where id = %s",
            [when, message.pk],
        )


@pytest.mark.parametrize("kind", ["plain", "keyed", "ordered"])
def test_as_many_attempts_as_can_be_do_not_stop_the_queue(settings: Any, kind: str) -> None:
    """S17."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": kind == "ordered"}}}
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    options = {"key": "k"} if kind == "keyed" else {"ordered": kind == "ordered"}
    many = add(handler="h", attempts=2**31 - 2, **options)
    one = add(handler="h", **options)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert ran == [many.pk, one.pk]


def test_claims_that_fail_leave_a_queue_that_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is empty means that: however many claims in a row failed."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    for _ in range(5):
        add(handler="h")
    real, left = claiming.claim.claim, [6]

    def claim(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise DeadlockDetected("again and again")
        return real(*args, **options)

    monkeypatch.setattr(claiming.claim, "claim", claim)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert len(ran) == 5


def test_a_failed_handlers_write_through_an_old_cursor_is_undone(bench: Bench) -> None:
    """Guarantee 1: also when the cursor was made by an earlier delivery."""
    kept: list[Any] = []

    @handler("keep", queue="mail", name="keep")
    def keep(delivery: Any) -> None:
        kept.append(connection.cursor())

    @handler("write", queue="mail", name="write")
    def write(delivery: Any) -> None:
        kept[0].execute("insert into shop_product (name, price, stock) values ('undone', 1, 1)")
        raise ValueError

    add(handler="keep", type="keep", after=-2)
    add(handler="write", type="write", after=-1)
    bench.run_all(bench.claim())
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from shop_product where name = 'undone'")
        assert cursor.fetchone() == (0,)
    assert FailedAttempt.objects.get().error_class == "ValueError"


def test_a_handler_that_always_loses_its_connection_is_charged(bench: Bench) -> None:
    """Guarantee 3: some times may be the server's fault; not every time."""
    runs: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        runs.append(delivery.attempt)
        pid = bench.wrapper.__dict__["connection"].info.backend_pid
        from tests.database import second_connection

        with second_connection() as other:
            other.execute("select pg_terminate_backend(%s, 5000)", [pid])

    message = add(handler="h")
    tasks = bench.claim()
    for _ in range(10):
        if not tasks:
            break
        remainder = bench.slices.run(tasks)
        tasks = [*remainder.again, *remainder.left]
    message.refresh_from_db()
    assert (message.attempts, message.leased_until) == (1, None)
    assert FailedAttempt.objects.count() == 1
    assert 1 < len(runs) < 10
    assert not bench.slices._conflicts._losses  # its next attempt begins anew


def test_snoozing_has_bounds(bench: Bench) -> None:
    """S15, S17: neither a loop without a wait, nor a message that is due in the year 9999."""

    @handler("now", queue="mail", name="now")
    def now(delivery: Any) -> None:
        raise Snooze(0)

    @handler("never", queue="mail", name="never")
    def never(delivery: Any) -> None:
        raise Snooze(datetime(9999, 12, 31, tzinfo=UTC))

    soon, far = add(handler="now", type="now"), add(handler="never", type="never")
    before = timezone.now()
    bench.run_all(bench.claim())
    soon.refresh_from_db()
    far.refresh_from_db()
    assert soon.processable_after >= before + timedelta(seconds=0.09)
    assert far.processable_after < timezone.now() + timedelta(days=367)


def test_execute_wrappers_end_with_their_handler(bench: Bench) -> None:
    seen: list[str] = []

    def spy(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        seen.append(str(sql))
        return execute(sql, params, many, context)

    @handler("a", queue="mail", name="a")
    def a(delivery: Any) -> None:
        connection.execute_wrappers.append(spy)

    @handler("b", queue="mail", name="b")
    def b(delivery: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select 'from b'")

    add(handler="a", type="a", after=-2)
    add(handler="b", type="b", after=-1)
    bench.run_all(bench.claim())
    assert not any("from b" in sql for sql in seen)


def test_one_queue_may_be_given_as_a_text() -> None:
    assert Worker("mail").queues == ("mail",)


@pytest.mark.parametrize("wrong", [{"threads": "2"}, {"threads": True}, {"batch_size": 10**9}])
def test_numbers_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        Worker(**wrong)


@pytest.mark.parametrize("seconds", [0, -5, math.nan, math.inf, "x", None, True])
def test_extend_takes_seconds(seconds: Any) -> None:
    with isolated():

        @handler("#", name="h", atomic=False)
        def h(delivery: Any) -> None:
            from django_mq.worker.leased import LeasedDelivery

            LeasedDelivery.extend(delivery, seconds)

        with pytest.raises(ValueError, match="more than zero"):
            deliver(h)


def test_expiry_is_returned_for_the_signal() -> None:
    message = add(expires=-1)
    with connection.cursor() as cursor:
        assert [row.id for row in chores.expire(cursor, limit=10)] == [message.pk]


def test_a_stream_of_many_types_is_not_remembered() -> None:
    addresser = Addresser(get_settings())
    for n in range(MOST_ADDRESSES + 10):
        addresser.rows(Message(f"t.{n}", {"large": "x" * 100}))
    assert len(addresser._plain) <= MOST_ADDRESSES
    assert "x" * 100 not in repr(addresser._plain)


def test_the_same_address_with_another_payload() -> None:
    with transaction.atomic():
        broadcast_many([Message("t", {"n": n}) for n in range(3)])
    assert [row.payload for row in QueuedMessage.objects.order_by("id")] == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
    ]


def test_deliver_is_the_cause_of_what_the_handler_broadcasts() -> None:
    with isolated():

        @handler("first", name="first")
        def first(delivery: Any) -> None:
            broadcast("second")

        deliver(first, metadata={"mq.hops": 4, "mq.correlation_id": "c"})
    metadata = QueuedMessage.objects.get().metadata
    assert (metadata["mq.hops"], metadata["mq.correlation_id"]) == (5, "c")


def test_drain_refuses_what_is_no_queue() -> None:
    with pytest.raises(ValueError, match="queue"):
        drain("no such name!")
