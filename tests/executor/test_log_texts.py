"""The text of an exception may be as private as a payload: the log has its class and place."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_mq import (
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    UnexpectedPayload,
    fixed,
    handler,
    message,
    queues,
    signals,
)
from django_mq.conf.error_logs import error_name
from django_mq.executor import reports
from django_mq.executor.ended import failure_end
from django_mq.messages import Delivery, classes
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.policy.outcomes import AttemptEnded, WorkerLost, cut_short
from django_mq.worker import refused_rows
from tests.roles import acting_as, make_role
from tests.rows import add, stored
from tests.waiting import until
from tests.worker.conftest import Bench, Running, Said

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
SECRET = "joe@example.com"


class Fails(Exception):
    """Raised by a handler."""


def breaks() -> float:
    raise Fails(SECRET)


def all_of(caplog: pytest.LogCaptureFixture) -> str:
    """Return every line as in a log file, with tracebacks, and the attributes of the records."""
    formatter = logging.Formatter()
    records = [record for record in caplog.records if record.name == "django_mq"]
    return "\n".join(
        f"{formatter.format(each)} { ({**each.__dict__, 'exc_info': None}) }" for each in records
    )


def run_all(start: Start) -> None:
    """Run handlers that fail in every way that is logged."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=2, backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        if delivery.type == "retry":
            raise Retry(0) from Fails(SECRET)
        if delivery.type == "snooze":
            raise Snooze(3600) from Fails(SECRET)
        if delivery.type == "reject":
            raise Reject(SECRET)
        if delivery.type == "hook":
            transaction.on_commit(breaks)
            return
        if delivery.type == "refused":
            with connection.cursor() as cursor:
                cursor.execute("select %s::text::int", [SECRET])
        raise Fails(SECRET)

    @handler("#", queue="mail", name="policy", retry=RetryPolicy(3, lambda attempt: breaks()))
    def policy(delivery: Delivery) -> None:
        raise Fails(SECRET)

    @handler("#", queue="mail", name="finished", atomic=False)
    def finished(delivery: Any) -> None:
        with delivery.finish():
            pass
        raise Fails(SECRET)

    for type in ("fails", "retry", "snooze", "reject", "hook", "refused"):
        add(handler="h", type=type, max_attempts=2)
    add(handler="policy", max_attempts=3)
    add(handler="finished")
    assert start(until_empty=True).join()


