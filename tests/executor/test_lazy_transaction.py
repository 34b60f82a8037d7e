"""A lazy transaction: messages to the server, users of the connection and others, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction
from psycopg.pq import TransactionStatus

from django_mq import handler
from django_mq.executor import session
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import Bench, add_many, attempts_of, effect, effects, pid_of, waiting
from tests.worker.proxy import Proxy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("make_bench", ["fresh"], indirect=True),
]


class Sent:
    """The bytes that a bench's connection sends, as libpq traces them."""

    def __init__(self, bench: Bench, path: Path) -> None:
        self._bench = bench
        self._file = path.open("w+")

    def start(self) -> None:
        self._bench.session.connect().pgconn.trace(self._file.fileno())

    def queries(self) -> list[str]:
        self._file.flush()
        messages = re.split(r"(?m)^(?=\d{4}-\d\d-\d\d )", Path(self._file.name).read_text())
        return [each for each in messages if re.search(r"\tF\t\d+\t(Query|Parse)\t", each)]


@pytest.fixture
def sent(bench: Bench, tmp_path: Path) -> Sent:
    return Sent(bench, tmp_path / "trace")


def mixed(delivery: Delivery) -> None:
    """Write if the payload says so."""
    if delivery.payload == "writes":
        effect(delivery)


# ---- messages to the server


def test_a_slice_that_uses_nothing_is_one_round_trip(bench: Bench, sent: Sent) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add_many(3, handler="h")
    sent.start()
    bench.run_all(bench.claim())
    assert waiting() == set()
    (query,) = sent.queries()
    assert "delete from django_mq_queuedmessage" in query


