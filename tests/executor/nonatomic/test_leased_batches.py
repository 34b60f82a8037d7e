"""Lists of deliveries outside a transaction: each is settled by its own verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from django_mq import Delivery, LeaseLost, Reject, Retry, RetryPolicy, Snooze, fixed
from django_mq.executor.scoreboard import Entry
from django_mq.models import QueuedMessage
from tests.executor.nonatomic.conftest import NonAtomicBench, on, take_over
from tests.rows import add, stored
from tests.worker.conftest import Said, add_many, attempts_of, waiting

pytestmark = pytest.mark.django_db(transaction=True)

LATER = RetryPolicy(backoff=fixed(60))


def run(bench: NonAtomicBench) -> bool:
    """Claim what is due and run it in one call."""
    return bench.nonatomic.run(bench.claim())


def batch(**options: Any) -> Callable[[Any], Any]:
    return on(batch=True, retry=LATER, **options)


def attempts_left(messages: list[QueuedMessage]) -> dict[int, int]:
    there = waiting()
    return {n: stored(each).attempts for n, each in enumerate(messages) if each.pk in there}


def test_a_list_is_acked_at_once_outside_any_transaction(
    nonatomic: NonAtomicBench, said: Said
) -> None:
    lists: list[list[int]] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        assert not connection.in_atomic_block
        lists.append([each.id for each in deliveries])

    messages = add_many(4, handler="h")
    assert run(nonatomic)
    assert lists == [[each.pk for each in messages]]
    assert waiting() == set()
    assert nonatomic.settled == lists[0]
    assert (said.count("message_started"), said.count("message_acked")) == (4, 4)


def test_each_is_settled_by_its_own_verdict(nonatomic: NonAtomicBench) -> None:
    @batch()
    def h(deliveries: list[Delivery]) -> None:
        deliveries[1].fail(ConnectionError("away"))
        deliveries[2].retry(after=50)
        deliveries[3].snooze(50)
        deliveries[4].reject("no such mailbox")

    messages = add_many(6, handler="h")
    run(nonatomic)
    assert attempts_left(messages) == {1: 1, 2: 1, 3: 0, 4: 1}
    assert [attempts_of(each) for each in messages[1:4]] == [
        ["ConnectionError"],
        ["django_mq.exceptions.Retry"],
        [],
    ]
    assert [stored(each).dead_reason for each in messages[1:5]] == ["", "", "", "no such mailbox"]


def test_fail_accepts_a_text_as_reason(nonatomic: NonAtomicBench) -> None:
    @batch()
    def h(deliveries: list[Delivery]) -> None:
        deliveries[0].fail("mailbox full")

    messages = add_many(2, handler="h")
    run(nonatomic)
    assert attempts_left(messages) == {0: 1}
    assert stored(messages[0]).last_error == "Exception: mailbox full"
    assert attempts_of(messages[0]) == ["Exception"]


def test_the_last_verdict_wins(nonatomic: NonAtomicBench) -> None:
    @batch()
    def h(deliveries: list[Delivery]) -> None:
        deliveries[0].reject("first")
        deliveries[0].retry()
        deliveries[0].snooze(50)

    [message] = add_many(1, handler="h")
    run(nonatomic)
    assert (stored(message).attempts, message.dead_at) == (0, None)


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (ValueError(), {0: 1, 1: 0, 2: 1}),
        (SystemExit(), {0: 1, 1: 0, 2: 1}),
        (Retry(50), {0: 1, 1: 0, 2: 1}),
        (Snooze(50), {0: 0, 1: 0, 2: 0}),
        (Reject("all"), {0: 1, 1: 0, 2: 1}),
    ],
    ids=repr,
)
def test_an_error_ends_those_without_a_verdict(
    nonatomic: NonAtomicBench, error: BaseException, left: dict[int, int]
) -> None:
    @batch()
    def h(deliveries: list[Delivery]) -> None:
        deliveries[1].snooze(50)
        raise error

    messages = add_many(3, handler="h")
    run(nonatomic)
    assert attempts_left(messages) == left
    assert attempts_of(messages[1]) == []


def test_nothing_behind_one_that_does_not_start_runs(nonatomic: NonAtomicBench) -> None:
    lists: list[list[int]] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        lists.append([each.id for each in deliveries])

    messages = [add(handler="h", key=key) for key in "abab"]
    tasks = nonatomic.claim_with_keys()
    take_over(messages[1].pk)
    assert nonatomic.nonatomic.run(tasks)
    assert lists == [[messages[0].pk, messages[2].pk]]
    assert attempts_left(messages) == {1: 2, 3: 0}


def test_one_that_is_not_acked_releases_its_followers(nonatomic: NonAtomicBench) -> None:
    """They have run, but must follow it: they run again, without using an attempt."""

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        deliveries[1].fail(ValueError())

    messages = [add(handler="h", key=key) for key in "abab"]
    tasks = nonatomic.claim_with_keys()
    assert len(tasks) == 4
    assert nonatomic.nonatomic.run(tasks)
    assert attempts_left(messages) == {1: 1, 3: 0}
    assert stored(messages[3]).claimed_by is None
    assert attempts_of(messages[3]) == []


def test_expired_and_lost_ones_are_left_out(nonatomic: NonAtomicBench, said: Said) -> None:
    lists: list[list[int]] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        lists.append([each.id for each in deliveries])

    expired, taken, third = add(handler="h", expires=-1), *add_many(2, handler="h")
    tasks = nonatomic.claim()
    take_over(taken.pk)
    assert nonatomic.nonatomic.run(tasks)
    assert lists == [[third.pk]]
    assert stored(expired).dead_reason == "expired"
    assert waiting() == {expired.pk, taken.pk}
    assert said.ids("message_acked") == [third.pk]


def test_one_lease_lost_meanwhile_costs_the_others_nothing(nonatomic: NonAtomicBench) -> None:
    messages = add_many(3, handler="h")

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        take_over(messages[1].pk)

    run(nonatomic)
    assert waiting() == {messages[1].pk}


def test_extend_moves_all(nonatomic: NonAtomicBench) -> None:
    deadlines: list[tuple[int, float]] = []

    @batch(timeout=5)
    def h(deliveries: list[Delivery]) -> None:
        before = {each.fence.id: each.deadline for each in nonatomic.scoreboard.read("me")}
        deliveries[0].extend(1000)
        for entry in nonatomic.scoreboard.read("me"):
            deadlines.append((entry.fence.id, entry.deadline - before[entry.fence.id]))
        leased = QueuedMessage.objects.values_list("leased_until", flat=True)
        assert len(set(leased)) == 1

    messages = add_many(3, handler="h")
    run(nonatomic)
    assert waiting() == set()
    assert [id for id, _ in deadlines] == [each.pk for each in messages]
    assert all(moved > 900 for _, moved in deadlines)


def test_the_scoreboard_charges_those_without_a_verdict(nonatomic: NonAtomicBench) -> None:
    """One message stays: otherwise a call that kills its process after its last verdict would
    repeat for ever.
    """
    seen: list[list[Entry]] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            seen.append(list(nonatomic.scoreboard.read("me")))
            delivery.retry()
        seen.append(list(nonatomic.scoreboard.read("me")))

    ids = [each.pk for each in add_many(3, handler="h")]
    run(nonatomic)
    charged = [[entry.fence.id for entry in entries] for entries in seen]
    assert charged == [ids, ids[1:], ids[2:], ids[2:]]
    assert not any(entry.atomic for entries in seen for entry in entries)
    assert nonatomic.scoreboard.running() == []


def test_misuse_is_refused_where_it_happens(nonatomic: NonAtomicBench) -> None:
    kept: list[Delivery] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        [delivery] = deliveries
        kept.append(delivery)
        with pytest.raises(TypeError, match="that get one delivery"):
            delivery.finish()
        with pytest.raises(TypeError, match="give an exception"):
            delivery.fail(KeyboardInterrupt())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="zero or more"):
            delivery.snooze(-1)

    add(handler="h")
    run(nonatomic)
    assert waiting() == set()
    with pytest.raises(LeaseLost):
        kept[0].retry()


def test_verdicts_need_a_list(nonatomic: NonAtomicBench) -> None:
    refused: list[str] = []

    @on()
    def h(delivery: Delivery) -> None:
        verdicts: list[Callable[[], None]] = [
            delivery.retry,
            delivery.reject,
            lambda: delivery.snooze(1),
            lambda: delivery.fail(ValueError()),
        ]
        for give in verdicts:
            with pytest.raises(TypeError, match="batch=True and atomic=False") as caught:
                give()
            refused.append(str(caught.value))

    add(handler="h")
    nonatomic.go()
    assert len(refused) == 4
    assert waiting() == set()


def test_unreadable_ones_are_held_and_the_others_run(nonatomic: NonAtomicBench) -> None:
    lists: list[list[int]] = []

    @batch()
    def h(deliveries: list[Delivery]) -> None:
        lists.append([each.id for each in deliveries])

    messages = add_many(3, handler="h")
    with connection.cursor() as cursor:  # too long for this interpreter
        cursor.execute(
            "update django_mq_queuedmessage set payload = repeat('9', 5000)::jsonb where id = %s",
            [messages[1].pk],
        )
    run(nonatomic)
    assert lists == [[messages[0].pk, messages[2].pk]]
    assert waiting() == {messages[1].pk}
    assert stored(messages[1]).held_since is not None
