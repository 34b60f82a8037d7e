"""Replies: values, errors, messages that end unanswered, and the address of a reply."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import (
    CannotWait,
    InvalidOption,
    InvalidPayload,
    PendingReply,
    Reject,
    RemoteError,
    ReplyTimeout,
    RetryPolicy,
    Unanswered,
    UnreadablePayload,
    agather,
    broadcast,
    cancel,
    gather,
    handler,
    queues,
    request,
)
from django_mq.models import FailedAttempt, QueuedMessage, Result
from django_mq.testing import drain, due
from testproject.shop.models import Product
from tests.requests.questions import NEVER, echo
from tests.rows import add

pytestmark = pytest.mark.django_db


# ---- contents of a reply


@pytest.mark.parametrize("value", [None, 0, "", False, [], {"a": [1, {"b": None}]}, "\\u0000"])
def test_any_json_value_is_a_result(value: Any) -> None:
    @handler("test.value", name="value")
    def answer(delivery: Any) -> Any:
        return value

    pending = request("test.value")
    drain()
    assert pending.result() == value
    assert pending.result() == value  # as often as needed


def test_an_error_is_an_answer_when_it_is_the_last() -> None:
    """Guarantee 10; S14: class and text, cleaned and cut, without a traceback."""

    @handler("test.fails", name="fails", retry=RetryPolicy(max_attempts=2))
    def fails(delivery: Any) -> None:
        raise ValueError(f"attempt {delivery.attempt}\x1b[2J " + "x" * 9000)

    pending = request("test.fails")
    drain(errors="keep")
    assert not pending.done()
    with pytest.raises(ReplyTimeout):
        pending.result()
    due()
    drain(errors="keep")
    assert pending.done()
    with pytest.raises(
        RemoteError, match=rf"message {pending.id} failed: ValueError: at"
    ) as caught:
        pending.result()
    error = caught.value
    assert (error.id, error.error_class) == (pending.id, "ValueError")
    assert error.error_text.startswith("attempt 2\ufffd[2J xxx")
    assert len(error.error_text.encode()) <= 4096
    assert not isinstance(error, Unanswered)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
    echo()
    fine = request("test.echo", "fine")
    drain()
    [value, returned] = gather(fine, pending, return_exceptions=True)
    assert (value, type(returned)) == ("fine", RemoteError)
    with pytest.raises(RemoteError):
        gather(fine, pending)


def test_reject_is_an_answer() -> None:
    @handler("test.rejects", name="rejects")
    def rejects(delivery: Any) -> None:
        raise Reject("no such friend")

    pending = request("test.rejects")
    drain()
    with pytest.raises(RemoteError, match="Reject: no such friend"):
        pending.result()


def test_unencodable_result_fails_its_handler() -> None:
    """Its writes are undone, its neighbours are not affected, and its asker gets the error."""

    @handler("test.bad", name="bad", retry=RetryPolicy(max_attempts=2))
    def bad(delivery: Any) -> Any:
        Product.objects.create(name=f"{delivery.id}, {delivery.attempt}", price=1)
        return {"result": {"when": object() if delivery.payload["bad"] else "now"}}

    bad_one, good_one = (request("test.bad", {"bad": each}) for each in (True, False))
    with transaction.atomic():
        broadcast("test.bad", {"bad": True})  # nobody asks, so any return value is fine
    drain(errors="keep")
    assert good_one.result() == {"result": {"when": "now"}}
    assert Product.objects.count() == 2
    due()
    drain(errors="keep")
    with pytest.raises(RemoteError, match=r"InvalidPayload: result\.result\.when: Object of type"):
        bad_one.result()
    assert FailedAttempt.objects.filter(message_id=bad_one.id).count() == 2


def test_a_result_has_the_limits_of_a_payload(settings: Any) -> None:
    settings.DJANGO_MQ = {"MAX_PAYLOAD_BYTES": 100, "MAX_DEPTH": 3}

    @handler("test.large", name="large", retry=NEVER)
    def large(delivery: Any) -> Any:
        return [[[[]]]] if delivery.payload["deep"] else "x" * 101

    too_large, too_deep = (request("test.large", {"deep": each}) for each in (False, True))
    drain(errors="keep")
    with pytest.raises(RemoteError, match="PayloadTooLarge: result is 103 bytes"):
        too_large.result()
    with pytest.raises(RemoteError, match="nested too deeply"):
        too_deep.result()


def test_argument_of_finish_is_the_result() -> None:
    """Encoded as it is at the end of the block; the handler's return value is ignored."""

    @handler("test.finish", name="finish", atomic=False)
    def finish(delivery: Any) -> Any:
        reply: dict[str, Any] = {}
        with delivery.finish(reply):
            reply["product"] = Product.objects.create(name="made", price=1).name
        return object()

    @handler("test.afinish", name="afinish")
    async def afinish(delivery: Any) -> Any:
        return await delivery.afinish(lambda n: n + 1, delivery.payload)

    @handler("test.plain", name="plain", atomic=False)
    def plain(delivery: Any) -> Any:
        return delivery.payload

    pendings = request("test.finish"), request("test.afinish", 1), request("test.plain", [3])
    drain()
    assert gather(*pendings) == [{"product": "made"}, 2, [3]]
    assert not FailedAttempt.objects.exists()


