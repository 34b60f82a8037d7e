"""drain() and failing handlers: the first error is raised, or all are kept."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from django.db import IntegrityError

from django_mq import Reject, Retry, RetryPolicy, Snooze, fixed, handler
from django_mq.handlers import isolated
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import drain, due
from testproject.shop.models import Product
from tests.testing.drain.conftest import _fails, names, send, write


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["atomic", "not atomic", "async", "batch"])
def test_the_first_error_is_raised_as_it_was(kind: str) -> None:
    """Its traceback shows the handler, and a note names it; all other messages have run."""

    def culprit() -> None:
        raise ValueError("no such customer")

    ran: list[int] = []
    if kind == "async":

        @handler("test.fails", name="fails")
        async def fails(delivery: Any) -> None:
            culprit()
    else:

        @handler("test.fails", name="fails", atomic=kind != "not atomic", batch=kind == "batch")
        def also_fails(delivery: Any) -> None:
            culprit()

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None:
        ran.append(delivery.id)

    (first,) = send("test.fails").ids
    (second,) = send("test.fails").ids
    (fine,) = send("test.ok").ids
    with pytest.raises(ValueError, match="no such customer") as caught:
        drain()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "culprit"
    (note, more) = caught.value.__notes__
    assert note == (
        f"raised by handler fails: message {first} (test.fails), queue default, attempt 1 of 20"
    )
    assert more == '1 more attempt failed meanwhile; drain(errors="keep") returns all errors'
    assert ran == [fine]
    assert [row.pk for row in QueuedMessage.objects.order_by("pk")] == [first, second]
    assert {row.state for row in QueuedMessage.objects.all()} == {"retrying"}
    assert FailedAttempt.objects.count() == 2
    assert drain() == 0, "it is told once"


@pytest.mark.django_db
def test_errors_may_be_kept() -> None:
    _fails(KeyError("x"))

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None: ...

    assert drain(errors="keep") == []
    send("test.ok")
    send("test.fails")
    errors = drain(errors="keep")
    assert [type(each) for each in errors] == [KeyError]
    assert errors.deliveries == 2
    assert "message" in errors[0].__notes__[0]
    with pytest.raises(ValueError, match='errors must be "raise" or "keep"'):
        drain(errors="ignore")  # type: ignore[call-overload]


@pytest.mark.django_db
def test_retry_snooze_and_reject_are_no_failures() -> None:
    """Retry and Snooze ask for a later run, Reject for no further one."""
    for number, error in enumerate((Retry(after=60), Snooze(60), Reject("not for us"))):
        with isolated():
            _fails(error)
            send("test.fails")
            assert drain() == 1, number
    assert [row.state for row in QueuedMessage.objects.order_by("pk")] == [
        "retrying",
        "delayed",
        "dead",
    ]


@pytest.mark.django_db
def test_a_retry_that_cannot_be_had_is_a_failure() -> None:
    """The handler relies on another attempt, and there is none left."""
    _fails(Retry(after=60), retry=RetryPolicy.never())
    send("test.fails")
    with pytest.raises(Retry) as caught:
        drain()
    assert caught.value.__notes__[0].endswith("attempt 1 of 1")


@pytest.mark.django_db
def test_every_failed_attempt_is_returned() -> None:
    """A policy without a wait runs all of them in one drain."""

    @handler("test.fails", name="fails", retry=RetryPolicy(max_attempts=3, backoff=fixed(0)))
    def fails(delivery: Any) -> None:
        raise ValueError(f"attempt {delivery.attempt}")

    send("test.fails")
    errors = list(drain(errors="keep"))
    for _ in range(3):
        due()
        errors += drain(errors="keep")
    assert [str(each) for each in errors] == ["attempt 1", "attempt 2", "attempt 3"]
    assert QueuedMessage.objects.get().state == "dead"


@pytest.mark.django_db
def test_an_assertion_in_a_handler_reaches_the_test() -> None:
    @handler("test.fails", name="fails", retry=RetryPolicy.never())
    def fails(delivery: Any) -> None:
        pytest.fail("this handler must not run")

    send("test.fails")
    with pytest.raises(pytest.fail.Exception, match="must not run"):
        drain()


@pytest.mark.django_db
@pytest.mark.parametrize("errors", ["raise", "keep"])
def test_ctrl_c_is_not_kept(errors: Any) -> None:
    _fails(KeyboardInterrupt(), retry=RetryPolicy(backoff=fixed(3600)))  # once in this test
    ran: list[int] = []

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None:
        ran.append(delivery.id)

    send("test.fails")
    send("test.ok")
    with pytest.raises(KeyboardInterrupt):
        drain(errors=errors)
    assert not ran
    assert drain() == 1


@pytest.mark.django_db
def test_an_error_that_takes_no_note_is_raised_without_one() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("frozen")

    _fails(Frozen("no"))
    send("test.fails")
    with pytest.raises(Frozen):
        drain()


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_a_database_error_of_a_handler_leaves_the_test_its_transaction(atomic: bool) -> None:
    @handler("test.fails", name="fails", atomic=atomic)
    def fails(delivery: Any) -> None:
        write("undone")
        Product.objects.create(pk=taken.pk, name="again", price=1)

    taken = Product.objects.create(name="first", price=1)
    send("test.fails")
    with pytest.raises(IntegrityError):
        drain()
    assert names() == {"first"}
    assert QueuedMessage.objects.get().state == "retrying"


@pytest.mark.django_db
def test_writes_of_a_nonatomic_handler_stay() -> None:
    """As outside a test, where each of its statements commits by itself."""

    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        write("stays")
        raise ValueError

    send("test.fails")
    with pytest.raises(ValueError):  # noqa: PT011
        drain()
    assert names() == {"stays"}


@pytest.mark.django_db
def test_error_after_finish_is_raised_and_the_end_holds() -> None:
    @handler("test.any", name="any", atomic=False)
    def any_(delivery: Any) -> None:
        with delivery.finish():
            write("finished")
        raise ValueError("too late")

    send("test.any")
    with pytest.raises(ValueError, match="too late"):
        drain()
    assert names() == {"finished"}
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
def test_misspelt_queue_warns() -> None:
    """`assert drain("mial") == 0` would prove nothing."""
    with isolated():

        @handler("test.ok", queue="mail")
        def ok(delivery: Any) -> None: ...

        with pytest.warns(
            UserWarning, match="no handler uses the queue 'mial': did you mean 'mail'"
        ):
            assert drain("mial") == 0
        assert drain("mail") == drain("default") == drain("other") == 0
