"""A worker passes lists to batch handlers outside transactions: their length and timing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection

from django_mq import Delivery, RetryPolicy, fixed, handler, message
from django_mq.messages import classes
from django_mq.models import QueuedMessage, Result
from django_mq.signals import message_acked
from tests.rows import add, stored
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, add_many, attempts_of, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
SOON = RetryPolicy(max_attempts=3, backoff=fixed(0))
LATER = RetryPolicy(backoff=fixed(60))

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def on(function: Callable[[list[Delivery]], Any], *, is_async: bool, **options: Any) -> None:
    """Subscribe `function`, or a coroutine that calls it."""
    options = {"queue": "mail", "name": "h", "batch": True, **options}
    if not is_async:
        handler("#", atomic=False, **options)(function)
        return

    async def h(deliveries: list[Delivery]) -> Any:
        await asyncio.sleep(0)
        return function(deliveries)

    handler("#", **options)(h)


@BOTH
def test_one_thread_gets_whole_lists(start: Start, is_async: bool) -> None:
    """KAF-3: however slow the handler, a claim takes a whole list: the maximum of a call."""
    lists: list[int] = []

    def h(deliveries: list[Delivery]) -> None:
        lists.append(len(deliveries))

    on(h, is_async=is_async, max_batch=30)
    add_many(90, handler="h")
    assert start(until_empty=True, threads=1).join()
    assert waiting() == set()
    assert max(lists) == 30
    assert sum(lists) == 90
    assert len(lists) <= 6


@BOTH
@pytest.mark.parametrize(("option", "longest"), [(None, 4), (7, 7)])
def test_a_list_is_no_longer_than_the_batch_of_its_queue(
    start: Start, settings: Any, is_async: bool, option: int | None, longest: int
) -> None:
    """Though it may come from several claims. The command line overrides the queue's option."""
    settings.DJANGO_MQ = {"BATCH_SIZE": 30, "QUEUES": {"mail": {"batch_size": 4}}}
    lists: list[int] = []
    on(lambda deliveries: lists.append(len(deliveries)), is_async=is_async)
    add_many(60, handler="h")
    assert start(until_empty=True, threads=1, batch_size=option).join()
    assert sum(lists) == 60
    assert max(lists) == longest


@BOTH
def test_verdicts_and_errors(start: Start, is_async: bool) -> None:
    """KAF-5: messages without a verdict fail with the call, and run singly after that."""
    lists: list[list[int]] = []

    def h(deliveries: list[Delivery]) -> None:
        lists.append([each.id for each in deliveries])
        if deliveries[0].attempt == 1:
            deliveries[0].reject("no")
            raise ValueError

    on(h, is_async=is_async, retry=SOON)
    messages = add_many(4, handler="h")
    ids = [each.pk for each in messages]
    assert start(until_empty=True, threads=1).join()
    assert lists[0] == ids
    assert sorted(lists[1:]) == [[each] for each in ids[1:]]
    assert waiting() == {ids[0]}
    assert stored(messages[0]).dead_reason == "no"
    assert [attempts_of(each) for each in messages[1:]] == [["ValueError"]] * 3


def test_a_timeout_charges_those_without_a_verdict(start: Start) -> None:
    @handler("#", queue="mail", name="h", batch=True, timeout=0.2, retry=LATER)
    async def h(deliveries: list[Delivery]) -> None:
        deliveries[1].snooze(60, reason="the bank is closed")
        await asyncio.sleep(PATIENCE)

    messages = add_many(3, handler="h")
    assert start(until_empty=True).join()
    assert [stored(each).attempts for each in messages] == [1, 0, 1]
    assert messages[1].last_error == "Snooze: the bank is closed"
    assert attempts_of(messages[0]) == ["django_mq.policy.outcomes.TimedOut"]


@BOTH
def test_a_result_is_stored_for_those_that_want_one(start: Start, is_async: bool) -> None:
    on(len, is_async=is_async)
    add(handler="h", after=-60)
    second = add(handler="h", wants_result=True)
    assert start(until_empty=True).join()
    assert list(Result.objects.values_list("pk", "value")) == [(second.pk, 2)]