def test_a_bad_result_of_finish_undoes_its_block() -> None:
    @handler("test.finish", name="finish", atomic=False, retry=NEVER)
    def finish(delivery: Any) -> None:
        with pytest.raises(InvalidPayload), delivery.finish({1, 2}):
            Product.objects.create(name="undone", price=1)
        assert not delivery.finished
        raise Reject("so it is")

    pending = request("test.finish")
    drain()
    assert not Product.objects.exists()
    with pytest.raises(RemoteError, match="so it is"):
        pending.result()


# ---- unanswered messages


def test_expired() -> None:
    """It expires before it starts; `drain()` dead-letters it like a worker."""
    echo()
    pending = request("test.echo", expires=60)
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    drain()
    with pytest.raises(Unanswered, match=rf"message {pending.id} will not be answered: expired"):
        pending.result()


def test_held_for_too_long(settings: Any) -> None:
    settings.DJANGO_MQ = {"HOLD_FOR": 0}
    pending = request("test.unknown")
    drain()
    due()
    drain()
    with pytest.raises(Unanswered, match="held for too long: this worker has no handler"):
        pending.result()


def test_removed_by_hand() -> None:
    echo()
    pendings = [request("test.echo") for _ in range(4)]
    cancel(id=pendings[0].id)
    queues.cancel(pendings[1].id)
    assert queues.purge(type="test.echo", waiting=True, limit=1).ids == (pendings[2].id,)
    QueuedMessage.objects.update(dead_at=Now(), dead_reason="exhausted", last_error="E: text")
    with pytest.raises(Unanswered, match="exhausted: E: text"):  # died without a report
        pendings[3].result()
    queues.discard(pendings[3].id)
    reasons = [str(each) for each in gather(*pendings, return_exceptions=True)]
    assert [each.rpartition(" ")[2] for each in reasons] == [
        "cancelled",
        "cancelled",
        "purged",
        "discarded",
    ]
    assert all(each.done() for each in pendings)


@pytest.mark.parametrize(
    ("remove", "reason"),
    [
        (lambda id: cancel(id=id), "cancelled"),
        (queues.cancel, "cancelled"),
        (lambda id: queues.purge(type="test.fails", waiting=True), "purged"),
    ],
    ids=["cancel", "queues.cancel", "purge"],
)
def test_one_that_is_requeued_and_removed_is_unanswered(
    remove: Callable[[int], object], reason: str
) -> None:
    """The error of its first life is no longer its answer."""

    @handler("test.fails", name="fails", retry=NEVER)
    def fails(delivery: Any) -> str:
        raise ValueError("first")

    pending = request("test.fails")
    drain(errors="keep")
    queues.requeue(pending.id)
    remove(pending.id)
    with pytest.raises(Unanswered, match=f"will not be answered: {reason}"):
        pending.result()


