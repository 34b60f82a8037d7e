"""Slices of handlers that keep away from their connection, and of those that do not after all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.worker import locking
from django_mq.worker.aloof import SLICES_WITHOUT
from tests.rows import add
from tests.worker.conftest import Bench, add_many, attempts_of, effect, effects, pid_of, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

STATE = "select state from pg_stat_activity where pid = %s"
WAITS = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"


aloof = pytest.mark.parametrize("make_bench", ["aloof"], indirect=True)
as_it_comes = pytest.mark.parametrize("make_bench", ["as it comes"], indirect=True)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note when the server is asked to lock a row, or to begin a settle without that."""
    events: list[str] = []
    send = locking._send

    def noting(driver: Any, statements: str) -> None:
        if "prepare" not in statements:
            events.append("lock" if "lock_one" in statements else "settle")
        send(driver, statements)

    monkeypatch.setattr(locking, "_send", noting)
    return events


@as_it_comes
def test_who_left_its_connection_alone_is_not_locked_for_next_time(
    bench: Bench, events: list[str], other: psycopg.Connection[Any]
) -> None:
    """And has no transaction open, unless it uses its connection: then its row is."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        events.append("starts")
        if "lock" not in events:
            assert other.execute(STATE, [pid]).fetchone() == ("idle",)
        if delivery.payload == "writes":
            effect(delivery)
            assert other.execute(STATE, [pid]).fetchone() == ("idle in transaction",)
            query = "select from django_mq_queuedmessage for update skip locked"
            assert other.execute(query).fetchall() == []

    seen: list[list[str]] = []
    for payload in ("", "", "writes", "writes", *[""] * SLICES_WITHOUT, ""):
        message = add(handler="h", payload=payload)
        tasks = bench.claim()
        connection.ensure_connection()
        pid = connection.connection.info.backend_pid
        bench.run(tasks)
        assert (bench.settled[-1], waiting()) == (message.pk, set())
        seen.append(events.copy())
        events.clear()
    at_once, never, late = ["lock", "starts"], ["starts", "settle"], ["starts", "lock", "settle"]
    assert seen == [at_once, never, late, at_once, *[at_once] * SLICES_WITHOUT, never]
    assert effects() == set(bench.settled[2:4])


@as_it_comes
def test_it_counts_for_each_handler(bench: Bench, events: list[str]) -> None:
    @handler("one", queue="mail", name="one")
    def one(delivery: Delivery) -> None:
        events.append("one")

    @handler("two", queue="mail", name="two")
    def two(delivery: Delivery) -> None:
        events.append("two")
        effect(delivery)

    for name in ("one", "two") * 2:
        add(handler=name, type=name)
        bench.run(bench.claim())
    assert events == ["lock", "one", "lock", "two", "one", "settle", "lock", "two"]


@aloof
@pytest.mark.parametrize("uses", [False, True])
def test_a_renewal_of_a_row_that_is_not_locked_is_waited_for(
    bench: Bench, other: psycopg.Connection[Any], uses: bool
) -> None:
    """It takes a moment: nobody may run twice for that."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        other.execute("begin")
        other.execute("update django_mq_queuedmessage set leased_until = now() + interval '1 min'")
        thread.start()
        if uses:
            with connection.cursor() as cursor:
                cursor.execute("show lock_timeout")
                assert cursor.fetchone() == ("0",)

    def commit_when_it_waits() -> None:
        deadline = monotonic() + 30
        while monotonic() < deadline and not other.execute(WAITS, [pid]).fetchone()[0]:  # type: ignore[index]
            other.execute("select pg_stat_clear_snapshot()")
        waited.append(monotonic() < deadline)
        other.execute("commit")

    waited: list[bool] = []
    thread = threading.Thread(target=commit_when_it_waits)
    message = add(handler="h")
    tasks = bench.claim()
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    bench.run_all(tasks)
    thread.join()
    assert (ran, waited, bench.settled, waiting()) == ([message.pk], [True], [message.pk], set())


