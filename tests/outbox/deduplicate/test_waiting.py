"""A unique id that is free, and one whose message waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from django.db import connection
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
    handler,
)
from django_mq.conf import get_settings
from django_mq.messages import OnDuplicate
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.store.expiry import expire
from tests.outbox.deduplicate.conftest import handled, lease, send, told
from tests.rows import the_message

pytestmark = pytest.mark.django_db


# Free


@pytest.mark.parametrize("option", get_args(OnDuplicate))
def test_a_free_id_is_added(option: Any) -> None:
    """CAR-4, CAR-7: ready at once, or delayed."""
    copy = send(1, on_duplicate=option)
    message = the_message()
    assert copy == CopyReceipt("", "default", message.pk)
    assert (message.payload, message.unique_id, message.attempts) == ({"n": 1}, "u", 0)
    later = send(2, unique_id="v", on_duplicate=option, after=60)
    row = QueuedMessage.objects.with_state().get(pk=later.id)
    assert row.state == "delayed"


def test_options_together(settings: Any) -> None:
    """CAR-6: a delay, an id, the handling of duplicates; the queue decides the lease time."""
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
    assert the_message().payload == {"n": 2}


def test_without_an_id_nothing_is_unique(django_assert_num_queries: Any) -> None:
    """CAR-4: without an id, uniqueness costs nothing."""
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
    """CAR-5, CAR-8: delayed or not."""
    first = send(1, after=after)
    for option in ("skip", "requeue"):
        copy = send(2, on_duplicate=option)
        assert (told(copy), copy.id) == (("duplicate", "waiting"), first.id)
    receipt = broadcast("a.b", unique_id="u")
    assert (receipt.outcome, bool(receipt), receipt.ids) == ("duplicate", False, ())
    assert the_message().payload == {"n": 1}


def test_raise_names_the_message_and_leaves_the_transaction_usable() -> None:
    """CAR-8."""
    id = send(1).id
    with pytest.raises(DuplicateMessage, match=f"unique id u of a.b in queue default.* {id} waits"):
        send(2, on_duplicate="raise")
    assert the_message().payload == {"n": 1}


def test_update_replaces_content_and_options_and_keeps_its_place() -> None:
    """CAR-8: it also keeps the time of the first broadcast."""
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
    assert (after.attempts, after.max_attempts) == (3, 4)  # at least one attempt is left
    assert after.retry["max_attempts"] == 2
    assert after.unique_for == UniqueKey.objects.get().unique_for == timedelta(seconds=9)
    assert (after.created_at, after.processable_after) == (
        before.created_at,
        before.processable_after,
    )


@pytest.mark.parametrize(("option", "outcome"), [("debounce", "debounced"), ("replace", "updated")])
def test_due_time_is_set_again(option: Any, outcome: str) -> None:
    """CAR-9: without a delay it is due at once."""
    id = send(1, after=60).id
    before = the_message()
    copy = send(2, on_duplicate=option, after=3600)
    assert (told(copy), copy.id) == ((outcome, ""), id)
    assert the_message().processable_after > before.processable_after + timedelta(minutes=50)
    at = datetime.now(UTC) + timedelta(hours=5)
    send(2, on_duplicate=option, after=at)
    assert the_message().processable_after == at
    send(3, on_duplicate=option)
    after = the_message()
    assert after.processable_after < before.processable_after
    assert after.created_at == before.created_at


def test_debounce_changes_the_due_time_alone() -> None:
    """CAR-9: content, options, key and position in the key stay unchanged."""
    send(1, key="k", priority=3, expires=7200, unique_for=60, metadata={"a": 1})
    changes = {"blocked_by": 1, "attempts": 2, "held_since": Now(), "last_error": "away"}
    QueuedMessage.objects.update(**changes)
    [before] = QueuedMessage.objects.values()
    send(2, on_duplicate="debounce", after=3600, retry=RetryPolicy(max_attempts=9), priority=9)
    [after] = QueuedMessage.objects.values()
    assert before.pop("processable_after") < after.pop("processable_after")
    assert after == before
    assert UniqueKey.objects.get().unique_for == timedelta(seconds=60)


def test_replace_sets_the_content_too() -> None:
    """CAR-9: `update` and `debounce` together."""
    send(1, key="k", after=60)
    send(2, on_duplicate="replace", key="other", priority=7, after=3600)
    message = the_message()
    assert (message.payload, message.key, message.priority) == ({"n": 2}, "other", 7)
    assert message.processable_after > datetime.now(UTC) + timedelta(minutes=50)


def test_the_messages_of_one_call_set_content_and_due_time() -> None:
    send(1, after=60)
    update, debounce = (
        Message("a.b", {"n": n}, unique_id="u", on_duplicate=option, after=3600 * n)
        for n, option in enumerate(("update", "debounce"), start=2)
    )
    outcomes = [each.outcome for each in broadcast_many([update, debounce])]
    assert outcomes == ["updated", "debounced"]
    message = the_message()
    assert message.payload == {"n": 2}
    assert message.processable_after > datetime.now(UTC) + timedelta(hours=2.5)
    assert [each.outcome for each in broadcast_many([debounce, debounce])] == ["debounced"] * 2
    assert the_message().payload == {"n": 2}


def test_rerun_updates_a_waiting_message() -> None:
    """Any run starts after this commit: the row is locked until then."""
    id = send(1, after=60, priority=1).id
    due = the_message().processable_after
    copy = send(2, on_duplicate="rerun", after=3600, priority=5)
    assert (told(copy), copy.id) == (("updated", ""), id)
    message = the_message()
    assert (message.payload, message.priority, message.processable_after) == ({"n": 2}, 5, due)


@pytest.mark.parametrize(
    "columns",
    [
        {"held_since": Now(), "last_error": "no handler"},
        {"blocked_by": 1, "key": "k"},
        {"attempts": 2, "processable_after": Now() + timedelta(hours=1)},
    ],
    ids=["held", "blocked", "retrying"],
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


@pytest.mark.parametrize("option", get_args(OnDuplicate))
def test_a_message_that_expired_while_it_waited_holds_no_id(option: Any) -> None:
    """Its chore may be long in coming: it is dead for the next broadcast."""
    expired = send(1, expires=60).id
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    copy = send(2, on_duplicate=option)
    assert (told(copy), copy.id != expired) == (("added", ""), True)
    with connection.cursor() as cursor:
        assert [row.id for row in expire(cursor, limit=10)] == [expired]
    handled(QueuedMessage.objects.get(pk=expired), success=False)
    assert told(send(3)) == ("duplicate", "waiting"), "its end freed the id of another message"


def test_a_message_that_expired_in_flight_holds_its_id() -> None:
    send(1, expires=60)
    lease()
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    assert told(send(2)) == ("duplicate", "in_flight")


def test_put_aside_message_does_not_wait_for_an_expired_one() -> None:
    send(1, expires=60)
    lease()
    send(2, on_duplicate="requeue")
    QueuedMessage.objects.update(
        leased_until=None, claimed_by=None, expires_at=Now() - timedelta(seconds=1)
    )
    assert told(send(3)) == ("duplicate", "waiting")
    assert QueuedMessage.objects.get(expires_at=None).payload == {"n": 2}


def test_debounce_moves_no_message_past_its_expiry() -> None:
    """It could never start. Whatever is debounced for too long runs when it was last due."""
    send(1, after=10, expires=60)
    before = the_message().processable_after
    assert told(send(2, after=3600, on_duplicate="debounce")) == ("debounced", "")
    assert the_message().processable_after == before
    send(2, after=30, on_duplicate="debounce")
    assert the_message().processable_after > before


@pytest.mark.parametrize(
    ("option", "waits"),
    [("skip", False), ("update", False), ("update", True), ("replace", False), ("replace", True)],
)
@pytest.mark.parametrize("moved_to", [[], [10]])
def test_debounce_in_the_same_call_never_passes_the_expiry(
    option: Any, waits: bool, moved_to: list[int]
) -> None:
    before = datetime.now(UTC)
    if waits:
        send(0, after=5)
    content = Message("a.b", 1, unique_id="u", on_duplicate=option, after=5, expires=60)
    debounces = [
        Message("a.b", 2, unique_id="u", on_duplicate="debounce", after=after)
        for after in (*moved_to, timedelta(hours=1))
    ]
    outcomes = [each.outcome for each in broadcast_many([content, *debounces])]
    after = datetime.now(UTC)
    assert outcomes == ["updated" if waits else "added"] + ["debounced"] * len(debounces)
    message = the_message()
    assert message.payload == 1
    due = message.processable_after - timedelta(seconds=(moved_to or [5])[0])
    assert before <= due <= after


@pytest.mark.parametrize("option", ["update", "rerun"])
@pytest.mark.parametrize(("after", "delay"), [(None, 0), (30, 30)])
def test_a_message_that_would_expire_before_it_is_due_gets_the_due_time_of_the_new_one(
    option: Any, after: int | None, delay: int
) -> None:
    """With its own due time, such as that of a retry, it could never start."""
    send(1, after=7200)
    before = datetime.now(UTC)
    assert told(send(2, on_duplicate=option, after=after, expires=600)) == ("updated", "")
    due = the_message().processable_after - timedelta(seconds=delay)
    assert before <= due <= datetime.now(UTC)


@pytest.mark.parametrize("option", ["update", "rerun"])
def test_a_message_that_expires_after_its_due_time_keeps_that(option: Any) -> None:
    send(1, after=60)
    before = the_message().processable_after
    send(2, on_duplicate=option, expires=600)
    assert the_message().processable_after == before


@pytest.mark.parametrize("option", ["update", "rerun"])
def test_same_call_also_takes_the_due_time_of_the_new_one(option: Any) -> None:
    first = Message("a.b", 1, unique_id="u", after=7200)
    broadcast_many([first, Message("a.b", 2, unique_id="u", on_duplicate=option, expires=600)])
    message = the_message()
    assert message.payload == 2
    assert message.processable_after < datetime.now(UTC) + timedelta(seconds=10)
