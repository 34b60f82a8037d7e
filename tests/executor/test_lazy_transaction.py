"""A lazy transaction: users of the connection commit or roll back with it, others do not."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from django_mq import handler
from django_mq.executor import settlement
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import (
    PATIENCE,
    Bench,
    add_many,
    attempts_of,
    effect,
    effects,
    pid_of,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("make_bench", [True], ids=["fresh"], indirect=True),
]


class Sent:
    """What the connection of a bench sends, as libpq traces it."""

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


@contextlib.contextmanager
def row_locked(id: int) -> Iterator[psycopg.Connection[Any]]:
    """Another session has the row of a message while the block lasts."""
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [id])
        yield other


def until_it_waits(pid: int) -> None:
    """Return when the backend waits for a lock."""
    with second_connection() as other:
        is_waiting = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        for _ in range(int(PATIENCE / 0.01)):
            if other.execute(is_waiting, [pid]).fetchone()[0]:  # type: ignore[index]
                return
            other.execute("select pg_sleep(0.01)")
    raise AssertionError("it does not wait")


def mixed(delivery: Delivery) -> None:
    """Write where the payload says so."""
    if delivery.payload == "writes":
        effect(delivery)


# ---- what the server hears


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
def test_the_transaction_begins_as_the_alias_says(bench: Bench, level: str, words: str) -> None:
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


# ---- users and others


def test_others_do_not_run_again_for_a_user_whose_transaction_is_lost(bench: Bench) -> None:
    """The connection dies under the second user: who used nothing is settled all the same."""
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
    bench.run_all([*remainder.again, *remainder.left])
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
    """Its hooks are dropped with it: whoever has it now runs its own."""
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
    """A row that is gone was ours: nobody else removes leased rows."""
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


def test_the_answer_to_the_end_of_a_failure_is_lost(
    make_bench: Callable[..., Bench], proxy: Proxy
) -> None:
    """The server says what became of its transaction: it counts once."""
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


# ---- rows that another session has


def test_a_user_waits_for_a_renewal_that_has_its_row(bench: Bench) -> None:
    """Else a handler that ran for long would run twice for nothing."""
    released = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.id == message.pk:
            threading.Thread(target=let_go).start()
        effect(delivery)

    def let_go() -> None:
        until_it_waits(pid)
        released.set()

    before, message = add_many(2, handler="h")
    first, *tasks = bench.claim()
    bench.run([first])
    pid = pid_of(bench)
    with second_connection() as other:
        held = threading.Event()

        def hold() -> None:
            with other.transaction():
                other.execute(
                    "select from django_mq_queuedmessage where id = %s for update", [message.pk]
                )
                held.set()
                assert released.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(PATIENCE)
        remainder = bench.run(tasks)
        thread.join()
    # The wait is bounded by half a second, which a busy machine may need for itself.
    if remainder.locked:
        bench.run_all(remainder.locked)
    assert effects() == {before.pk, message.pk}
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("swallows", [True, False])
def test_a_user_whose_row_another_session_keeps_runs_again_uncharged(
    bench: Bench, swallows: bool
) -> None:
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        with contextlib.suppress(Exception) if swallows else contextlib.nullcontext():
            effect(delivery)
        if swallows and len(ran) == 1:
            with pytest.raises(Exception, match="another session has the row"):
                effect(delivery)  # nothing passes, however often it is tried

    message, after = add_many(2, handler="h")
    tasks = bench.claim()
    with row_locked(message.pk):
        remainder = bench.run(tasks)
        assert remainder.locked == tasks[:1]
        assert remainder.left == tasks[1:]
        assert (effects(), ran) == (set(), [message.pk])
    bench.run_all([*remainder.left, *remainder.locked])
    assert effects() == {message.pk, after.pk}
    assert ran.count(message.pk) == 2
    assert FailedAttempt.objects.count() == 0


def test_a_row_that_cannot_be_locked_joins_a_later_slice(bench: Bench) -> None:
    """One that has not started when a neighbour uses the connection; that one is done."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        effect(delivery)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with row_locked(messages[1].pk):
        remainder = bench.run(tasks)
        assert (remainder.locked, remainder.left, remainder.again) == ([tasks[1]], [], [])
        assert effects() == {messages[0].pk, messages[2].pk}
    bench.run_all(remainder.locked)
    assert ran == [messages[0].pk, messages[2].pk, messages[1].pk]


def test_a_locked_row_of_one_that_used_nothing_is_waited_for(bench: Bench) -> None:
    """Its neighbours are settled meanwhile; it does not run again."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    pid = pid_of(bench)
    with second_connection() as other:
        other.execute("begin")
        other.execute(
            "select from django_mq_queuedmessage where id = %s for update", [messages[1].pk]
        )
        thread = threading.Thread(target=lambda: (until_it_waits(pid), other.execute("commit")))
        thread.start()
        bench.run_all(tasks)
        thread.join()
    assert waiting() == set()
    assert ran == [m.pk for m in messages]
    assert sorted(bench.settled) == ran


def test_a_row_that_stays_locked_does_not_hold_the_executor_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some waits of half a second its lease is left to lapse; nothing is charged here."""
    monkeypatch.setattr(settlement, "MOST_CONFLICTS", 1)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(2, handler="h")
    tasks = bench.claim()
    with row_locked(messages[0].pk):
        remainder = bench.run(tasks)
    assert (remainder.left, remainder.again, remainder.locked) == ([], [], [])
    assert waiting() == {messages[0].pk}
    assert sorted(bench.settled) == [m.pk for m in messages]
    assert FailedAttempt.objects.count() == 0
    assert stored(messages[0]).claimed_by is not None


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
    bench.slices._slice_seconds = 0.02  # how long a slice of two waits for a lock: half of it
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        remainder = bench.run(tasks)
    assert seen == ["LockNotAvailable"]
    assert (remainder.again, remainder.left) == (tasks[:1], tasks[1:])
    assert FailedAttempt.objects.count() == 0


def test_an_ack_that_the_server_refuses_is_a_failed_attempt(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours are acked; the retry policy says what becomes of it."""

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
    assert "settle_refused" in [getattr(r, "event", "") for r in caplog.records]


def test_the_expiry_that_the_claim_told_bars_what_is_not_locked(bench: Bench) -> None:
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
