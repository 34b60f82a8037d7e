"""Async handlers: many at once on one loop, within their slots, cancelled at their timeout."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from django_mq import LeaseLost, Reject, RetryPolicy, Snooze, fixed, handler
from django_mq.messages import current_delivery
from django_mq.models import FailedAttempt
from testproject.shop.models import Product
from tests.database import second_connection
from tests.rows import add, stored
from tests.slow import slow
from tests.worker.conftest import (
    PATIENCE,
    Running,
    Said,
    add_many,
    attempts_of,
    effect,
    effects,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


def on(**options: Any) -> Callable[[Any], Any]:
    return handler("#", queue="mail", name="h", **options)


def test_many_run_at_once(start: Start) -> None:
    """Each waits for all the others: run one after another they would never end."""
    arrived = 0
    everybody: asyncio.Event | None = None

    @on(timeout=PATIENCE)
    async def h(delivery: Any) -> None:
        nonlocal arrived, everybody
        everybody = everybody or asyncio.Event()
        arrived += 1
        if arrived == 50:
            everybody.set()
        await everybody.wait()

    add_many(50, handler="h")
    assert start(until_empty=True).join()
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("slots", [1, 4])
def test_slots_are_never_exceeded_and_all_are_used(start: Start, slots: int) -> None:
    """NSQ-23: tested with 4 of many."""
    running = 0
    maximum = 0

    @on()
    async def h(delivery: Any) -> None:
        nonlocal running, maximum
        running += 1
        maximum = max(maximum, running)
        for _ in range(1000):  # until all slots were used once
            if maximum == slots:
                break
            await asyncio.sleep(0.01)
        running -= 1

    messages = add_many(40, handler="h")
    assert start(until_empty=True, async_slots=slots).join()
    assert waiting() == set()
    assert len(messages) == 40
    assert maximum == slots


def test_every_end_of_a_handler_frees_its_slot(start: Start) -> None:
    @on(retry=RetryPolicy.never())
    async def h(delivery: Any) -> None:
        if delivery.payload == 1:
            raise ValueError
        if delivery.payload == 2:
            raise SystemExit
        if delivery.payload == 3:
            raise Snooze(600)
        if delivery.payload == 4:
            raise Reject
        if delivery.payload == 5:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)
        if delivery.payload == 6:
            raise asyncio.CancelledError

    for n in range(1, 20):
        add(handler="h", payload=n % 7, **({"expires": -1} if n == 7 else {}))
    assert start(until_empty=True, async_slots=2).join()


def test_timeout_cancels_and_charges(start: Start, said: Said) -> None:
    """NSQ-20: charged as TimedOut; the others continue."""
    cancelled: list[int] = []

    @handler("#", queue="mail", name="slow", timeout=0.05, retry=RetryPolicy(backoff=fixed(600)))
    async def slow_(delivery: Any) -> None:
        try:
            await asyncio.sleep(2 * PATIENCE)
        except asyncio.CancelledError:
            cancelled.append(delivery.id)
            raise

    @on(timeout=PATIENCE)
    async def h(delivery: Any) -> None:
        await delivery.afinish(effect, delivery)

    slow, quick = add(handler="slow"), add(handler="h")
    assert start(until_empty=True).join()
    assert cancelled == [slow.pk]
    assert effects() == {quick.pk}
    assert attempts_of(slow) == ["django_mq.policy.outcomes.TimedOut"]
    assert stored(slow).attempts == 1
    assert said.ids("message_retried") == [slow.pk]


def test_a_handler_that_catches_the_cancel_and_returns_has_run_past_its_timeout(
    start: Start,
) -> None:
    """As any other: what it returns is no ack."""

    @on(timeout=0.05, retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(2 * PATIENCE)
        return "late"

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert attempts_of(message) == ["django_mq.policy.outcomes.TimedOut"]
    text = FailedAttempt.objects.get().error_text
    assert re.match(r"the handler ran for .+, past its timeout: the option timeout, 50 ms", text)


def test_the_error_of_a_timeout_names_the_setting(start: Start, settings: Any) -> None:
    settings.DJANGO_MQ = {"TIMEOUT": 0.05}

    @on(retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        await asyncio.sleep(2 * PATIENCE)

    add(handler="h")
    assert start(until_empty=True).join()
    text = FailedAttempt.objects.get().error_text
    assert re.match(r"the handler ran for .+, past its timeout: the setting TIMEOUT, 50 ms", text)


def test_a_timeout_of_the_handlers_own_is_its_error(start: Start) -> None:
    @on(timeout=PATIENCE, retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(PATIENCE)

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert attempts_of(message) == ["TimeoutError"]


def test_cancellation_by_an_awaited_task_is_a_failure(start: Start) -> None:
    """The cancellation is not ours: it must be settled, or its lease would be renewed for ever."""

    @on(retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(PATIENCE))
        inner.cancel()
        await inner

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert len(attempts_of(message)) == 1
    assert stored(message).claimed_by is None


@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt(), None], ids=repr)
def test_a_handler_cannot_end_the_loop_of_the_others(
    start: Start, how: BaseException | None
) -> None:
    """By a task that it starts, or by `stop()`: asyncio lets SystemExit out of the loop."""
    entered = 0

    async def end_the_loop() -> None:
        if how is None:
            asyncio.get_running_loop().stop()
        else:
            raise how

    @on(retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        nonlocal entered
        entered += 1
        if delivery.id == first.pk:
            await asyncio.gather(end_the_loop())
        await asyncio.sleep(0)

    first, *others = add_many(3, handler="h")
    assert start(until_empty=True).join()
    assert entered == 3
    assert not {each.pk for each in others} & waiting()
    assert len(attempts_of(first)) == (how is not None)


@pytest.mark.parametrize("directly", [True, *slow(False)])
def test_extend_moves_the_timeout(start: Start, directly: bool) -> None:
    """NSQ-21."""

    @on(timeout=2, retry=RetryPolicy(backoff=fixed(600)))  # it has until then to reach extend()
    async def h(delivery: Any) -> None:
        if directly:
            delivery.extend(PATIENCE)
        else:
            await sync_to_async(delivery.extend)(PATIENCE)
        await asyncio.sleep(2.1)

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert attempts_of(message) == []
    assert waiting() == set()


def test_afinish_commits_its_writes_and_the_ack_together(start: Start, said: Said) -> None:
    """Guarantee 5."""
    seen: list[Any] = []

    @on()
    async def h(delivery: Any) -> None:
        def write(text: str, *, price: int) -> str:
            Product.objects.create(name=f"message {delivery.id}", price=price)
            seen.append((effects(), waiting()))
            return text

        assert await delivery.afinish(write, "answer", price=3) == "answer"
        seen.append((effects(), waiting()))

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert seen == [(set(), {message.pk}), ({message.pk}, set())]
    assert said.ids("message_acked") == [message.pk]


def test_afinish_refuses_a_zombie(start: Start) -> None:
    seen: list[str] = []

    @on()
    async def h(delivery: Any) -> None:
        def steal() -> None:
            with second_connection() as other:
                other.execute(
                    "update django_mq_queuedmessage set claimed_by = 'other:1',"
                    " leased_until = now() + interval '1 h'"
                )

        await asyncio.to_thread(steal)
        try:
            await delivery.afinish(effect, delivery)
        except LeaseLost:
            seen.append("refused")
            raise

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert seen == ["refused"]
    assert effects() == set()
    assert stored(message).claimed_by == "other:1"
    assert FailedAttempt.objects.count() == 0


def test_an_error_in_afinish_undoes_both(start: Start) -> None:
    @on(retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        def write() -> None:
            effect(delivery)
            raise ValueError

        await delivery.afinish(write)

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert effects() == set()
    assert attempts_of(message) == ["ValueError"]


@pytest.mark.parametrize("awaits", [True, False])
def test_finish_in_a_coroutine_names_afinish(start: Start, awaits: bool) -> None:
    @on(retry=RetryPolicy.never())
    async def h(delivery: Any) -> None:
        if awaits:
            async with delivery.finish():
                pass
        with delivery.finish():
            pass

    message = add(handler="h")
    assert start(until_empty=True).join()
    [failed] = FailedAttempt.objects.filter(message_id=message.pk)
    assert failed.error_class == "django.core.exceptions.SynchronousOnlyOperation"
    assert "await delivery.afinish(function, *args)" in failed.error_text


def test_afinish_refuses_a_coroutine_which_would_not_run(start: Start) -> None:
    @on(retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        async def write() -> None:
            raise AssertionError("it cannot run in a transaction")

        await delivery.afinish(write)

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert attempts_of(message) == ["TypeError"]
    assert "give it a plain function" in stored(message).last_error


def test_the_sync_orm_by_sync_to_async(start: Start) -> None:
    @on()
    async def h(delivery: Any) -> None:
        await sync_to_async(effect)(delivery)
        assert await Product.objects.filter(name=f"message {delivery.id}").acount() == 1
        assert [product async for product in Product.objects.all()]

    messages = add_many(10, handler="h")
    assert start(until_empty=True).join()
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


def test_each_knows_its_own_delivery(start: Start) -> None:
    """Its broadcasts name it as their cause, though many handlers share one thread."""
    wrong: list[int] = []

    @on()
    async def h(delivery: Any) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
            here = current_delivery.get()
            if here is None or here.id != delivery.id:
                wrong.append(delivery.id)

    add_many(20, handler="h")
    assert start(until_empty=True).join()
    assert wrong == []
    assert waiting() == set()


def test_sync_and_async_handlers_of_one_queue(start: Start) -> None:
    """A claimed batch is divided by kind."""

    @handler("#", queue="mail", name="sync")
    def sync(delivery: Any) -> None:
        effect(delivery)

    @handler("#", queue="mail", name="async")
    async def async_(delivery: Any) -> None:
        await delivery.afinish(effect, delivery)

    messages = [add(handler="async" if n % 2 else "sync") for n in range(30)]
    assert start(until_empty=True, async_slots=3, threads=2).join()
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


def test_drain_waits_for_running_handlers(start: Start, said: Said) -> None:
    """KAF-7, NSQ-28."""
    gate = threading.Event()

    @on()
    async def h(delivery: Any) -> None:
        await asyncio.to_thread(gate.wait, PATIENCE)
        await delivery.afinish(effect, delivery)

    message = add(handler="h")
    running = start()
    said.wait("message_started")
    stopping = threading.Thread(target=running.stop, daemon=True)
    stopping.start()
    assert said.count("worker_stopped") == 0
    gate.set()
    assert running.join() is True
    assert effects() == {message.pk}


def test_a_drain_out_of_time_cancels(start: Start, said: Said) -> None:
    cancelled = threading.Event()

    @on()
    async def h(delivery: Any) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    message = add(handler="h")
    running = start(drain_seconds=0.05)
    said.wait("message_started")
    assert running.stop() is False
    assert cancelled.wait(PATIENCE)
    assert message.pk in waiting()


def test_expired_messages_do_not_start(start: Start, said: Said) -> None:
    @on()
    async def h(delivery: Any) -> None: ...

    message = add(handler="h", expires=-1)
    assert start(until_empty=True).join()
    assert stored(message).dead_reason == "expired"
    assert said.count("message_started") == 0


def test_a_settle_that_the_database_refuses_harms_no_neighbour(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 11: they are settled in one transaction, but one by one if it fails."""
    ready = 0
    everybody: asyncio.Event | None = None

    @on()
    async def h(delivery: Any) -> None:
        nonlocal ready, everybody
        everybody = everybody or asyncio.Event()
        ready += 1
        if ready == 6:
            everybody.set()
        await everybody.wait()
        if delivery.payload == "bad":
            raise ValueError

    good = add_many(5, handler="h")
    bad = add(handler="h", payload="bad")
    with second_connection() as other:
        other.execute(
            "create function mq_refuse() returns trigger language plpgsql as"
            " $$ begin raise exception 'refused'; end $$;"
            "create trigger mq_refuse before insert on django_mq_failedattempt"
            " for each row execute function mq_refuse()"
        )
        try:
            assert start(until_empty=True).join()
        finally:
            other.execute("drop function mq_refuse cascade")
    assert sorted(said.ids("message_acked")) == sorted(m.pk for m in good)
    assert waiting() == {bad.pk}
    assert stored(bad).attempts == 1
    assert "settle_refused" in [getattr(r, "event", "") for r in caplog.records]
