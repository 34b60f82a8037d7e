"""Answering workers: in time, late, or never; for one asker, or many."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from django_mq import (
    CannotWait,
    PendingReply,
    RemoteError,
    ReplyTimeout,
    RetryPolicy,
    Unanswered,
    aask,
    ask,
    broadcast,
    cancel,
    fixed,
    gather,
    handler,
    request,
)
from django_mq.conf import get_settings
from django_mq.messages import set_current
from django_mq.models import FailedAttempt, QueuedMessage, Result
from django_mq.requests.waiter import Waiter
from django_mq.store.results import ReplyState
from django_mq.worker import chores, expiring
from tests.database import second_connection
from tests.requests.questions import echo
from tests.requests.waiting.conftest import waiting
from tests.rows import delivery
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start

pytestmark = pytest.mark.django_db(transaction=True)


# ---- answers


def test_several_workers_answer(start: Start) -> None:
    """RMQ-1, RMQ-2, RMQ-20: any number of workers answer each question once, in order."""
    answered: list[int] = []

    @handler("test.square", name="square")
    def square(delivery: Any) -> int:
        answered.append(delivery.payload)
        return int(delivery.payload**2)

    for _ in range(2):
        start(threads=2)
    pendings = [request("test.square", n) for n in range(30)]
    assert gather(*pendings, timeout=PATIENCE) == [n**2 for n in range(30)]
    assert sorted(answered) == list(range(30))
    assert ask("test.square", 7, timeout=PATIENCE) == 49


def test_scatter_and_gather(start: Start) -> None:
    """RMQ-21: four requests out, other work in between, all replies in request order."""
    gates = [threading.Event() for _ in range(4)]

    @handler("test.slow", name="slow")
    async def slow(delivery: Any) -> Any:
        while not gates[delivery.payload].is_set():
            await asyncio.sleep(0.01)
        if delivery.payload == 1:
            raise ValueError("of the second")
        return delivery.payload

    start()
    pendings = [request("test.slow", n, retry=RetryPolicy.never()) for n in range(4)]
    for number in (3, 1, 0):  # other work
        gates[number].set()
        until(pendings[number].done, f"answer {number}")
    began = monotonic()
    found = gather(*pendings, timeout=2, return_exceptions=True)  # in which it finds the others
    assert 2 <= monotonic() - began < PATIENCE
    assert [type(each) for each in found] == [int, RemoteError, ReplyTimeout, int]
    assert (found[0], found[3]) == (0, 3)
    with pytest.raises(RemoteError, match="of the second"):
        gather(*pendings, timeout=timedelta(seconds=PATIENCE))  # the third is not waited for
    gates[2].set()
    assert gather(pendings[3], pendings[2], timeout=PATIENCE) == [3, 2]


def test_late_reply_is_kept_and_reaches_only_its_asker(start: Start) -> None:
    """RMQ-18, RMQ-19: each reply has an address of its own, and can be read repeatedly."""
    echo()
    late = request("test.echo", "late")
    with pytest.raises(
        ReplyTimeout, match=rf"message {late.id} \(test.echo\) within 0.05 s"
    ) as caught:
        late.result(timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.id == late.id
    other = request("test.echo", "other")
    start()
    assert other.result(timeout=PATIENCE) == "other"
    assert late.result(timeout=PATIENCE) == "late"
    assert late.result(timeout=0) == "late"
    assert PendingReply(late.id).result() == "late"


def test_a_reply_that_was_there_before_anybody_waited(start: Start) -> None:
    """RMQ-19: no reply can be missed."""
    echo()
    pending = request("test.echo", 1)
    start(until_empty=True).join()
    assert pending.done()
    assert pending.result() == 1


def test_reply_waits_for_retries(start: Start) -> None:
    """Retries are not answers; the last failure is."""

    @handler("test.fails", name="fails", retry=RetryPolicy(max_attempts=3, backoff=fixed(0.05)))
    def fails(delivery: Any) -> str:
        if delivery.attempt < delivery.payload:
            raise ValueError(f"attempt {delivery.attempt}")
        return "at last"

    start()
    well, badly = request("test.fails", 3), request("test.fails", 9)
    assert well.result(timeout=PATIENCE) == "at last"
    with pytest.raises(RemoteError, match="ValueError: attempt 3"):
        badly.result(timeout=PATIENCE)


def test_handlers_of_every_kind_answer(start: Start) -> None:
    @handler("test.sync", name="sync", queue="sync", atomic=False)
    def sync(delivery: Any) -> str:
        with delivery.finish("finished"):
            pass
        return "not this"

    @handler("test.async", name="async", queue="async")
    async def run(delivery: Any) -> str:
        return "awaited"

    @handler("test.bad", name="bad", queue="async", retry=RetryPolicy.never())
    async def bad(delivery: Any) -> Any:
        return {1, 2}

    @handler("test.batch", name="batch", queue="batch", batch=True)
    def batch(deliveries: list[Any]) -> Any:
        return [each.payload for each in deliveries]

    pendings = [request("test.batch", n) for n in range(20)]
    with transaction.atomic():
        broadcast("test.batch", "nobody asked")
    start()
    assert ask("test.sync", timeout=PATIENCE) == "finished"
    assert ask("test.async", timeout=PATIENCE) == "awaited"
    with pytest.raises(RemoteError, match=r"InvalidPayload: result: Object of type set"):
        ask("test.bad", timeout=PATIENCE)
    assert gather(*pendings, timeout=PATIENCE) == list(range(20))
    assert Result.objects.count() == 23


def test_batch_results_answer_requests(start: Start) -> None:
    """A value that is not a list answers all; a list of another length fails the batch."""

    @handler("test.batch", name="batch", batch=True, retry=RetryPolicy.never())
    def batch(deliveries: list[Any]) -> Any:
        value = deliveries[0].payload
        return value if value != "short" else []

    same = [request("test.batch", {"for": "all"}) for _ in range(3)]
    start(until_empty=True).join()
    assert gather(*same) == [{"for": "all"}] * 3
    short = request("test.batch", "short")
    start(until_empty=True).join()
    with pytest.raises(RemoteError, match="returned 0 results for 1 messages"):
        short.result()


def test_answers_while_others_fail_beside_it(start: Start) -> None:
    """A failing neighbour in the slice undoes no answer."""

    @handler("test.mixed", name="mixed", retry=RetryPolicy.never())
    def mixed(delivery: Any) -> Any:
        if delivery.payload % 2:
            raise ValueError(delivery.payload)
        return delivery.payload

    with transaction.atomic():
        pendings = [request("test.mixed", n) for n in range(20)]
        for n in range(20):
            broadcast("test.mixed", n)
    start(threads=2)
    found = gather(*pendings, timeout=PATIENCE, return_exceptions=True)
    assert [each for each in found if not isinstance(each, Exception)] == list(range(0, 20, 2))
    assert [each.error_text for each in found if isinstance(each, RemoteError)] == [
        str(n) for n in range(1, 20, 2)
    ]


# ---- never


@pytest.mark.parametrize("ring", [True, False])
def test_cancelled_request_ends_the_wait_at_once(ring: bool, settings: Any) -> None:
    settings.DJANGO_MQ = {"WAKEUP": "notify" if ring else "poll"}
    echo()
    pending = request("test.echo")
    with waiting(pending) as replies:
        assert cancel(id=pending.id)
        with pytest.raises(Unanswered, match="cancelled"):
            replies.result()


def test_the_expired_are_answered_by_the_chores(start: Start) -> None:
    """In a paused queue no worker claims it, so only the chore ends it."""
    echo()
    pending = request("test.echo", expires=60)
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    with waiting(pending) as replies:
        with second_connection() as other:
            assert expiring.expire_few(other.cursor())[0].delivery.id == pending.id
        with pytest.raises(Unanswered, match="expired"):
            replies.result()
    assert Result.objects.get(pk=pending.id).error_text == "expired"


def test_results_are_forgotten_after_their_time(settings: Any) -> None:
    """S22; a turn removes all old results, within reason."""
    settings.DJANGO_MQ = {"RESULT_RETENTION": 60, "WAKEUP": "poll"}
    with second_connection() as other:
        other.execute(
            "insert into django_mq_result (message_id, handler, value, created_at)"
            " select n, '', '1', now() - case when n > 2500 then 30 else 90 end * interval '1 s'"
            "   from generate_series(1, 2600) n"
        )
        chores.run(other.cursor(), get_settings())
    assert Result.objects.count() == 100
    with pytest.raises(CannotWait, match="RESULT_RETENTION"):
        PendingReply(1).result()
    assert PendingReply(2501).result() == 1


# ---- asking oneself


def test_a_handler_does_not_ask_its_own_queue(start: Start) -> None:
    """It could wait for itself: refused before anything is stored, or before the wait."""
    echo(queue="same")

    @handler("test.asks", name="asks", queue="same", atomic=False, retry=RetryPolicy.never())
    def asks(delivery: Any) -> Any:
        if delivery.payload == "ask":
            return ask("test.echo", 1, timeout=PATIENCE)
        return request("test.echo", 2).result(timeout=PATIENCE)

    @handler("test.aasks", name="aasks", queue="same", retry=RetryPolicy.never())
    async def aasks(delivery: Any) -> Any:
        return await aask("test.echo", 3, timeout=PATIENCE)

    start(threads=2)
    for type, payload in (("asks", "ask"), ("asks", "request"), ("aasks", None)):
        with pytest.raises(
            RemoteError, match=f"CannotWait: handler {type} would wait.*queue, same"
        ):
            ask(f"test.{type}", payload, timeout=PATIENCE)
    answered = Result.objects.filter(handler="echo").values_list("value", flat=True)
    assert set(answered) <= {2}
    assert not QueuedMessage.objects.filter(type="test.echo").exclude(payload=2).exists()


def test_a_handler_asks_the_queue_of_the_same_name_in_another_database(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers serve it."""
    elsewhere = {**connections["default"].settings_dict, "HOST": "elsewhere"}
    monkeypatch.setitem(connections.settings, "elsewhere", elsewhere)
    echo(queue="same")
    start()

    def handle() -> Any:
        set_current(delivery(queue="same"), "elsewhere")
        return ask("test.echo", 1, timeout=PATIENCE)

    assert copy_context().run(handle) == 1