def test_a_dead_letter_that_is_discarded_keeps_its_answer_and_one_requeued_gets_another() -> None:
    @handler("test.fails", name="fails", retry=NEVER)
    def fails(delivery: Any) -> str:
        if delivery.attempt == 1:
            raise ValueError("first")
        return "second"

    discarded, requeued = request("test.fails"), request("test.fails")
    drain(errors="keep")
    queues.discard(discarded.id)
    queues.requeue(requeued.id)
    drain()
    with pytest.raises(RemoteError, match="ValueError: first"):
        discarded.result()
    assert requeued.result() == "second"


# ---- the address


def test_requeued_request_is_pending_again() -> None:
    """The error it died of is no longer the answer: a new one may come."""
    broken = True

    @handler("test.echo", name="echo", retry=NEVER)
    def echo(delivery: Any) -> int:
        if broken:
            raise ValueError("no")
        return 7

    pending = request("test.echo")
    drain(errors="keep")
    assert pending.done()
    broken = False
    queues.requeue(pending.id)
    assert not pending.done()
    with pytest.raises(ReplyTimeout):
        pending.result(timeout=0)
    drain()
    assert pending.result() == 7


def test_a_reply_is_found_again_by_its_id() -> None:
    """RMQ-18: asked for twice it is the same address; it travels by id or pickled."""
    echo()
    pending = request("test.echo", {"n": 1})
    others = [PendingReply(pending.id), pickle.loads(pickle.dumps(pending))]  # noqa: S301
    assert others == [pending, pending]
    assert {pending, *others} == {pending}
    assert PendingReply(pending.id + 1) != pending
    assert pending != pending.id
    assert repr(others[1]) == f"<PendingReply {pending.id} test.echo>"
    drain()
    assert gather(pending, *others) == [{"n": 1}] * 3


def test_missing_reply_raises() -> None:
    """An id that does not exist, a message that nobody asked, a reply that was forgotten."""
    echo()
    pending = request("test.echo")
    drain()
    Result.objects.all().delete()
    for each in (pending, PendingReply(1), PendingReply(add(queue="mail").pk)):
        with pytest.raises(CannotWait, match="no reply to message"):
            each.result()
    assert gather(pending, return_exceptions=True)[0].__class__ is CannotWait


@pytest.mark.parametrize("id", ["7", True, 0, -1, 2**63, None, 1.0])
def test_invalid_id_is_refused(id: Any) -> None:
    """One loop waits for all replies: an id it cannot look up would fail every wait."""
    with pytest.raises(InvalidOption, match="id must be a whole number"):
        PendingReply(id)


def test_gather_takes_only_requests() -> None:
    echo()
    pending = request("test.echo")
    for wrong in ([pending], pending.id):
        with pytest.raises(TypeError, match="gather\\(p1, p2\\)"):
            gather(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="gather\\(p1, p2\\)"):
            async_to_sync(agather)(pending, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 5000 + "]" * 5000], ids=["digits", "depth"])
def test_unreadable_result_fails_only_its_reply(value: str) -> None:
    """Rows may come from others; an unreadable one is an error of its reply alone."""
    good, bad = (Result.objects.create(message_id=n, value=n) for n in (1, 2))
    with connection.cursor() as cursor:
        cursor.execute(
            "update django_mq_result set value = %s::jsonb where message_id = 2",
            [value],
        )
    found = gather(PendingReply(good.pk), PendingReply(bad.pk), return_exceptions=True)
    assert found[0] == 1
    assert isinstance(found[1], UnreadablePayload | list)  # newer Pythons read that depth
