"""The lazy transaction of a batch handler: all its messages start unlocked, or all are locked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor import settlement
from django_mq.executor.settlement import Settlement
from django_mq.messages import LONG_AGO, Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.signals import message_started
from tests.database import second_connection, until_blocked
from tests.executor.test_lazy_transaction import Sent
from tests.executor.test_locked_rows import row_locked
from tests.rows import add, stored
from tests.store.keyed import take
from tests.worker.conftest import (
    Bench,
    Said,
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
    pytest.mark.parametrize("make_bench", ["fresh"], indirect=True),
]


@pytest.fixture
def sent(bench: Bench, tmp_path: Path) -> Sent:
    return Sent(bench, tmp_path / "trace")


@pytest.fixture
def calls() -> list[list[int]]:
    """The ids of each call of the handler."""
    return []


@pytest.fixture
def writing(calls: list[list[int]]) -> None:
    """A handler that writes an effect for each message."""

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        for each in deliveries:
            effect(each)


@pytest.fixture
def idle(calls: list[list[int]]) -> None:
    """A handler that leaves its connection alone."""

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])


def ids(messages: list[QueuedMessage]) -> list[int]:
    return [message.pk for message in messages]


def tell(sql: str, *params: Any) -> None:
    """Run a statement in another session; no row that it changes may be locked."""
    with second_connection() as other:
        other.execute("set lock_timeout = '10s'")
        other.execute(sql, params)


# ---- without the connection


def test_a_batch_that_uses_nothing_is_one_round_trip(
    bench: Bench, sent: Sent, calls: list[list[int]], idle: None
) -> None:
    messages = add_many(3, handler="h")
    sent.start()
    bench.run_all(bench.claim())
    (query,) = sent.queries()
    assert "delete from django_mq_queuedmessage" in query
    assert (calls, waiting()) == ([ids(messages)], set())


def test_no_transaction_is_open_while_a_batch_leaves_its_connection_alone(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        with second_connection() as other:
            other.execute("select from django_mq_queuedmessage for update nowait")
            state = "select state from pg_stat_activity where pid = %s"
            seen.append(other.execute(state, [pid]).fetchone())

    add_many(3, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    pid = pid_of(bench)
    bench.run_all(tasks)
    assert seen == [("idle",)]
    assert waiting() == set()


def test_a_batch_that_fails_without_its_connection_runs_one_by_one(
    bench: Bench, sent: Sent, calls: list[list[int]]
) -> None:
    """A failed call has nothing to lock, even if it left hooks."""
    mailed: list[list[int]] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append(mine := [each.id for each in deliveries])
        transaction.on_commit(lambda: mailed.append(mine))
        if messages[1].pk in mine:
            raise ValueError

    messages = add_many(3, handler="h")
    sent.start()
    bench.run_all(bench.claim())
    alone = [[each] for each in ids(messages)]
    assert (calls, mailed) == ([ids(messages), *alone], [alone[0], alone[2]])
    locks = [query for query in sent.queries() if "skip locked" in query]
    assert len(locks) == len(alone)  # before each starts
    assert waiting() == {messages[1].pk}
    assert attempts_of(messages[1]) == ["ValueError"]


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_one_of_a_batch_that_was_taken_over_is_lost_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, place: int
) -> None:

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        tell(
            "update django_mq_queuedmessage set claimed_by = 'you:1', attempts = 2 where id = %s",
            messages[place].pk,
        )

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == {messages[place].pk}
    assert stored(messages[place]).claimed_by == "you:1"
    assert [r.message_id for r in caplog.records if r.event == "lease_lost"] == [  # type: ignore[attr-defined]
        messages[place].pk
    ]


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_the_hooks_of_a_batch_are_of_messages_that_are_acked_together(
    bench: Bench, calls: list[list[int]], place: int
) -> None:
    """One was taken over: its new worker runs its hook."""
    mailed: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        transaction.on_commit(lambda: mailed.extend(calls[-1]))
        if len(calls) == 1:
            tell(
                "update django_mq_queuedmessage set claimed_by = 'you:1', attempts = 2"
                " where id = %s",
                messages[place].pk,
            )

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    others = [each for each in ids(messages) if each != messages[place].pk]
    assert calls == [ids(messages), others]
    assert (mailed, waiting()) == (others, {messages[place].pk})


def test_the_hooks_of_a_batch_do_not_run_for_a_message_whose_ack_is_refused(bench: Bench) -> None:
    mailed: list[int] = []

    @handler("#", queue="mail", name="h", batch=True, retry=RetryPolicy(backoff=fixed(60)))
    def h(deliveries: list[Delivery]) -> None:
        mine = [each.id for each in deliveries]
        transaction.on_commit(lambda: mailed.extend(mine))

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    tell(
        "create function mq_refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'refused'; end $$;"
        "create trigger mq_refuse before delete on django_mq_queuedmessage"
        f" for each row when (old.id = {messages[1].pk}) execute function mq_refuse()"
    )
    try:
        bench.run_all(tasks)
    finally:
        tell("drop function mq_refuse cascade")
    assert attempts_of(messages[1]) == ["psycopg.errors.RaiseException"]
    assert mailed == [messages[0].pk, messages[2].pk]


def test_the_hooks_of_a_batch_whose_messages_are_all_lost_do_not_run(bench: Bench) -> None:
    hooks: list[str] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        transaction.on_commit(lambda: hooks.append("ran"))
        tell("update django_mq_queuedmessage set claimed_by = 'you:1', attempts = 2")

    messages = add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert (waiting(), hooks) == (set(ids(messages)), [])


def test_message_expired_since_its_claim_is_not_in_the_list(
    bench: Bench, calls: list[list[int]], idle: None
) -> None:
    message, later = add(handler="h", expires=60), add(handler="h", expires=3600)
    tasks = bench.claim()
    for task in tasks:
        task.delivery._asked_at -= 61
    bench.run_all(tasks)
    assert calls == [[later.pk]]
    assert (stored(message).dead_reason, stored(message).attempts) == ("expired", 0)


# ---- with it


def test_the_first_use_begins_locks_all_and_opens_the_savepoint_in_one(
    bench: Bench, sent: Sent, calls: list[list[int]], writing: None
) -> None:
    messages = add_many(3, handler="h")
    sent.start()
    bench.run_all(bench.claim())
    first, *others = sent.queries()
    assert '"begin; set local' in first
    assert "skip locked" in first
    assert "; savepoint django_mq_delivery; set local" in first
    assert not any("skip locked" in query or "begin" in query.lower() for query in others)
    assert all(f"{each}" in first for each in ids(messages))
    assert (calls, effects()) == ([ids(messages)], set(ids(messages)))


def test_a_batch_waits_for_a_renewal_that_has_its_rows(
    bench: Bench, calls: list[list[int]], said: Said
) -> None:
    """A renewal locks all rows of a worker at once; and the handler's time stands still."""
    deadlines: list[set[float]] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        waiter = threading.Thread(target=let_go)
        waiter.start()
        with contextlib.suppress(OperationalError):
            effect(deliveries[0])
        waiter.join()
        deadlines.append({entry.deadline for entry in bench.scoreboard.read("bench")})
        for each in deliveries[1:]:
            effect(each)

    def let_go() -> None:
        until_blocked(pid)
        deadlines.append({entry.deadline for entry in bench.scoreboard.read("bench")})
        held.rollback()

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    pid = pid_of(bench)
    with second_connection() as held:
        held.execute("begin")
        held.execute("select from django_mq_queuedmessage for no key update")
        began = monotonic()
        remainder = bench.run(tasks)
    during, after = deadlines
    assert during == {float("inf")}
    assert len(after) == 1
    assert after.pop() > began + tasks[0].timeout
    # The wait is limited to half a second, which a busy machine may need for itself.
    if remainder.not_locked:
        bench.run_all(remainder.not_locked)
    assert effects() == set(ids(messages))
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("swallows", [True, False])
def test_a_batch_with_a_row_that_another_session_keeps_runs_again_without_it(
    bench: Bench, calls: list[list[int]], swallows: bool
) -> None:
    errors: list[str] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        for each in deliveries:
            try:
                effect(each)
            except Exception as error:
                errors.append(str(error))
                if not swallows:
                    raise

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with row_locked(messages[1].pk):
        remainder = bench.run(tasks)
        assert (remainder.not_locked, remainder.left, remainder.to_rerun) == (tasks, [], [])
        assert (calls, effects()) == ([ids(messages)], set())
        remainder = bench.run(remainder.not_locked)
        assert remainder.not_locked == tasks[1:2]
        assert effects() == {messages[0].pk, messages[2].pk}
    bench.run_all(remainder.not_locked)
    assert effects() == set(ids(messages))
    assert calls[1:] == [[messages[0].pk, messages[2].pk], [messages[1].pk]]
    assert len(errors) == (3 if swallows else 1)
    assert "another session has locked or removed" in errors[0]
    assert FailedAttempt.objects.count() == 0