def test_a_handler_asks_another_queue(start: Start) -> None:
    echo(queue="answers")

    @handler("test.asks", name="asks", queue="questions", atomic=False)
    def asks(delivery: Any) -> Any:
        return [ask("test.echo", delivery.payload, timeout=PATIENCE)]

    @handler("test.aasks", name="aasks", queue="async")
    async def aasks(delivery: Any) -> Any:
        return [await aask("test.asks", delivery.payload, timeout=PATIENCE)]

    start(queues=("questions", "async"))
    start(queues=("answers",))
    assert ask("test.aasks", 1, timeout=PATIENCE) == [[1]]
    assert not FailedAttempt.objects.exists()


def test_a_wait_that_began_during_a_query_does_not_end_with_its_answer() -> None:
    """The message was committed after the query began, which another thread sent too early."""
    waiter = Waiter("default")
    waiter._running = True  # no thread queries
    missing = ReplyState(7, False, False, None, "", "")
    with waiter.waiting_for(7) as early:
        assert waiter._take_due(all=True, listening=True) == [7]
        with waiter.waiting_for(7) as late:
            waiter._deliver([missing])
            assert (early.done(), late.done()) == (True, False)
            assert waiter._take_due(all=False, listening=True) == [7]
            waiter._deliver([missing])
            assert late.done()
