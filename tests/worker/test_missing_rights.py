"""A login that loses a right: no attempt is charged, and its messages end when it is granted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import psycopg
import pytest
from django.db import ProgrammingError, connection, connections

from django_mq import RetryPolicy, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import drain
from tests.database import second_connection
from tests.roles import skip_unless_able
from tests.rows import add
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import Running, Said, effect, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
ROLE = f"mq_revoked_{os.getpid()}"


@pytest.fixture
def owner() -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """The session that grants; within the test, new sessions of the alias have a role of theirs."""
    skip_unless_able()
    options = connection.settings_dict["OPTIONS"]
    with second_connection() as owner:
        owner.execute(f"create role {ROLE}")
        owner.execute(f"grant all on schema public to {ROLE}")
        owner.execute(f"grant all on all tables in schema public to {ROLE}")
        owner.execute(f"grant all on all sequences in schema public to {ROLE}")
        connection.settings_dict["OPTIONS"] = {**options, "assume_role": ROLE}
        try:
            yield owner
        finally:
            connection.settings_dict["OPTIONS"] = options
            connections["default"].close()
            owner.execute(f"drop owned by {ROLE}; drop role {ROLE}")


@pytest.mark.parametrize(
    ("kind", "calls"), [("writes", 2), ("not atomic", 1), *slow(("uses nothing", 1), ("async", 1))]
)
def test_a_missing_right_to_ack_charges_no_attempt(
    start: Start,
    said: Said,
    owner: psycopg.Connection[tuple[object, ...]],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    calls: int,
) -> None:
    """A handler whose writes were undone runs once more, after the grant and not before."""
    attempts: list[int] = []

    def h(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if kind == "writes":
            effect(delivery)

    async def coroutine(delivery: Delivery) -> None:
        h(delivery)

    never = RetryPolicy.never()
    given = coroutine if kind == "async" else h
    handler("#", queue="mail", name="h", retry=never, atomic=kind in ("writes", "uses nothing"))(
        given
    )
    message = add(handler="h", max_attempts=1)
    owner.execute(f"revoke delete on django_mq_queuedmessage from {ROLE}")
    running = start(threads=1)
    lines = "the database refused a statement (psycopg.errors.InsufficientPrivilege: permission"
    until(lambda: caplog.text.count(lines) > 2, "it tries again and again")
    assert attempts == [1]
    owner.execute(f"grant delete on django_mq_queuedmessage to {ROLE}")
    assert [each.id for each in said.wait("message_acked")] == [message.pk]
    assert running.stop()
    assert attempts == [1] * calls
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


def test_a_missing_right_to_record_a_failure_is_waited_for(
    start: Start,
    said: Said,
    owner: psycopg.Connection[tuple[object, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h")
    owner.execute(f"revoke insert on django_mq_failedattempt from {ROLE}")
    running = start(threads=1)
    until(lambda: "permission denied for table django_mq_failedattempt" in caplog.text)
    owner.execute(f"grant insert on django_mq_failedattempt to {ROLE}")
    said.wait("message_retried")
    assert running.stop()
    assert FailedAttempt.objects.get().message_id == message.pk


@pytest.mark.slow
def test_a_right_that_stays_missing_is_waited_for_ever_longer(
    start: Start,
    said: Said,
    owner: psycopg.Connection[tuple[object, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker's other statements succeed meanwhile: they do not shorten the wait."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    add(handler="h")
    owner.execute(f"revoke delete on django_mq_queuedmessage from {ROLE}")
    running = start(threads=1)
    until(lambda: "trying again in 2 s" in caplog.text)
    assert caplog.text.count("trying again in") == 4
    owner.execute(f"grant delete on django_mq_queuedmessage to {ROLE}")
    said.wait("message_acked")
    assert running.stop()


@pytest.mark.parametrize("kind", ["writes", "uses nothing", "not atomic"])
def test_an_inline_run_raises_the_error_of_a_missing_right(
    owner: psycopg.Connection[tuple[object, ...]], kind: str
) -> None:
    """Nobody grants it while a test waits."""

    def h(delivery: Delivery) -> None:
        if kind == "writes":
            effect(delivery)

    handler("#", queue="mail", name="h", atomic=kind != "not atomic")(h)
    add(handler="h")
    connection.close()
    owner.execute(f"revoke delete on django_mq_queuedmessage from {ROLE}")
    with pytest.raises((ProgrammingError, psycopg.errors.InsufficientPrivilege)):
        drain()


@pytest.mark.parametrize("kind", ["writes", "uses nothing", "not atomic", "async"])
def test_a_right_that_one_message_needs_holds_up_no_other(
    start: Start, said: Said, owner: psycopg.Connection[tuple[object, ...]], kind: str
) -> None:
    """Its reply cannot be stored, and is skipped; the message is acked."""

    def h(delivery: Delivery) -> None:
        if kind == "writes":
            effect(delivery)

    async def coroutine(delivery: Delivery) -> None: ...

    given = coroutine if kind == "async" else h
    handler("#", queue="mail", name="h", atomic=kind in ("writes", "uses nothing"))(given)
    messages = [add(handler="h", wants_result=number == 1).pk for number in range(4)]
    owner.execute(f"revoke insert, update on django_mq_result from {ROLE}")
    running = start(threads=1)
    said.wait("message_acked", 4)
    assert running.stop()
    assert sorted(said.ids("message_acked")) == messages
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


def test_a_drain_does_not_wait_for_a_right(
    start: Start, owner: psycopg.Connection[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    add(handler="h")
    owner.execute(f"revoke delete on django_mq_queuedmessage from {ROLE}")
    running = start(threads=1, drain_seconds=1)
    until(lambda: "permission denied for table django_mq_queuedmessage" in caplog.text)
    running.stop()
    connections["default"].close()
    assert QueuedMessage.objects.get().attempts == 1
    assert FailedAttempt.objects.count() == 0
