"""Unique ids at the end of messages: whatever the end, in the same transaction."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_mq import Delivery, Reject, Retry, RetryPolicy, Snooze, broadcast, handler
from django_mq.conf import get_settings
from django_mq.executor.statements import Statements
from django_mq.messages import Fence
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.testing import drain
from django_mq.worker import chores
from django_mq.worker.recovery import DeadWorker
from tests.database import second_connection
from tests.rows import the_message
from tests.worker.conftest import Bench, Said, Start
from tests.worker.unique import free, send, subscribe

pytestmark = pytest.mark.django_db(transaction=True)


def requeue_within(delivery: Delivery) -> None:
    if delivery.payload == 0:
        with transaction.atomic():
            assert broadcast("a.b", 1, unique_id="u", on_duplicate="requeue").outcome == "requeued"


@pytest.mark.parametrize("atomic", [True, False])
def test_an_ack_frees_the_id(atomic: bool) -> None:
    """CAR-19, CAR-29."""
    subscribe(lambda delivery: None, atomic=atomic)
    send()
    assert not free()
    drain()
    assert free()
    assert not UniqueKey.objects.exists()


@pytest.mark.parametrize("atomic", [True, False])
def test_an_ack_begins_the_quiet_time(atomic: bool) -> None:
    """CAR-23."""
    subscribe(lambda delivery: None, atomic=atomic)
    send(unique_for=60)
    drain()
    assert send(1).copies[0].reason == "quiet"


@pytest.mark.parametrize(
    "error", [Retry(after=60), Snooze(60), ValueError("no")], ids=["retry", "snooze", "error"]
)
def test_message_that_runs_again_keeps_its_id(error: Exception) -> None:
    """CAR-24."""

    def fail(delivery: Delivery) -> None:
        raise error

    got = subscribe(fail)
    [id] = send(unique_for=60).ids
    drain(errors="keep")
    assert got == [0]
    assert UniqueKey.objects.get().message_id == id
    assert send(1).copies[0].reason == "waiting"


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("error", "retry"),
    [(Reject("never"), None), (ValueError("no"), RetryPolicy.never())],
    ids=["rejected", "exhausted"],
)
def test_dead_letter_frees_the_id_and_promotes_the_put_aside_message(
    error: Exception, retry: RetryPolicy | None, atomic: bool
) -> None:
    """CAR-25, CAR-28: whenever the message ends, even after an error."""

    def fail(delivery: Delivery) -> None:
        if not atomic:  # an atomic handler's broadcasts are undone with it
            requeue_within(delivery)
        if delivery.payload == 0:
            raise error

    got = subscribe(fail, atomic=atomic)
    send(retry=retry, unique_for=60)
    drain(errors="keep")
    assert QueuedMessage.objects.get(dead_at__isnull=False).unique_id == "u"
    assert got == ([0] if atomic else [0, 1])
    assert free()


def test_a_handler_may_requeue_itself() -> None:
    """CAR-10, CAR-19: the put-aside message commits with the handler's own end."""
    got = subscribe(requeue_within)
    send(0)
    drain()
    assert got == [0, 1]
    assert free()


def test_a_handler_that_fails_has_put_nothing_aside() -> None:
    def fail(delivery: Delivery) -> None:
        broadcast("a.b", 1, unique_id="u", on_duplicate="requeue")
        raise Reject("no")

    got = subscribe(fail)
    send(0)
    drain()
    assert got == [0]
    assert not UniqueKey.objects.exists()


def test_a_finish_frees_the_id_with_its_own_writes() -> None:
    """CAR-29: in the same step."""
    seen: list[bool] = []

    def function(delivery: Delivery) -> None:
        requeue_within(delivery)
        if delivery.payload == 0:
            with delivery.finish():
                seen.append(UniqueKey.objects.filter(message_id=delivery.id).exists())
            seen.append(UniqueKey.objects.filter(message_id=delivery.id).exists())

    got = subscribe(function, atomic=False)
    send(0)
    drain()
    assert (got, seen) == ([0, 1], [True, False])
    assert free()


def test_a_finish_that_fails_keeps_the_id() -> None:
    def function(delivery: Delivery) -> None:
        with delivery.finish():
            raise Reject("no")

    subscribe(function, atomic=False)
    send(0, unique_for=60)
    drain()
    assert QueuedMessage.objects.get().dead_reason == "no"
    assert free()