@aloof
def test_what_was_taken_over_meanwhile_is_not_settled(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 4: by its fence, as everything."""
    hooks: list[int] = []
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(1))
        other.execute("update django_mq_queuedmessage set attempts = 2, claimed_by = 'x:1'")

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert (hooks, waiting(), bench.settled) == ([], {message.pk}, [message.pk])
    assert ran == [message.pk]  # somebody else runs it


@aloof
def test_a_hook_of_one_that_was_not_locked_uses_its_connection(bench: Bench) -> None:
    """Nothing asks for the lock of a message that is gone."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(look)

    def look() -> None:
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from django_mq_queuedmessage")
            seen.append((cursor.fetchone(), connection.in_atomic_block))

    add(handler="h")
    bench.run_all(bench.claim())
    assert seen == [((0,), False)]


@aloof
@pytest.mark.parametrize("raises", [False, True])
def test_a_connection_that_is_lost_while_it_is_not_used(
    bench: Bench, other: psycopg.Connection[Any], raises: bool
) -> None:
    """As by idle_session_timeout: nothing of what ran is lost with it, so nobody runs twice."""
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(delivery.id))
        pid = bench.wrapper.__dict__["connection"].info.backend_pid
        other.execute("select pg_terminate_backend(%s, 10000)", [pid])
        if raises:
            raise ValueError("and it failed")

    message = add(handler="h", max_attempts=5)
    bench.run_all(bench.claim())
    assert (ran, bench.settled) == ([message.pk], [message.pk])
    assert waiting() == ({message.pk} if raises else set())
    assert hooks == ([] if raises else [message.pk])
    assert FailedAttempt.objects.count() == raises


@aloof
def test_the_time_of_a_handler_goes_on_when_it_is_locked_late(bench: Bench) -> None:
    """Its deadline stays what it was when it started, but for the time it waited."""
    deadlines: list[float] = []

    @handler("#", queue="mail", name="h", timeout=100)
    def h(delivery: Delivery) -> None:
        deadlines.extend(entry.deadline for entry in bench.board.read("bench"))
        until = monotonic() + 0.3
        while monotonic() < until:
            pass
        began = monotonic()
        connection.cursor()
        waited.append(monotonic() - began)
        deadlines.extend(entry.deadline for entry in bench.board.read("bench"))

    waited: list[float] = []
    add(handler="h")
    bench.run_all(bench.claim())
    assert 0 <= deadlines[1] - deadlines[0] + 0.01 <= waited[0] + 0.02


# ---- several in a slice


@aloof
def test_several_run_without_a_transaction(
    bench: Bench, events: list[str], other: psycopg.Connection[Any]
) -> None:
    """And are acked in one; no row is locked before."""
    messages = add_many(3, handler="h")
    locked = "select id from django_mq_queuedmessage for no key update skip locked"
    free: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert other.execute(STATE, [pid_of(bench)]).fetchone() == ("idle",)
        free.append(len(other.execute(locked).fetchall()))

    bench.run_all(bench.claim())
    assert (free, events) == ([3, 3, 3], ["settle"])
    assert (bench.settled, bench.runs) == ([m.pk for m in messages], [[m.pk for m in messages]])
    assert waiting() == set()


def run(bench: Bench, do: Callable[[Delivery], None]) -> tuple[list[Any], list[int], list[int]]:
    """Run four messages of which the third calls `do`; return them, who ran, and whose hooks."""
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(delivery.id))
        if delivery.id == messages[2].pk:
            do(delivery)

    messages = add_many(4, handler="h", max_attempts=5)
    bench.run_all(bench.claim())
    return [message.pk for message in messages], ran, hooks


@aloof
def test_who_uses_its_connection_ends_the_slice(bench: Bench) -> None:
    """What it writes commits with its own ack, and with those of who was before it."""

    def write(delivery: Delivery) -> None:
        effect(delivery)
        assert (effects(), len(waiting())) == (set(), 4)

    ids, ran, hooks = run(bench, write)
    assert (ran, hooks, bench.settled) == (ids, ids, ids)
    assert bench.runs == [ids, ids[3:]]
    assert (effects(), waiting()) == ({ids[2]}, set())


