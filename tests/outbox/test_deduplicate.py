"""Broadcasts with unique ids: outcomes, receipts, and what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import (
    CopyReceipt,
    Delivery,
    DuplicateMessage,
    InvalidOption,
    Message,
    RetryPolicy,
    broadcast,
    broadcast_many,
    cancel,
    handler,
    handlers,
)
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.store import free_unique_ids as freeing
from django_mq.store.free_unique_ids import Done
from django_mq.store.unique_ids import UniqueId
from django_mq.testing import assert_broadcast, capture_broadcasts
from tests.rows import stored

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():
        yield


@pytest.fixture(autouse=True)
def block() -> Iterator[None]:
    """All of a test in one block: the statements see their own writes."""
    with transaction.atomic():
        yield


def send(n: int = 0, **options: Any) -> CopyReceipt:
    """Broadcast number `n` under the id `u`; return the receipt of its only copy."""
    [copy] = broadcast("a.b", {"n": n}, **{"unique_id": "u", **options}).copies
    return copy


def told(copy: CopyReceipt) -> tuple[str, str]:
    return copy.outcome, copy.reason


def the_message() -> QueuedMessage:
    return QueuedMessage.objects.get()


def lease(**given: Any) -> QueuedMessage:
    """Claim the only message."""
    until = given.pop("until", Now() + timedelta(minutes=1))
    QueuedMessage.objects.filter(dead_at=None).update(
        leased_until=until, claimed_by="worker:1", attempts=1
    )
    return the_message()


def done(**options: Any) -> None:
    """Broadcast, claim and ack a message."""
    message_id = send(**options).id
    message = lease()
    assert message.pk == message_id
    handled(message)


def handled(message: QueuedMessage, *, success: bool = True) -> list[int]:
    """End a message as a worker does: the row goes, or dies, and the id follows."""
    id = message.pk
    if success:
        QueuedMessage.objects.filter(pk=id).delete()
    else:
        QueuedMessage.objects.filter(pk=id).update(
            leased_until=None, claimed_by=None, dead_at=Now(), dead_reason="exhausted"
        )
    unique = UniqueId(message.queue, message.handler, message.type, message.unique_id or "")
    with connection.cursor() as cursor:
        return freeing.end(cursor, [Done(id, unique, success)])


def quiet_is_over() -> None:
    UniqueKey.objects.update(quiet_until=Now())


# Free


@pytest.mark.parametrize("option", ["skip", "raise", "update", "debounce", "requeue"])
def test_a_free_id_is_added(option: Any) -> None:
    """CAR-4, CAR-7: at once ready, or delayed."""
    copy = send(1, on_duplicate=option)
    message = the_message()
    assert copy == CopyReceipt("", "default", message.pk)
    assert (message.payload, message.unique_id, message.attempts) == ({"n": 1}, "u", 0)
    later = send(2, unique_id="v", on_duplicate=option, after=60)
    row = QueuedMessage.objects.with_state().get(pk=later.id)
    assert row.state == "delayed"


def test_options_together(settings: Any) -> None:
    """CAR-6: a delay, an id, what becomes of duplicates; how long a lease is its queue says."""
    settings.DJANGO_MQ = {"QUEUES": {"default": {"lease": 7}}}
    assert get_settings().queue("default").lease == 7.0
    assert told(send(1, after=60)) == ("added", "")
    assert told(send(2)) == ("duplicate", "waiting")
    assert told(send(2, on_duplicate="update")) == ("updated", "")
    assert told(send(3, on_duplicate="debounce")) == ("debounced", "")
    lease()
    assert told(send(4, on_duplicate="update")) == ("duplicate", "in_flight")
    assert told(send(4, on_duplicate="requeue")) == ("requeued", "")
    with pytest.raises(InvalidOption, match="on_duplicate must be one of"):
        send(5, on_duplicate="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"on_duplicate.*give unique_id"):
        send(5, unique_id=None, on_duplicate="update")
    assert the_message().payload == {"n": 3}


def test_without_an_id_nothing_is_unique(django_assert_num_queries: Any) -> None:
    """CAR-4: and it costs nothing."""
    with django_assert_num_queries(2):
        assert send(unique_id=None).id != send(unique_id=None).id
    assert not UniqueKey.objects.exists()


def test_a_duplicate_that_is_skipped_costs_one_look(django_assert_num_queries: Any) -> None:
    send()
    with django_assert_num_queries(1):
        send()


def test_an_id_is_unique_for_queue_handler_and_type() -> None:
    for name, queue in (("one", "q1"), ("two", "q2")):

        @handler("a.*", queue=queue, queues=("q3",), name=name)
        def function(delivery: Delivery) -> None: ...

    first = broadcast("a.b", unique_id="u")
    assert [(copy.handler, copy.outcome) for copy in first.copies] == [
        ("one", "added"),
        ("two", "added"),
    ]
    assert broadcast("a.c", unique_id="u").outcome == "added"
    assert broadcast("a.b", unique_id="v").outcome == "added"
    assert broadcast("a.b", unique_id="u", queue="q3").outcome == "added"
    assert broadcast("a.b", unique_id="u").outcome == "duplicate"


def test_copies_have_their_own_fates() -> None:
    for name in ("one", "two"):

        @handler("a.b", queue=name, name=name)
        def function(delivery: Delivery) -> None: ...

    ids = broadcast("a.b", unique_id="u").ids
    QueuedMessage.objects.filter(queue="one").delete()
    receipt = broadcast("a.b", unique_id="u")
    assert (receipt.outcome, bool(receipt)) == ("mixed", True)
    assert [(copy.outcome, copy.reason) for copy in receipt.copies] == [
        ("added", ""),
        ("duplicate", "waiting"),
    ]
    assert receipt.copies[1].id == ids[1]
    assert receipt.ids == (receipt.copies[0].id,)
    with pytest.raises(DuplicateMessage):
        broadcast("a.b", unique_id="u", on_duplicate="raise")


# Waiting


@pytest.mark.parametrize("after", [None, 60])
def test_while_it_waits_a_second_one_is_a_duplicate(after: Any) -> None:
    """CAR-8: delayed or not."""
    first = send(1, after=after)
    for option in ("skip", "requeue"):
        copy = send(2, on_duplicate=option)
        assert (told(copy), copy.id) == (("duplicate", "waiting"), first.id)
    receipt = broadcast("a.b", unique_id="u")
    assert (receipt.outcome, bool(receipt), receipt.ids) == ("duplicate", False, ())
    assert the_message().payload == {"n": 1}


def test_raise_says_which_and_leaves_the_transaction_usable() -> None:
    """CAR-8."""
    id = send(1).id
    with pytest.raises(DuplicateMessage, match=f"unique id u of a.b in queue default.* {id} waits"):
        send(2, on_duplicate="raise")
    assert the_message().payload == {"n": 1}


def test_update_replaces_content_and_options_and_keeps_its_place() -> None:
    """CAR-8: and the time of the first broadcast is kept."""
    first = send(1, after=60, priority=1, expires=600, key="k")
    QueuedMessage.objects.update(created_at=Now() - timedelta(hours=1), attempts=3)
    before = the_message()
    copy = send(
        2,
        on_duplicate="update",
        after=5,
        priority=7,
        schema_version=3,
        metadata={"tier": "gold"},
        retry=RetryPolicy(max_attempts=2),
        unique_for=9,
    )
    after = the_message()
    assert (told(copy), copy.id) == (("updated", ""), first.id)
    assert (after.payload, after.metadata, after.schema_version) == ({"n": 2}, {"tier": "gold"}, 3)
    assert (after.priority, after.key, after.expires_at) == (7, None, None)
    assert (after.attempts, after.max_attempts) == (3, 4)  # one attempt is left at least
    assert after.retry["max_attempts"] == 2
    assert after.unique_for == UniqueKey.objects.get().unique_for == timedelta(seconds=9)
    assert (after.created_at, after.processable_after) == (
        before.created_at,
        before.processable_after,
    )


def test_debounce_sets_the_due_time_anew() -> None:
    """CAR-9: without a delay it is due at once; and its content is new, too."""
    send(1, after=60)
    before = the_message()
    assert told(send(2, on_duplicate="debounce", after=3600)) == ("debounced", "")
    assert the_message().processable_after > before.processable_after + timedelta(minutes=50)
    send(3, on_duplicate="debounce")
    after = the_message()
    assert after.processable_after < before.processable_after
    assert after.created_at == before.created_at
    assert after.payload == {"n": 3}


@pytest.mark.parametrize(
    "columns",
    [
        {"held_since": Now(), "last_error": "no handler"},
        {"blocked_by": 1, "key": "k"},
        {"attempts": 2, "processable_after": Now() + timedelta(hours=1)},
        {"expires_at": Now() - timedelta(hours=1)},
    ],
    ids=["held", "blocked", "retrying", "expired"],
)
def test_whatever_it_waits_for_it_waits(columns: dict[str, Any]) -> None:
    send(1, key="k")
    QueuedMessage.objects.update(**columns)
    assert told(send(2)) == ("duplicate", "waiting")
    assert told(send(3, key="k", on_duplicate="update")) == ("updated", "")
    message = the_message()
    assert (message.payload, message.held_since) == ({"n": 3}, None)
    assert message.blocked_by == columns.get("blocked_by")


def test_a_message_that_leaves_its_key_frees_those_behind() -> None:
    first = send(1, key="k")
    [behind] = broadcast("a.b", key="k").ids
    QueuedMessage.objects.filter(pk=behind).update(blocked_by=first.id)
    send(2, key="other", on_duplicate="update")
    assert QueuedMessage.objects.get(pk=behind).blocked_by is None
    assert QueuedMessage.objects.get(pk=first.id).key == "other"


# In flight


@pytest.mark.parametrize("until", [timedelta(minutes=1), timedelta(minutes=-1)])
@pytest.mark.parametrize("option", ["skip", "update", "debounce"])
def test_what_a_worker_has_is_not_touched(option: Any, until: timedelta) -> None:
    """CAR-10: lapsed or not, since a frozen worker may still settle it."""
    send(1)
    message = lease(until=Now() + until)
    copy = send(2, on_duplicate=option)
    assert (told(copy), copy.id) == (("duplicate", "in_flight"), message.pk)
    with pytest.raises(DuplicateMessage, match="in flight"):
        send(2, on_duplicate="raise")
    assert the_message().payload == {"n": 1}


@pytest.mark.parametrize("success", [True, False])
def test_a_requeue_runs_when_the_one_in_flight_is_done(success: bool) -> None:
    """CAR-10, CAR-13, CAR-19, CAR-28: put aside, then a message like a new one."""
    send(1, priority=1)
    message = lease()
    copy = send(
        2, on_duplicate="requeue", priority=5, retry=RetryPolicy(max_attempts=3), metadata={"a": 1}
    )
    assert (told(copy), copy.id) == (("requeued", ""), None)
    assert the_message().payload == {"n": 1}
    assert the_message().priority == 1  # its options are for the later run alone
    [id] = handled(message, success=success)
    after = QueuedMessage.objects.get(pk=id)
    assert (after.payload, after.metadata, after.priority) == ({"n": 2}, {"a": 1}, 5)
    assert (after.attempts, after.max_attempts, after.unique_id) == (0, 3, "u")
    assert after.created_at > message.created_at
    assert after.pk > message.pk
    assert UniqueKey.objects.get().message_id == id
    assert told(send(3)) == ("duplicate", "waiting")


def test_a_second_requeue_replaces_what_was_put_aside() -> None:
    """CAR-10 as changed."""
    send(1)
    message = lease()
    assert [told(send(n, on_duplicate="requeue")) for n in (2, 3)] == [("requeued", "")] * 2
    [id] = handled(message)
    assert QueuedMessage.objects.get(pk=id).payload == {"n": 3}


def test_the_delay_of_a_requeue_counts_from_the_broadcast() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue", after=3600, expires=7200)
    aside = UniqueKey.objects.get(put_aside__isnull=False)
    [id] = handled(message)
    after = QueuedMessage.objects.get(pk=id)
    assert after.expires_at is not None
    assert after.expires_at - after.processable_after == timedelta(hours=1)
    assert after.processable_after == datetime.fromtimestamp(aside.put_aside["due"], UTC)


def test_what_is_tried_again_with_something_behind_it_counts_as_in_flight() -> None:
    """Otherwise older content would run after newer."""
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    QueuedMessage.objects.update(leased_until=None, claimed_by=None)  # a retry keeps the id
    assert told(send(3)) == ("duplicate", "in_flight")
    assert told(send(3, on_duplicate="update")) == ("duplicate", "in_flight")
    assert told(send(3, on_duplicate="requeue")) == ("requeued", "")
    [id] = handled(message)
    assert QueuedMessage.objects.get(pk=id).payload == {"n": 3}


# Quiet


def test_after_a_success_the_id_stays_taken() -> None:
    """CAR-11, CAR-23."""
    done(unique_for=60)
    for option in ("skip", "update", "debounce"):
        copy = send(on_duplicate=option)
        assert (told(copy), copy.id) == (("duplicate", "quiet"), None)
    with pytest.raises(DuplicateMessage, match="stays taken until"):
        send(on_duplicate="raise")
    assert not QueuedMessage.objects.exists()


def test_the_quiet_time_counts_from_the_ack() -> None:
    """CAR-23."""
    send(unique_for=timedelta(minutes=1))
    QueuedMessage.objects.update(created_at=Now() - timedelta(hours=1))
    message = lease()
    handled(message)
    left = UniqueKey.objects.annotate(now=Now()).get()
    assert timedelta(seconds=55) < left.quiet_until - left.now <= timedelta(minutes=1)


def test_when_the_quiet_time_is_over_the_id_is_free_without_a_sweep() -> None:
    """CAR-2, CAR-12."""
    done(unique_for=60)
    quiet_is_over()
    assert told(send(1)) == ("added", "")


def test_without_unique_for_it_is_free_at_once() -> None:
    """CAR-12, CAR-19: and all its records are gone."""
    done()
    assert not QueuedMessage.objects.exists()
    assert not UniqueKey.objects.exists()
    assert told(send()) == ("added", "")


def test_a_requeue_in_the_quiet_time_runs_after_it() -> None:
    """CAR-11."""
    done(unique_for=60)
    quiet_until = UniqueKey.objects.get().quiet_until
    copy = send(1, on_duplicate="requeue")
    assert (told(copy), copy.id) == (("requeued", ""), the_message().pk)
    assert the_message().processable_after == quiet_until
    assert told(send(2)) == ("duplicate", "waiting")


def test_a_requeue_in_flight_runs_after_the_quiet_time() -> None:
    """CAR-11, CAR-23."""
    send(1, unique_for=60)
    message = lease()
    send(2, on_duplicate="requeue")
    [id] = handled(message)
    after = QueuedMessage.objects.annotate(now=Now()).get(pk=id)
    assert timedelta(seconds=55) < after.processable_after - after.now <= timedelta(minutes=1)
    assert after.unique_for is None


def test_only_a_success_makes_it_quiet() -> None:
    send(1, unique_for=60)
    handled(lease(), success=False)
    assert told(send(2)) == ("added", "")


# Gone


def test_a_dead_message_has_no_id_any_more() -> None:
    send(1)
    QueuedMessage.objects.update(dead_at=Now(), dead_reason="exhausted")  # and nobody said so
    assert told(send(2)) == ("added", "")


def test_a_row_that_others_removed_frees_its_id() -> None:
    send(1)
    with connection.cursor() as cursor:
        cursor.execute("delete from django_mq_queuedmessage")
    assert told(send(2, on_duplicate="raise")) == ("added", "")


def test_a_row_that_others_removed_lets_what_is_aside_come_forward() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    QueuedMessage.objects.filter(pk=message.pk).delete()
    copy = send(3)
    assert (told(copy), copy.id) == (("duplicate", "waiting"), the_message().pk)
    assert the_message().payload == {"n": 2}


def test_a_rollback_frees_the_id() -> None:
    for _ in range(2):
        with transaction.atomic():
            assert told(send(1)) == ("added", "")
            transaction.set_rollback(True)
    assert not UniqueKey.objects.exists()


# Several at once


def test_the_later_sees_the_earlier() -> None:
    receipts = broadcast_many(
        [
            Message("a.b", 1, unique_id="u", after=60),
            Message("a.b", 2),
            Message("a.b", 3, unique_id="u"),
            Message("a.b", 4, unique_id="u", on_duplicate="update"),
            Message("a.b", 5, unique_id="v"),
        ]
    )
    assert [receipt.outcome for receipt in receipts] == [
        "added",
        "added",
        "duplicate",
        "updated",
        "added",
    ]
    rows = QueuedMessage.objects.order_by("id")
    assert [row.payload for row in rows] == [4, 2, 5]  # ids rise in the order of the messages
    assert [receipt.copies[0].id for receipt in receipts] == [
        rows[0].pk,
        rows[1].pk,
        rows[0].pk,
        rows[0].pk,
        rows[2].pk,
    ]
    assert rows[0].processable_after > rows[1].processable_after


def test_all_or_none() -> None:
    send(1)
    with pytest.raises(DuplicateMessage):
        broadcast_many(
            [
                Message("plain"),
                Message("a.b", unique_id="new"),
                Message("a.b", unique_id="u", on_duplicate="raise"),
            ]
        )
    assert QueuedMessage.objects.count() == UniqueKey.objects.count() == 1


def test_a_call_needs_as_many_statements_for_many_as_for_one(
    django_assert_num_queries: Any,
) -> None:
    """Look, savepoint, limit, draw, add, restore, release."""
    for count in (1, 200):
        with django_assert_num_queries(7):
            broadcast_many([Message("a.b", unique_id=f"{count}/{n}") for n in range(count)])


def test_a_stream_counts_what_was_stored_or_changed() -> None:
    send(0, unique_id="0")
    messages = (
        Message("a.b", n, unique_id=str(n % 4), on_duplicate="update" if n == 5 else "skip")
        for n in range(8)
    )
    assert broadcast_many(messages).count == 4
    assert sorted(row.payload for row in QueuedMessage.objects.exclude(unique_id="0")) == [2, 3, 5]


def test_a_stream_may_mix_both_kinds() -> None:
    kinds = (Message("a.b", n, unique_id=str(n) if n % 2 else None) for n in range(100))
    assert broadcast_many(kinds).count == 100
    rows = QueuedMessage.objects.order_by("id")
    assert [row.payload for row in rows] == list(range(100))


# Cancelling


def test_cancel_frees_the_id() -> None:
    id = send(1).id
    send(2, unique_id="other")
    assert cancel(unique_id="u").ids == (id,)
    assert told(send(3)) == ("added", "")


def test_cancel_takes_what_is_put_aside_along() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    cancelled = cancel(unique_id="u")
    assert (cancelled.ids, cancelled.in_flight, cancelled.put_aside) == ((), 1, 1)
    assert cancelled
    assert handled(message) == []


def test_cancelling_one_message_lets_what_is_aside_come_forward() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    QueuedMessage.objects.update(leased_until=None, claimed_by=None)
    assert cancel(id=message.pk).ids == (message.pk,)
    assert the_message().payload == {"n": 2}


def test_cancel_frees_those_behind_its_key() -> None:
    [first] = broadcast("a.b", key="k").ids
    [behind] = broadcast("b.b", key="k").ids
    QueuedMessage.objects.filter(pk=behind).update(blocked_by=first)
    cancel(type="a.b")
    assert stored(the_message()).blocked_by is None


# For tests


def test_a_duplicate_is_not_captured() -> None:
    with capture_broadcasts() as broadcasts:
        send(1, key="k")
        send(2)
        send(3, on_duplicate="update")
        broadcast_many(Message("c.d", n, unique_id="x") for n in range(2))
    assert [(each.type, each.payload, each.unique_id, each.key) for each in broadcasts] == [
        ("a.b", {"n": 1}, "u", "k"),
        ("a.b", {"n": 3}, "u", None),
        ("c.d", 0, "x", None),
    ]
    assert_broadcast("a.b", times=1)