@dataclass
class Placed:
    order_id: int = 0
    tags: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.order_id < 0:
            raise ValueError(SECRET)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"order_id": SECRET}, "InvalidPayload: Placed: order_id must be a whole number; got text"),
        ({"tags": {SECRET: "x"}}, "Placed: tags[...] must be a whole number; got text"),
        ({"order_id": -1}, "InvalidPayload: Placed: is refused by Placed: ValueError"),
    ],
    ids=["type", "key", "own"],
)
def test_field_with_wrong_content_is_logged(
    payload: Any, reason: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The package's own text, without any of the payload's or the application's."""
    with classes.isolated():
        message("typed")(Placed)

        @handler("typed", queue="mail", name="h")
        def h(event: Placed) -> None: ...

        add(handler="h", type="typed", payload=payload)
        assert start(until_empty=True).join()
    lines = all_of(caplog)
    assert SECRET not in lines
    assert f"{reason} (django_mq.exceptions.UnexpectedPayload)" in lines
    assert "text is hidden" not in lines


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerLost("process 7 was killed by SIGKILL"), "process 7 was killed by SIGKILL"),
        (cut_short(None, 2.0), "the handler ran for 2 s, past its timeout: the option timeout"),
        (cut_short("ana\nforged line"), "stopped by ana forged line"),
    ],
)
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_external_end_of_an_attempt_is_logged(
    error: AttemptEnded,
    text: str,
    max_attempts: int,
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The package's own text; what the handler raised because of it is left out."""
    handler("#", name="h")(lambda delivery: None)
    error.__cause__ = Fails(SECRET)
    add(handler="h", max_attempts=max_attempts)
    [task] = bench.claim()
    reports.all_ended([failure_end(task.delivery, RetryPolicy(), error, seconds=0.0)])
    lines = all_of(caplog)
    assert f"{type(error).__name__}: {text}" in lines
    assert "text is hidden" not in lines
    assert SECRET not in lines


def test_text_of_a_raised_unexpected_payload_is_hidden(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise UnexpectedPayload(SECRET)

    add(handler="h")
    assert start(until_empty=True).join()
    assert SECRET not in all_of(caplog)
    assert "is dead: rejected (django_mq.exceptions.UnexpectedPayload)" in all_of(caplog)


def receiver(**data: Any) -> None:
    raise Fails(SECRET)


@pytest.fixture
def _broken_receiver() -> Any:
    signals.message_dead.connect(receiver)
    yield
    signals.message_dead.disconnect(receiver)


@pytest.mark.usefixtures("_broken_receiver")
def test_no_text_of_an_exception_is_in_the_log(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.DJANGO_MQ = {"RETRY_FLOOR": 0}
    caplog.set_level(logging.DEBUG, "django_mq")
    run_all(start)
    lines = all_of(caplog)
    assert SECRET not in lines
    events = {getattr(record, "event", "") for record in caplog.records}
    assert events >= {
        "message_retried", "message_dead", "hook_failed", "failed_after_finish", "receiver_failed",
        "bad_backoff",
    }  # fmt: skip
    assert f"failed ({__name__}.Fails)" in lines
    assert "is dead: rejected (django_mq.exceptions.Reject)" in lines
    assert f"{__name__}.Fails at {__file__}:" in lines  # where no one else keeps it


def test_a_refused_claim_is_no_lost_database_and_shows_no_row(
    start: Start,
    said: Said,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's message about a refused row contains the row."""
    monkeypatch.setattr(refused_rows, "LEAVE_OUT_SECONDS", 1.0)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    running = start()
    said.wait("message_acked")
    refusing = "alter table django_mq_queuedmessage {} constraint refusing"
    with connection.cursor() as cursor:
        cursor.execute(f"{refusing.format('add')} check (attempts = 0)")
    try:
        bad = add(handler="h", payload={"mail": SECRET})
        until(lambda: "claim_refused" in [getattr(each, "event", "") for each in caplog.records])
    finally:
        with connection.cursor() as cursor:
            cursor.execute(refusing.format("drop"))
    said.wait("message_acked", 2)
    running.stop()
    lines = all_of(caplog)
    assert SECRET not in lines
    assert "the database refuses it (psycopg.errors.CheckViolation" in lines
    assert "database lost" not in lines
    assert not QueuedMessage.objects.filter(pk=bad.pk).exists()


def test_the_log_has_the_stack_of_a_failure(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """For log handlers and error trackers; exceptions raised on purpose have none."""
    run_all(start)
    ended = [each for each in caplog.records if each.__dict__.get("event", "")[:8] == "message_"]
    by_type = {each.__dict__["type"]: each.exc_info for each in ended}
    assert by_type["reject"] is None
    info = by_type["fails"]
    assert info is not None
    assert info[0] is not None
    assert info[0].__name__ == "Fails"
    assert traceback.extract_tb(info[2])[-1].name == "h"
    assert info[1] is not None
    assert SECRET not in "".join(traceback.format_exception(info[1]))


def test_the_row_has_the_text(start: Start, said: Said) -> None:
    run_all(start)
    texts = set(FailedAttempt.objects.values_list("error_text", flat=True))
    assert SECRET in texts
    rejected = QueuedMessage.objects.get(type="reject")
    assert rejected.dead_reason == SECRET
    assert SECRET in queues.why(rejected.pk).error


def test_a_setting_puts_the_texts_into_the_log(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.DJANGO_MQ = {"RETRY_FLOOR": 0, "LOG_ERROR_TEXTS": True}
    run_all(start)
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"failed ({__name__}.Fails: {SECRET})" in line for line in lines)
    dead = f"is dead: {SECRET} (django_mq.exceptions.Reject)"  # the text once
    assert any(dead in line for line in lines)
    traced = {record.event for record in caplog.records if record.exc_info}  # type: ignore[attr-defined]
    assert traced == {"hook_failed", "failed_after_finish", "message_retried", "message_dead"}


def test_row_that_the_database_refuses_is_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL's detail of a violated CHECK is the whole row, with the payload."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    name = "no_dead_letters"
    message = add(handler="h", payload={"mail": SECRET}, expires=-1)
    with connection.cursor() as cursor:
        cursor.execute(
            f"alter table django_mq_queuedmessage add constraint {name} check (dead_at is null)"
        )
    try:
        assert start(until_empty=True, max_seconds=5).join()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"alter table django_mq_queuedmessage drop constraint {name}")
    assert stored(message).dead_at is None
    assert caplog.records
    assert SECRET not in all_of(caplog)


def test_a_missing_right_is_named_with_its_table() -> None:
    """The operator grants it; a trigger that raises the same error may quote the row."""
    name = make_role("mq_poor")
    said = []
    for statement in (
        "select from django_mq_queuedmessage",
        f"do $$ begin raise insufficient_privilege using message = '{SECRET}'; end $$",
    ):
        with (
            pytest.raises(psycopg.errors.InsufficientPrivilege) as refused,
            acting_as(name),
        ):
            connection.connection.execute(statement)
        said.append(error_name(refused.value))
    with connection.cursor() as cursor:
        cursor.execute(f"drop role {name}")
    table = "permission denied for table django_mq_queuedmessage"
    assert said[0] == f"psycopg.errors.InsufficientPrivilege: {table}"
    assert said[1].startswith("psycopg.errors.InsufficientPrivilege at ")
    assert SECRET not in said[1]
