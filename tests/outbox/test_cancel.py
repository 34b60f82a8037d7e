"""cancel() removes waiting messages, and none that a worker holds."""

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction

from django_mq import InvalidName, InvalidOption, Message, broadcast, broadcast_many, cancel
from django_mq.models import QueuedMessage, Result
from tests.database import second_connection
from tests.outbox.conftest import now


@pytest.mark.django_db
def test_cancel_removes_waiting_messages_that_match_every_option() -> None:
    with transaction.atomic():
        first, delayed, other = broadcast_many([Message("a"), Message("a", after=60), Message("b")])
    assert not cancel(id=first.ids[0], type="b")
    assert cancel(id=first.ids[0], type="a").ids == first.ids
    cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight, bool(cancelled)) == (delayed.ids, 0, True)
    assert list(QueuedMessage.objects.values_list("id", flat=True)) == list(other.ids)


@pytest.mark.django_db
def test_cancel_never_changes_leased_or_dead_messages() -> None:
    with transaction.atomic():
        receipts = broadcast_many([Message("a")] * 4)
    waiting, leased, lapsed, dead = (receipt.ids[0] for receipt in receipts)
    update = QueuedMessage.objects.filter
    update(pk=leased).update(leased_until=now() + timedelta(hours=1), claimed_by="w")
    update(pk=lapsed).update(leased_until=now() - timedelta(hours=1), claimed_by="w")
    update(pk=dead).update(dead_at=now(), dead_reason="attempts")
    cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight) == ((waiting,), 2)
    assert cancel(id=leased).in_flight == 1
    assert set(QueuedMessage.objects.values_list("id", flat=True)) == {leased, lapsed, dead}


@pytest.mark.django_db
def test_cancel_stores_no_answer_to_a_message_that_is_no_request() -> None:
    with transaction.atomic():
        broadcast("a")
    assert cancel(type="a")
    assert not Result.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_cancel_does_not_wait_for_a_claim() -> None:
    with transaction.atomic():
        free, locked = (each.ids[0] for each in broadcast_many([Message("a")] * 2))
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", (locked,))
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("set local lock_timeout to '60s'")  # fails rather than hangs
            cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight) == ((free,), 1)


@pytest.mark.django_db(transaction=True)
def test_cancel_takes_part_in_the_callers_transaction() -> None:
    with transaction.atomic():
        broadcast("a")
    with transaction.atomic():
        assert cancel(type="a")
        transaction.set_rollback(True)
    assert QueuedMessage.objects.count() == 1


@pytest.mark.django_db
def test_cancel_finds_an_id_by_its_index() -> None:
    from django_mq.store.cancel import CANCEL

    with connection.cursor() as cursor:
        cursor.execute("set local enable_seqscan = off")
        parameters = {"ids": [5], "type": None, "unique_id": None, "kept": [], "reason": ""}
        cursor.execute("explain " + CANCEL, parameters)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Index Cond: (id = (unnest(" in plan


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {}),
        (InvalidOption, {"id": "5"}),
        (InvalidOption, {"id": True}),
        (InvalidOption, {"id": 2**63}),
        (InvalidName, {"type": "bad type"}),
        (InvalidName, {"unique_id": ""}),
        (TypeError, {"queue": "q"}),
    ],
    ids=repr,
)
def test_cancel_refuses_missing_or_invalid_filters(error: type[Exception], options: Any) -> None:
    with pytest.raises(error):
        cancel(**options)


def test_cancel_in_a_coroutine_suggests_sync_to_async() -> None:
    async def view() -> None:
        cancel(id=1)

    with pytest.raises(SynchronousOnlyOperation, match=r"await sync_to_async\(cancel\)\("):
        async_to_sync(view)()