@aloof
def test_who_uses_its_connection_and_fails(bench: Bench) -> None:
    """Nothing of it is kept but that it failed."""

    def fail(delivery: Delivery) -> None:
        effect(delivery)
        raise ValueError

    ids, ran, hooks = run(bench, fail)
    assert (ran, hooks, sorted(bench.settled)) == (ids, [ids[0], ids[1], ids[3]], ids)
    assert (effects(), waiting()) == (set(), {ids[2]})
    assert FailedAttempt.objects.count() == 1


BREAKS: dict[str, Callable[[], Any]] = {
    "commit": lambda: connection.cursor().execute("commit"),
    "rollback": lambda: connection.cursor().execute("rollback"),
    "close": lambda: connection.close(),
    "terminate": lambda: connection.cursor().execute(
        "select pg_terminate_backend(pg_backend_pid())"
    ),
}


@aloof
@pytest.mark.parametrize("how", BREAKS)
def test_who_ends_the_transaction_is_alone_to_blame(bench: Bench, how: str) -> None:
    """Guarantee 2. And nobody else runs again, since nothing of them was in it."""

    def do(delivery: Delivery) -> None:
        BREAKS[how]()

    ids, ran, hooks = run(bench, do)
    assert ran == ids
    assert (hooks, waiting()) == ([ids[0], ids[1], ids[3]], {ids[2]})
    assert list(FailedAttempt.objects.values_list("message_id", flat=True)) == [ids[2]]


TAKE = "update django_mq_queuedmessage set attempts = 2, claimed_by = 'x:1' where id = %s"
LOCK = "select from django_mq_queuedmessage where id = %s for update"


@aloof
@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("how", [LOCK, TAKE], ids=["locked", "taken over"])
def test_who_uses_its_connection_when_somebody_has_its_row(
    bench: Bench, other: psycopg.Connection[Any], how: str, swallows: bool
) -> None:
    """It has not begun, whatever it says; those before it are done, and do not run again."""
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(delivery.id))
        if delivery.id == ids[2]:
            try:
                effect(delivery)
            except Exception:
                if not swallows:
                    raise

    ids = [message.pk for message in add_many(4, handler="h")]
    tasks = bench.claim()
    other.autocommit = how == TAKE
    other.execute(how, ids[2:3])
    remainder = bench.run(tasks)
    assert (ran, hooks) == (ids[:3], ids[:2])
    assert (remainder.left, remainder.locked) == (tasks[3:], [])
    assert remainder.again == (tasks[2:3] if how == LOCK else [])
    assert waiting() == set(ids[2:])
    if how == LOCK:
        assert bench.run(remainder.again).locked == tasks[2:3]
        other.rollback()
    bench.run_all([*remainder.again, *remainder.left])
    assert ran == [*ids[:3], *ids[2 if how == LOCK else 3 :]]
    assert (sorted(hooks), effects(), waiting()) == (
        (ids, {ids[2]}, set()) if how == LOCK else ([*ids[:2], ids[3]], set(), {ids[2]})
    )
    assert sorted(bench.settled) == ids
    assert FailedAttempt.objects.count() == 0


