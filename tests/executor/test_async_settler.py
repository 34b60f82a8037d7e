"""The thread that settles for async handlers outlives errors of our own: the leases lapse."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor import async_settler, reports
from django_mq.executor.async_settler import AsyncSettler
from django_mq.executor.settlement import Settlement
from django_mq.executor.watchdog import Link
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, Result
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import (
    Bench,
    Said,
    ShortOutage,
    Start,
    attempts_of,
    run_context,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Make the next call of a function fail, unless it has nothing to do: its arguments are empty.

    Return the list in which that is noted.
    """
    real, failed = getattr(owner, name), list[str]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if all(args) and not failed:
            failed.append(name)
            raise ZeroDivisionError
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    return failed


def on(**options: Any) -> Any:
    return handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)), **options)


def lapse(message: QueuedMessage) -> None:
    """Let the lease of the first attempt lapse; a worker that renews it brings it back."""
    first = QueuedMessage.objects.filter(pk=message.pk, attempts=1, leased_until__gt=Now())
    first.update(leased_until=Now() - timedelta(seconds=1))


@pytest.mark.parametrize(
    ("owner", "name", "key"),
    [(Settlement, "settle", None), (Settlement, "settle", "k"), (AsyncSettler, "_start_all", "k")],
)
def test_unsettled_message_lapses(
    start: Start,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    key: str | None,
) -> None:
    """It runs again, before the next of its key; its slot is free for others."""
    ran: list[tuple[int, int]] = []

    @on()
    async def h(delivery: Delivery) -> None:
        ran.append((delivery.id, delivery.attempt))

    failed = fail_once(monkeypatch, owner, name)
    first, second = add(handler="h", key=key), add(handler="h", key=key)
    running = start(async_slots=1 if key is None else 2)  # the next of the key waits here
    until(lambda: failed)

    def ended() -> bool:
        lapse(first)
        return not waiting()

    until(ended)
    assert running.stop()
    assert (second.pk, 1) in ran
    assert (first.pk, 2) in ran
    assert key is None or ran[-1] == (second.pk, 1)
    assert attempts_of(first) == ["WorkerVanished"]
    assert not QueuedMessage.objects.exists()
    assert said.count("message_acked") == 2


def test_two_claims_of_a_message_that_end_together(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover lost the first claim, whose call fails; the second is acked, and replied to.

    Settled together, both would count as lost: a settle tells its messages apart by id.
    """
    gates: list[asyncio.Event] = []

    @on()
    async def h(delivery: Delivery) -> int:
        gates.append(gate := asyncio.Event())
        first = len(gates) == 1
        await gate.wait()
        if first:
            raise ValueError
        return 7

    monkeypatch.setattr(async_settler, "SETTLE_INTERVAL", 3600.0)
    message = add(handler="h", wants_result=True)
    running = start()
    until(lambda: len(gates) == 1)
    QueuedMessage.objects.update(attempts=0, claimed_by=None, leased_until=None)
    until(lambda: len(gates) == 2)
    assert running.worker._run is not None
    runner = running.worker._run.parts.runner
    runner._settler._got_several = True
    for gate in gates:
        runner._loop.call_soon_threadsafe(gate.set)
    until(lambda: not runner._running)
    runner._settler._hurry.set()
    until(lambda: not waiting())
    assert [(each.message_id, each.value) for each in Result.objects.all()] == [(message.pk, 7)]
    assert running.stop()
    assert said.count("message_acked") == 1


def test_two_claims_of_a_message_whose_calls_start_together(bench: Bench) -> None:
    """A start of a lease tells its messages apart by id: one answer for both would start both."""

    @on()
    async def h(delivery: Delivery) -> None: ...

    message = add(handler="h")
    earlier = bench.claim()
    QueuedMessage.objects.update(attempts=0, claimed_by=None, leased_until=None)
    later = bench.claim()
    settler = AsyncSettler(
        run_context(ShortOutage(bench.stopping), lambda ended: None, lease=60.0),
        on_calls_settled=lambda tasks: None,
        give_up=lambda ended, tasks: None,
        link=Link(),
    )

    async def start_both() -> list[dict[int, bool | None]]:
        answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
        for tasks, answer in zip((earlier, later), answers, strict=True):
            settler.start_leases(tasks, answer)
        settler.start()
        return [await each for each in answers]

    try:
        assert asyncio.run(start_both()) == [{}, {message.pk: False}]
    finally:
        settler.end()
        settler.join()


def test_failed_report_does_not_undo_the_settle(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @on()
    async def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    failed = fail_once(monkeypatch, reports, "all_ended")
    first = add(handler="h")
    running = start(async_slots=1)
    until(lambda: failed)
    second = add(handler="h")
    assert said.wait("message_acked")[0].id == second.pk
    assert running.stop()
    assert ran == [first.pk, second.pk]
    assert "executor_failed" in [getattr(record, "event", "") for record in caplog.records]
    assert not waiting()


def test_settles_leave_time_for_others_to_end_but_no_call_waits(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that needs a lease before it starts, as in a line, takes the others along."""
    ran: list[int] = []

    @on()
    async def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    running = start()
    add(handler="h")
    said.wait("message_acked")
    assert running.worker._run is not None
    settler = running.worker._run.parts.runner._settler
    monkeypatch.setattr(async_settler, "SETTLE_INTERVAL", 3600.0)
    settler._got_several = True
    first, second = add(handler="h").pk, add(handler="h").pk
    until(lambda: ran[1:] == [first, second] and settler._requests.qsize() == 1)
    assert waiting() == {first, second}
    keyed = add(handler="h", key="k").pk
    until(lambda: waiting() <= {keyed} and ran[3:] == [keyed])
    assert running.stop()  # the end does not wait, either
    assert not waiting()
