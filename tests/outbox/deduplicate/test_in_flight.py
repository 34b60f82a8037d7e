"""A unique id whose message is in flight, quiet, or gone."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import DuplicateMessage, RetryPolicy
from django_mq.models import QueuedMessage, UniqueKey
from tests.outbox.deduplicate.conftest import handled, lease, send, told
from tests.rows import the_message

pytestmark = pytest.mark.django_db


def done(**options: Any) -> None:
    """Broadcast, claim and ack a message."""
    message_id = send(**options).id
    message = lease()
    assert message.pk == message_id
    handled(message)


def quiet_is_over() -> None:
    UniqueKey.objects.update(quiet_until=Now())


# In flight


@pytest.mark.parametrize("until", [timedelta(minutes=1), timedelta(minutes=-1)])
@pytest.mark.parametrize("option", ["skip", "update", "debounce", "replace"])
def test_claimed_message_is_not_changed(option: Any, until: timedelta) -> None:
    """CAR-10: even if its lease lapsed, since a frozen worker may still settle it."""
    send(1)
    message = lease(until=Now() + until)
    copy = send(2, on_duplicate=option)
    assert (told(copy), copy.id) == (("duplicate", "in_flight"), message.pk)
    with pytest.raises(DuplicateMessage, match="in flight"):
        send(2, on_duplicate="raise")
    assert the_message().payload == {"n": 1}


@pytest.mark.parametrize("success", [True, False])
def test_a_requeue_runs_when_the_one_in_flight_is_done(success: bool) -> None:
    """CAR-10, CAR-13, CAR-19, CAR-28: it is put aside, then becomes an ordinary new message."""
    send(1, priority=1)
    message = lease()
    copy = send(
        2, on_duplicate="requeue", priority=5, retry=RetryPolicy(max_attempts=3), metadata={"a": 1}
    )
    assert (told(copy), copy.id) == (("requeued", ""), None)
    assert the_message().payload == {"n": 1}
    assert the_message().priority == 1  # its options apply only to the later run
    [id] = handled(message, success=success)
    after = QueuedMessage.objects.get(pk=id)
    assert (after.payload, after.metadata, after.priority) == ({"n": 2}, {"a": 1}, 5)
    assert (after.attempts, after.max_attempts, after.unique_id) == (0, 3, "u")
    assert after.created_at > message.created_at
    assert after.pk > message.pk
    assert UniqueKey.objects.get().message_id == id
    assert told(send(3)) == ("duplicate", "waiting")


def test_second_requeue_replaces_the_put_aside_message() -> None:
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


def test_retry_with_a_put_aside_message_counts_as_in_flight() -> None:
    """Otherwise older content would run after newer content."""
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
    for option in ("skip", "update", "debounce", "replace"):
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
    """CAR-12, CAR-19: and all its records are deleted."""
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
    QueuedMessage.objects.update(dead_at=Now(), dead_reason="exhausted")  # nobody was told
    assert told(send(2)) == ("added", "")


def test_a_row_that_others_removed_frees_its_id() -> None:
    send(1)
    with connection.cursor() as cursor:
        cursor.execute("delete from django_mq_queuedmessage")
    assert told(send(2, on_duplicate="raise")) == ("added", "")


def test_removed_row_promotes_the_put_aside_message() -> None:
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


@pytest.mark.parametrize("success", [True, False])
def test_rerun_of_a_running_message_is_put_aside(success: bool) -> None:
    send(1)
    message = lease()
    for number in (2, 3):  # the last one wins
        copy = send(number, on_duplicate="rerun")
        assert (told(copy), copy.id) == (("requeued", ""), None)
    assert the_message().payload == {"n": 1}
    [id] = handled(message, success=success)
    assert QueuedMessage.objects.get(pk=id).payload == {"n": 3}
    assert told(send(4, on_duplicate="rerun")) == ("updated", "")
    assert QueuedMessage.objects.get(pk=id).payload == {"n": 4}


def test_a_rerun_in_the_quiet_time_runs_after_it() -> None:
    done(unique_for=60)
    assert told(send(2, on_duplicate="rerun")) == ("requeued", "")
    message = the_message()
    assert message.payload == {"n": 2}
    assert message.processable_after > datetime.now(UTC) + timedelta(seconds=30)


def test_one_look_after_the_commit_of_many_that_were_put_aside() -> None:
    """Also if a savepoint was rolled back in between, with the rows that it had put aside."""
    ids = [f"u{n}" for n in range(3)]
    for id in ids:
        send(1, unique_id=id)
    QueuedMessage.objects.update(leased_until=Now(), claimed_by="worker:1", attempts=1)
    before = len(connection.run_on_commit)
    for id in ids:
        with suppress(ZeroDivisionError), transaction.atomic():
            send(2, unique_id=id, on_duplicate="rerun")
            if id == "u1":
                raise ZeroDivisionError
    assert len(connection.run_on_commit) == before + 1
    QueuedMessage.objects.all().delete()  # a session that did not see what is put aside
    [*_, (_, look, _)] = connection.run_on_commit
    look()
    stored = QueuedMessage.objects.values_list("unique_id", "payload")
    assert sorted(stored) == [("u0", {"n": 2}), ("u2", {"n": 2})]