@BOTH
def test_keys_run_in_order_whatever_fails(start: Start, is_async: bool) -> None:
    """A message is acked only after those before it in its key, one key at a time."""
    acked: list[int] = []
    failed: set[int] = set()

    def h(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.id % 5 == 0 and delivery.id not in failed:
                failed.add(delivery.id)
                delivery.fail(ValueError())

    on(h, is_async=is_async, retry=SOON)

    def note(sender: Any, delivery: Delivery, **data: Any) -> None:
        acked.append(delivery.id)

    message_acked.connect(note)
    try:
        messages = [add(handler="h", key=f"k{n % 3}") for n in range(45)]
        assert start(until_empty=True, threads=2).join()
    finally:
        message_acked.disconnect(note)
    assert waiting() == set()
    for n in range(3):
        own = [each.pk for each in messages[n::3]]
        assert [id for id in acked if id in own] == own


@BOTH
def test_linger_fills_the_list(start: Start, settings: Any, is_async: bool) -> None:
    """Messages that arrive one by one share a call, which starts once its list is full."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.05, "LEASE": 3600}
    lists: list[int] = []
    called = threading.Event()

    def h(deliveries: list[Delivery]) -> None:
        lists.append(len(deliveries))
        called.set()

    on(h, is_async=is_async, max_batch=3, linger=PATIENCE)
    start(threads=1)
    for _ in range(2):
        [waits] = add_many(1, handler="h")
        until(lambda: stored(waits).claimed_by)  # noqa: B023  (called at once)
    assert lists == []
    add(handler="h")
    assert called.wait(PATIENCE)
    assert lists == [3]


@BOTH
def test_linger_ends(start: Start, is_async: bool) -> None:
    lists: list[int] = []

    def h(deliveries: list[Delivery]) -> None:
        lists.append(len(deliveries))

    on(h, is_async=is_async, linger=0.3)
    add_many(2, handler="h")
    assert start(until_empty=True).join()
    assert lists == [2]


@BOTH
def test_draining_ends_the_wait(start: Start, settings: Any, is_async: bool) -> None:
    """Waiting messages run at once or are released, uncharged."""
    settings.DJANGO_MQ = {"LEASE": 3600}

    def h(deliveries: list[Delivery]) -> None: ...

    on(h, is_async=is_async, linger=PATIENCE)
    [waits] = add_many(1, handler="h")
    running = start()
    until(lambda: stored(waits).claimed_by)
    running.stop()
    assert waits.pk not in waiting() or stored(waits).attempts == 0


@pytest.mark.parametrize("wrapped", [False, True])
@BOTH
def test_wrong_content_of_one_fails_that_one(start: Start, is_async: bool, wrapped: bool) -> None:
    got: list[list[Any]] = []

    with classes.isolated():

        @message("t.placed")
        @dataclass(frozen=True)
        class Placed:
            n: int

        def run(events: list[Any]) -> None:
            got.append([each.payload.n if wrapped else each.n for each in events])

        argument: Any = list[Delivery[Placed]] if wrapped else list[Placed]
        if is_async:

            async def h(events: Any) -> None:
                run(events)
        else:

            def h(events: Any) -> None:  # type: ignore[misc]
                run(events)

        h.__annotations__["events"] = argument
        options: dict[str, Any] = {} if is_async else {"atomic": False}
        handler("t.placed", queue="mail", name="h", batch=True, **options)(h)
        _, wrong, unreadable, _ = [
            add(handler="h", type="t.placed", payload={"n": n}) for n in (1, "wrong", 2, 3)
        ]
        with connection.cursor() as cursor:
            cursor.execute(
                "update django_mq_queuedmessage set payload = %s::jsonb where id = %s",
                [f'{{"n": {"2" * 5000}}}', unreadable.pk],
            )
        assert start(until_empty=True).join()
    assert got == [[1, 3]]
    assert waiting() == {wrong.pk, unreadable.pk}
    assert "InvalidPayload" in stored(wrong).dead_reason
    assert stored(unreadable).state == "held"


@dataclass(frozen=True)
class Counted:
    n: int


@pytest.fixture
def counted() -> Iterator[None]:
    with classes.isolated():
        message("t.counted")(Counted)
        yield


@BOTH
@pytest.mark.parametrize("payloads", [[], [{"n": 1}]], ids=["no other", "another"])
def test_unreadable_messages_are_left_out_of_the_list(
    start: Start, counted: None, is_async: bool, payloads: list[Any]
) -> None:
    """A list of which nothing is left calls nobody."""
    got: list[list[Counted]] = []

    def h(events: list[Counted]) -> None:
        got.append(list(events))

    async def coroutine(events: list[Counted]) -> None:
        h(events)

    handler("t.counted", queue="mail", name="h", batch=True, atomic=False)(
        coroutine if is_async else h
    )
    bad = [add(handler="h", type="t.counted", payload={"n": word}).pk for word in ("a", "b")]
    odd = add(handler="h", type="t.counted").pk
    with connection.cursor() as cursor:  # beyond the digits that Python reads
        cursor.execute(
            "update django_mq_queuedmessage set payload = '{\"n\": 1e5000}' where id = %s", [odd]
        )
    for payload in payloads:
        add(handler="h", type="t.counted", payload=payload)
    running = start()
    until(lambda: {pk for pk in bad if stored_dead(pk)} == set(bad) and len(waiting()) == 3)
    running.stop()
    assert got == [[Counted(**payload)] for payload in payloads]
    assert waiting() == {*bad, odd}


def stored_dead(id: int) -> bool:
    return QueuedMessage.objects.filter(pk=id, dead_at__isnull=False).exists()


@BOTH
def test_receivers_get_the_json_of_a_delivery_that_had_an_instance(
    start: Start, counted: None, is_async: bool
) -> None:
    got: list[Any] = []

    def h(deliveries: list[Delivery[Counted]]) -> None:
        got.extend(each.payload for each in deliveries)

    async def coroutine(deliveries: list[Delivery[Counted]]) -> None:
        h(deliveries)

    def acked(delivery: Delivery, **_: Any) -> None:
        got.append(delivery.payload)

    handler("t.counted", queue="mail", name="h", batch=True, atomic=False)(
        coroutine if is_async else h
    )
    add(handler="h", type="t.counted", payload={"n": 1})
    message_acked.connect(acked)
    try:
        assert start(until_empty=True).join()
    finally:
        message_acked.disconnect(acked)
    assert got == [Counted(1), {"n": 1}]