def test_a_finish_in_async_handlers(start: Start) -> None:
    """CAR-23."""

    @handler("a.b", name="h", queue="mail")
    async def function(delivery: Delivery) -> None:
        await delivery.afinish(lambda: None)

    send(0, unique_for=60)
    start(until_empty=True).join()
    assert send(1).copies[0].reason == "quiet"


def test_an_unrouted_message_is_freed_under_the_name_it_was_taken() -> None:
    """It was broadcast without a known handler; a worker found two."""
    send(0, queue="mail", unique_for=60)
    got = subscribe(lambda delivery: None)
    more = subscribe(lambda delivery: None, name="second")
    drain()
    assert (got, more) == ([0], [0])
    key = UniqueKey.objects.get()
    assert (key.handler, key.message_id, key.quiet_until is not None) == ("", None, True)


def test_a_lost_lease_frees_nothing(bench: Bench) -> None:
    """Guarantee 4: the fence holds for the id, too."""
    got = subscribe(lambda delivery: None)
    [id] = send().ids
    tasks = bench.claim()
    QueuedMessage.objects.update(attempts=7)
    bench.run_all(tasks)
    assert got == [0] * bench.fresh  # which may start before the result is known
    assert UniqueKey.objects.get().message_id == id
    assert the_message().pk == id


def test_an_expired_message_frees_its_id() -> None:
    subscribe(lambda delivery: None)
    send(expires=60)
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    assert the_message().dead_reason == "expired"
    assert not UniqueKey.objects.exists()


def test_last_attempt_of_a_dead_process_frees_its_id(start: Start, said: Said) -> None:
    """The last attempt dies with its process: a sibling settles it; the put-aside message runs."""
    got = subscribe(lambda delivery: None)
    send(0, retry=RetryPolicy.never())
    QueuedMessage.objects.update(
        claimed_by="dead:1", attempts=1, leased_until=Now() + timedelta(minutes=5)
    )
    send(1, on_duplicate="requeue")
    message = the_message()
    running = start()
    said.wait("worker_started")
    dead = DeadWorker("dead", "killed", lost=[Fence(message.pk, 1, "dead:1")])
    running.worker.recover(dead, lambda: None)
    said.wait("message_acked")
    running.stop()
    assert got == [1]
    assert QueuedMessage.objects.get().dead_reason == "exhausted"
    assert not UniqueKey.objects.exists()


def test_chores_promote_remaining_put_aside_messages() -> None:
    """A last attempt that vanished with its host; a row deleted by hand."""
    for n, ending in enumerate(("dead", "deleted")):
        send(n, unique_id=ending)
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    for n, ending in enumerate(("dead", "deleted")):
        send(n + 10, unique_id=ending, on_duplicate="requeue")
    QueuedMessage.objects.filter(unique_id="deleted").delete()
    QueuedMessage.objects.update(
        claimed_by=None, leased_until=None, dead_at=Now(), dead_reason="exhausted"
    )
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    waiting = QueuedMessage.objects.filter(dead_at=None)
    assert sorted(waiting.values_list("payload", flat=True)) == [10, 11]
    held = UniqueKey.objects.values_list("message_id", flat=True)
    assert set(held) == set(waiting.values_list("pk", flat=True))


def test_chores_skip_a_locked_unique_id() -> None:
    """An id that another session is just taking is left for later: the other chores run first."""
    send(0)
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    send(1, on_duplicate="requeue")
    QueuedMessage.objects.all().delete()
    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute("select from django_mq_uniquekey where put_aside is null for update")
        own = Statements("default", limits=chores.LIMITS)
        try:
            assert chores.run(own.cursor(), get_settings())
            assert own.is_idle()
        finally:
            own.close()
    assert not QueuedMessage.objects.exists()


def test_the_chores_forget_quiet_times_that_are_over() -> None:
    subscribe(lambda delivery: None)
    for id in ("old", "new"):
        send(unique_id=id, unique_for=60)
    drain()
    UniqueKey.objects.filter(unique_id="old").update(quiet_until=Now())
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    assert UniqueKey.objects.get().unique_id == "new"


def test_the_chores_leave_the_id_of_a_message_that_waited_for_the_end() -> None:
    subscribe(lambda delivery: None)
    send(unique_id="u", unique_for=60)
    drain()
    send(unique_id="u", on_duplicate="requeue")
    UniqueKey.objects.update(quiet_until=Now())
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    assert UniqueKey.objects.get().quiet_until is None
    assert send(unique_id="u").outcome == "duplicate"