@aloof
@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_somebody_has_at_the_end(
    bench: Bench, other: psycopg.Connection[Any], count: int
) -> None:
    """They are waited for a second, then run again, behind their locks; the others are done."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = [message.pk for message in add_many(count, handler="h")]
    tasks = bench.claim()
    with other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", messages[:1])
        remainder = bench.run(tasks)
        assert remainder.locked == tasks[:1]
        assert bench.run(remainder.locked).locked == remainder.locked
        assert ran == messages
    assert waiting() == set(messages[:1])
    bench.run_all(remainder.locked)
    assert ran == [*messages, messages[0]]
    assert (waiting(), sorted(bench.settled)) == (set(), messages)


@aloof
@pytest.mark.parametrize("hooked", [False, True])
def test_one_of_several_that_was_taken_over_meanwhile(
    bench: Bench, other: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture, hooked: bool
) -> None:
    """Guarantee 4: it is not settled, and its hooks do not run; those of the others do."""
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        if hooked:
            transaction.on_commit(lambda: hooks.append(delivery.id))
        if delivery.id == ids[2]:
            other.execute(
                "update django_mq_queuedmessage set claimed_by = 'x:1' where id = %s", ids[1:2]
            )

    ids = [message.pk for message in add_many(3, handler="h")]
    bench.run_all(bench.claim())
    assert ran == ids
    assert hooks == [ids[0], ids[2]] * hooked
    assert (waiting(), sorted(bench.settled)) == ({ids[1]}, ids)
    lost = [r for r in caplog.records if getattr(r, "event", "") == "lease_lost"]
    assert [record.__dict__["message_id"] for record in lost] == [ids[1]]


@aloof
@pytest.mark.parametrize("word", ["; set local lock_timeout", "delete from", "COMMIT"])
@pytest.mark.parametrize("arrives", [True, False])
def test_nobody_runs_twice_when_the_settle_is_cut(
    make_bench: Callable[..., Bench], proxy: Proxy, word: str, arrives: bool
) -> None:
    """Guarantee 1: and each is settled once, with its hooks."""
    bench = make_bench(port=proxy.port)
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(delivery.id))
        if delivery.id == ids[1]:
            raise ValueError

    messages = add_many(3, handler="h", max_attempts=5)
    ids = [message.pk for message in messages]
    tasks = bench.claim()
    proxy.cut_at(word, arrives=arrives)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    assert (ran, sorted(bench.settled), waiting()) == (ids, ids, {ids[1]})
    assert hooks == [ids[0], ids[2]]
    assert attempts_of(messages[1]) == ["ValueError"]


@aloof
def test_a_cut_at_the_settle_with_one_that_wrote(
    make_bench: Callable[..., Bench], proxy: Proxy
) -> None:
    """Only that one runs again: what it wrote is gone with its transaction."""
    bench = make_bench(port=proxy.port)
    proxy.cut_at("delete from", arrives=True)
    ids, ran, hooks = run(bench, effect)
    assert proxy.cuts == 1
    assert ran == [*ids[:3], ids[2], ids[3]]
    assert (hooks, sorted(bench.settled)) == ([ids[0], ids[1], ids[2], ids[3]], ids)
    assert (effects(), waiting()) == ({ids[2]}, set())


@aloof
def test_a_connection_that_is_lost_between_several(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """As by idle_session_timeout: nobody uses it, so nobody notices."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        if len(ran) == 2:
            other.execute("select pg_terminate_backend(%s, 10000)", [pid_of(bench)])

    ids = [message.pk for message in add_many(3, handler="h")]
    bench.run_all(bench.claim())
    assert (ran, sorted(bench.settled), waiting()) == (ids, ids, set())


@as_it_comes
def test_a_handler_that_uses_its_connection_now_and_then(bench: Bench, events: list[str]) -> None:
    """Slices with it are locked for until several did without."""
    runs: list[list[str]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "writes":
            effect(delivery)

    without = [["", ""]] * SLICES_WITHOUT
    writes = ["", "writes"]
    for payloads in (["", ""], ["", "", ""], writes, *without[1:], writes, *without, [""]):
        for place, payload in enumerate(payloads):
            add(handler="h", payload=payload, after=-60 + place)
        bench.run_all(bench.claim())
        runs.append(events.copy())
        events.clear()
        assert waiting() == set()
    # Several are locked by another statement than one: the first two, and those after the third.
    locked: list[list[str]] = [[]] * 2 * SLICES_WITHOUT
    assert runs == [[], ["settle"], ["lock", "settle"], *locked, ["settle"]]


@aloof
def test_a_lock_that_the_server_has_forgotten(bench: Bench) -> None:
    """Somebody deallocated all statements: who needs it runs again, uncharged, and alone."""
    locking._prepared.add(bench.slices._session.connect())
    ids, ran, hooks = run(bench, effect)
    assert ran == [*ids[:3], ids[2], ids[3]]
    assert (hooks, sorted(bench.settled)) == (ids, ids)
    assert (effects(), waiting(), FailedAttempt.objects.count()) == ({ids[2]}, set(), 0)