def test_a_batch_with_a_cancelled_message_runs_again_without_it(
    bench: Bench, calls: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """It was in the list; its effect must not stay."""

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        if len(calls) == 1:
            tell("delete from django_mq_queuedmessage where id = %s", messages[0].pk)
        for each in deliveries:
            effect(each)

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert calls == [ids(messages), ids(messages[1:])]
    assert (effects(), waiting()) == (set(ids(messages[1:])), set())
    assert [r.message_id for r in caplog.records if r.event == "lease_lost"] == [  # type: ignore[attr-defined]
        messages[0].pk
    ]
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("batch", [True, False])
def test_a_commit_without_an_answer_after_a_wait_for_the_lock(
    make_bench: Callable[..., Bench],
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    batch: bool,
) -> None:
    """The transaction is asked for by its id, which came with the lock."""
    bench, hooks = make_bench(port=proxy.port), []

    @handler("#", queue="mail", name="h", batch=batch)
    def h(given: Any) -> None:
        effect(given[0] if batch else given)
        transaction.on_commit(lambda: hooks.append("ran"))

    [message] = add_many(1, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    pid = pid_of(bench)
    with second_connection() as held:
        held.execute("begin")
        held.execute("select from django_mq_queuedmessage for no key update")
        waiter = threading.Thread(target=lambda: (until_blocked(pid), held.rollback()))
        waiter.start()
        proxy.cut_at("COMMIT", arrives=True)
        remainder = bench.run(tasks)
        waiter.join()
    if remainder.not_locked:  # the machine is so busy that half a second was too short
        bench.run_all(remainder.not_locked)
    assert (effects(), hooks) == ({message.pk}, ["ran"])
    assert "lease_lost" not in [getattr(record, "event", "") for record in caplog.records]


def test_a_batch_whose_connection_was_cut_before_it_started_stays_one(
    bench: Bench, calls: list[list[int]], writing: None
) -> None:
    messages = add_many(3, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    tell("select pg_terminate_backend(%s, 5000)", pid_of(bench))
    bench.run_all(tasks)
    assert calls == [ids(messages)] * 2
    assert (effects(), waiting()) == (set(ids(messages)), set())
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("asked", [False, True], ids=["plain", "with a reply"])
def test_rows_that_stay_locked_hold_up_a_batch_for_one_wait_and_not_for_each(
    bench: Bench,
    calls: list[list[int]],
    idle: None,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
) -> None:
    """A batch that used nothing has run: its acks are tried until the time is over, then once."""
    monkeypatch.setattr(settlement, "LOCKED_SECONDS", 0.0)
    tries: list[int] = []
    write = Settlement._write
    monkeypatch.setattr(
        Settlement,
        "_write",
        lambda self, ended, *a, **k: (tries.append(len(ended)), write(self, ended, *a, **k))[1],
    )
    messages = add_many(4, handler="h", wants_result=asked)
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute(
            "select from django_mq_queuedmessage where id <> %s for update", [messages[0].pk]
        )
        remainder = bench.run(tasks)
    assert (remainder.left, remainder.to_rerun, remainder.not_locked) == ([], [], [])
    assert (calls, waiting()) == ([ids(messages)], set(ids(messages[1:])))
    assert tries == [4, 1, 1, 1, 1]


# ---- locked before it starts


@pytest.mark.parametrize("why", ["key", "suspect", "claimed long ago"])
def test_one_message_that_must_be_locked_first_locks_all(
    bench: Bench, sent: Sent, calls: list[list[int]], idle: None, why: str
) -> None:
    messages = [add(handler="h", after=-9), add(handler="h", key="a" if why == "key" else None)]
    if why == "suspect":
        QueuedMessage.objects.update(suspect=True)
    with second_connection() as claiming:
        tasks = [bench.task(row) for row in take(claiming.cursor()).rows]
    assert len(tasks) == 2
    if why == "claimed long ago":
        tasks[-1].delivery._leased_at = LONG_AGO
    sent.start()
    bench.run_all(tasks)
    first, *_ = sent.queries()
    assert '"begin; set local' in first
    assert "skip locked" in first
    assert (sorted(id for call in calls for id in call), waiting()) == (ids(messages), set())


def test_a_receiver_that_uses_the_connection_locks_all_before_the_handler_starts(
    bench: Bench, calls: list[list[int]], idle: None
) -> None:
    unlocked: list[Any] = []

    def look(sender: str, **data: Any) -> None:
        connection.cursor().execute("select 1")
        with second_connection() as other:
            free = "select from django_mq_queuedmessage for update skip locked"
            unlocked.append(other.execute(f"select count(*) from ({free}) m").fetchone())

    messages = add_many(2, handler="h")
    message_started.connect(look)
    try:
        bench.run_all(bench.claim())
    finally:
        message_started.disconnect(look)
    assert unlocked == [(0,), (0,)]
    assert (calls, waiting()) == ([ids(messages)], set())