def test_the_first_use_begins_locks_and_opens_the_savepoint_in_one(
    bench: Bench, sent: Sent
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    add_many(2, handler="h")
    sent.start()
    bench.run_all(bench.claim())
    first, *others = sent.queries()
    assert '"begin; set local' in first
    assert "skip locked" in first
    assert "; savepoint django_mq_delivery; set local" in first
    assert not any("skip locked" in query or "begin" in query.lower() for query in others)


@pytest.mark.parametrize(
    ("level", "words"),
    [("SERIALIZABLE", "isolation level serializable"), ("REPEATABLE_READ", "repeatable read")],
)
def test_transaction_has_the_isolation_level_of_its_alias(
    bench: Bench, level: str, words: str
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute("show transaction_isolation")
            seen.append(cursor.fetchone()[0])

    bench.session.connect().isolation_level = psycopg.IsolationLevel[level]
    add(handler="h")
    bench.run_all(bench.claim())
    assert seen[0] in words
    assert waiting() == set()


def test_the_first_message_of_a_connection_is_not_locked(bench: Bench) -> None:
    """Guarantee 6: a frozen worker then holds nothing but a lease."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(bench.wrapper.__dict__["connection"].info.transaction_status)

    add(handler="h")
    bench.run_all(bench.claim())
    assert seen == [TransactionStatus.IDLE]


def test_a_silent_connection_is_probed_and_nothing_is_locked(
    bench: Bench, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    sent.start()
    monkeypatch.setattr(session, "STALE_AFTER", -1.0)
    bench.run_all(bench.claim())
    probe, ack = sent.queries()
    assert '"select 1"' in probe
    assert "delete from django_mq_queuedmessage" in ack


def test_no_handler_meets_the_error_of_a_connection_that_was_cut_unnoticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        calls.append(delivery.attempt)
        effect(delivery)

    message = add(handler="h")
    pid = bench.session.connect().info.backend_pid
    with second_connection() as other:
        other.execute("select pg_terminate_backend(%s, 10000)", [pid])
    bench.slices.prepare()  # as an executor does before it waits
    monkeypatch.setattr(session, "STALE_AFTER", -1.0)
    bench.run_all(bench.claim())
    assert (effects(), waiting(), attempts_of(message)) == ({message.pk}, set(), [])
    assert calls == [1]


# ---- users and others


def test_others_do_not_run_again_for_a_user_whose_transaction_is_lost(bench: Bench) -> None:
    """The connection dies under the second user: messages that used nothing are settled anyway."""
    ran: list[str] = []
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)
        transaction.on_commit(lambda: hooks.append(delivery.payload))
        if delivery.payload == "writes":
            effect(delivery)
        if delivery.payload == "dies" and ran.count("dies") == 1:
            effect(delivery)
            with second_connection() as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [pid_of(bench)])
            effect(delivery)

    payloads = ["nothing", "writes", "nothing too", "dies", "after"]
    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(payloads)]
    remainder = bench.run(bench.claim())
    assert waiting() == {messages[place].pk for place in (1, 3, 4)}
    assert hooks == ["nothing", "nothing too"]
    assert attempts_of(messages[3]) == ["django.db.utils.OperationalError"]
    bench.run_all([*remainder.to_rerun, *remainder.left])
    assert [ran.count(payload) for payload in payloads] == [1, 2, 1, 1, 1]
    assert effects() == {messages[1].pk}


def test_a_failure_of_one_that_used_nothing_is_written_after_the_slice(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        mixed(delivery)
        if delivery.payload == "fails":
            raise ValueError

    messages = [
        add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["writes", "fails", ""])
    ]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk}
    assert waiting() == {messages[1].pk}
    assert attempts_of(messages[1]) == ["ValueError"]
    assert bench.runs == [[m.pk for m in messages]]


def test_one_that_used_nothing_and_was_taken_over_is_lost_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hooks are dropped with it: its new worker runs its own."""
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(lambda: hooks.append(delivery.id))
        if delivery.id == messages[0].pk:
            with second_connection() as other:
                other.execute(
                    "update django_mq_queuedmessage set claimed_by = 'you:1', attempts = 2"
                    " where id = %s",
                    [messages[1].pk],
                )

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == {messages[1].pk}
    assert hooks == [messages[0].pk, messages[2].pk]
    assert [r.message_id for r in caplog.records if r.event == "lease_lost"] == [  # type: ignore[attr-defined]
        messages[1].pk
    ]
    assert stored(messages[1]).claimed_by == "you:1"


def test_the_answer_to_an_ack_is_lost(make_bench: Callable[..., Bench], proxy: Proxy) -> None:
    """A deleted row was ours: nobody else removes leased rows."""
    bench = make_bench(port=proxy.port)
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = add_many(3, handler="h")
    proxy.cut_at("delete from django_mq", arrives=True)
    bench.run_all(bench.claim())
    assert proxy.cuts == 1
    assert ran == bench.settled == [m.pk for m in messages]
    assert waiting() == set()


CONFLICT_AT_THE_SECOND_DELETE = """
create sequence deletes;
create function conflict_at_the_second() returns trigger language plpgsql as $$
begin
  if nextval('deletes') = 2 then raise exception 'conflict' using errcode = '40001'; end if;
  return null;
end $$;
create trigger conflict_at_the_second before delete on django_mq_queuedmessage
   for each statement execute function conflict_at_the_second();
"""


def test_the_answer_to_an_ack_is_lost_and_the_next_try_is_in_conflict(
    make_bench: Callable[..., Bench], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is then settled alone, and is still known to be acked, perhaps, by the first try."""
    bench = make_bench(port=proxy.port)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with second_connection() as other:
        other.execute(CONFLICT_AT_THE_SECOND_DELETE)
        try:
            proxy.cut_at("delete from django_mq", arrives=True)
            bench.run_all(tasks)
            [(deletes,)] = other.execute("select last_value from deletes").fetchall()
        finally:
            other.execute("drop function conflict_at_the_second cascade; drop sequence deletes")
    assert (proxy.cuts, deletes) == (1, 5)
    assert waiting() == set()
    assert bench.settled == [m.pk for m in messages]
    assert "lease_lost" not in [getattr(record, "event", "") for record in caplog.records]


def test_the_answer_to_the_end_of_a_failure_is_lost(
    make_bench: Callable[..., Bench], proxy: Proxy
) -> None:
    """The server reports the outcome of its transaction: it counts once."""
    bench = make_bench(port=proxy.port)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h")
    proxy.cut_at("COMMIT", arrives=True)
    bench.run_all(bench.claim())
    assert proxy.cuts == 1
    assert FailedAttempt.objects.count() == 1
    assert (stored(message).attempts, bench.settled) == (1, [message.pk])


# ---- refusals


def test_a_user_sees_the_errors_of_django(bench: Bench) -> None:
    seen: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        try:
            connection.cursor()
        except OperationalError as error:
            seen.append(type(error.__cause__).__name__)
            raise

    add_many(2, handler="h")
    bench.slices._slice_seconds = 0.02  # a slice of two waits for a lock half as long
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        remainder = bench.run(tasks)
    assert seen == ["LockNotAvailable"]
    assert (remainder.to_rerun, remainder.left) == (tasks[:1], tasks[1:])
    assert FailedAttempt.objects.count() == 0


def test_an_ack_that_the_server_refuses_is_a_failed_attempt(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours are acked; the retry policy decides about it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    with second_connection() as other:
        other.execute(
            "create function mq_refuse() returns trigger language plpgsql as"
            " $$ begin raise exception 'refused'; end $$;"
            "create trigger mq_refuse before delete on django_mq_queuedmessage"
            f" for each row when (old.id = {messages[1].pk}) execute function mq_refuse()"
        )
        try:
            bench.run_all(bench.claim())
        finally:
            other.execute("drop function mq_refuse cascade")
    assert waiting() == {messages[1].pk}
    assert attempts_of(messages[1]) == ["psycopg.errors.RaiseException"]
    assert QueuedMessage.objects.get().leased_until is None
    (said,) = [r for r in caplog.records if getattr(r, "event", "") == "settle_refused"]
    assert said.getMessage().endswith("; the attempt fails")


def test_unlocked_message_that_expired_since_its_claim_does_not_run(bench: Bench) -> None:
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    message = add(handler="h", expires=60)
    later = add(handler="h", expires=3600)
    tasks = bench.claim()
    for task in tasks:
        task.delivery._asked_at -= 61
    bench.run_all(tasks)
    assert ran == [later.pk]
    assert stored(message).dead_reason == "expired"
    assert stored(message).attempts == 0
