"""Messages that succeeded move to the history, whatever runs and ends them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from django_mq import Reject, Retry, RetryPolicy, broadcast, fixed, handler, handlers
from django_mq.exceptions import InvalidHandler
from django_mq.executor import history_rules
from django_mq.models import FailedAttempt, HandledMessage, QueuedMessage
from django_mq.store import history_days
from django_mq.testing import drain
from tests.database import second_connection
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import Bench, Start, effect

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def kept() -> dict[int, HandledMessage]:
    return {row.pk: row for row in HandledMessage.objects.all()}


@pytest.fixture
def keeping(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": HOUR}}}


@pytest.mark.usefixtures("keeping")
def test_however_its_handler_runs(start: Start) -> None:
    """Each way to run a handler, with and without an effect on other rows."""
    one = {"queue": "mail"}

    @handler("a", name="unused", **one)
    def unused(delivery: Any) -> None: ...

    @handler("b", name="writes", **one)
    def writes(delivery: Any) -> None:
        effect(delivery)

    @handler("c", name="list", batch=True, **one)
    def listed(deliveries: Any) -> None: ...

    @handler("d", name="plain", atomic=False, **one)
    def plain(delivery: Any) -> None: ...

    @handler("e", name="finishes", atomic=False, **one)
    def finishes(delivery: Any) -> None:
        with delivery.finish("done"):
            effect(delivery)

    @handler("f", name="answers", atomic=False, batch=True, **one)
    def answers(deliveries: Any) -> None: ...

    @handler("g", name="async", **one)
    async def coroutine(delivery: Any) -> None: ...

    @handler("h", name="afinishes", **one)
    async def afinishes(delivery: Any) -> None:
        await delivery.afinish(effect, delivery)

    @handler("i", name="async-list", batch=True, **one)
    async def alist(deliveries: Any) -> None: ...

    names = [each.name for each in handlers.all_handlers()]
    expected = set()
    for type, name in zip("abcdefghi", names, strict=True):
        for more in ({}, {"key": "k"}, {"wants_result": True}, {"unique_id": "u"}):
            row = add(type=type, handler=name, **more)
            expected.add((row.pk, name, row.key))
    assert start(until_empty=True).join()
    assert not QueuedMessage.objects.exists()
    found = kept()
    assert {(row.pk, row.handler, row.key) for row in found.values()} == expected
    for row in found.values():
        assert row.created_at <= row.started_at <= row.ended_at == row.keep_until - HOUR
        assert (row.attempts, row.worker != "", row.payload, row.metadata) == (1, True, None, None)


@pytest.mark.usefixtures("keeping")
def test_a_partition_that_is_attached_during_the_settle_costs_no_attempt(bench: Bench) -> None:
    """The server refuses a row that was on its way to the default partition."""

    @handler("a", queue="mail", name="h")
    def h(delivery: Any) -> None: ...

    row = add(type="a", handler="h")
    tasks = bench.claim()
    with second_connection() as attaching, ThreadPoolExecutor(1) as pool:
        cursor = attaching.cursor()
        (today,) = cursor.execute("select (now() at time zone 'UTC')::date").fetchone() or ()
        cursor.execute(f"drop table if exists {history_days.PREFIX}{today:%Y%m%d}")
        cursor.execute("begin")
        assert history_days.create_day(cursor, today)

        def commit() -> None:
            until(lambda: somebody_waits_for(f"{history_days.PREFIX}default"))
            cursor.execute("commit")

        committing = pool.submit(commit)
        bench.run_all(tasks)
        committing.result()
    assert kept()[row.pk].attempts == 1
    assert not FailedAttempt.objects.exists()


def somebody_waits_for(table: str) -> bool:
    waiting = "select from pg_locks where not granted and relation = %s::regclass"
    with second_connection() as other:
        return bool(other.execute(f"select exists ({waiting})", [table]).fetchone()[0])


@pytest.mark.usefixtures("keeping")
def test_only_successful_messages_are_kept(bench: Bench) -> None:
    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=9, backoff=fixed(0)))
    def h(delivery: Any) -> None:
        effect(delivery)
        if delivery.payload["do"] == "reject":
            raise Reject
        if delivery.payload["do"] == "retry" and delivery.attempt == 1:
            raise Retry(after=0)

    done, again, dead = (add(handler="h", payload={"do": do}) for do in ("work", "retry", "reject"))
    bench.run_all(bench.claim())
    assert set(kept()) == {done.pk}
    bench.run_all(bench.claim())
    found = kept()
    assert (set(found), found[again.pk].attempts) == ({done.pk, again.pk}, 2)
    assert QueuedMessage.objects.get().pk == dead.pk
    assert FailedAttempt.objects.filter(message_id=again.pk).count() == 1


def test_it_is_off_unless_a_queue_or_a_handler_asks(bench: Bench, settings: Any) -> None:
    """PMQ-23: the handler's setting wins; messages with and without a history share a slice."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60, "history_payload": True}}}
    for name, options in (
        ("inherits", {}), ("off", {"history": 0}), ("long", {"history": HOUR}),
        ("bare", {"history_payload": False}),
    ):  # fmt: skip
        handler("#", queue="mail", queues=("post",), name=name, **options)(lambda delivery: None)
    rows = {
        (queue, name): add(queue, handler=name, payload={"n": "ä"}, metadata={"m": 1})
        for name in ("inherits", "off", "long", "bare")
        for queue in ("mail", "post")
    }
    bench.run_all(bench.claim("mail") + bench.claim("post"))
    assert not QueuedMessage.objects.exists()
    names = {row.pk: name for name, row in rows.items()}
    found = {names[id]: row for id, row in kept().items()}
    assert set(found) == {
        ("mail", "inherits"), ("mail", "long"), ("post", "long"), ("mail", "bare"),
    }  # fmt: skip
    inherits, long, bare = (found["mail", name] for name in ("inherits", "long", "bare"))
    assert (inherits.payload, inherits.metadata, inherits.size) == ({"n": "ä"}, {"m": 1}, 11)
    assert (bare.payload, bare.metadata, bare.size) == (None, None, 11)
    assert long.keep_until - long.ended_at == HOUR
    assert found["post", "long"].payload is None


def test_current_settings_and_handlers_decide_whether_it_is_used(settings: Any) -> None:
    """One handler that asks is enough: otherwise no partition is created for its messages."""
    settings.DJANGO_MQ = {}
    assert not history_rules.is_used()
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    assert history_rules.is_used()
    settings.DJANGO_MQ = {}
    assert not history_rules.is_used()
    handler("#", queue="mail", name="h", history=60)(lambda delivery: None)
    assert history_rules.is_used()


@pytest.mark.usefixtures("keeping")
def test_a_settle_whose_connection_is_lost_is_repeated(bench: Bench) -> None:
    """The message and its history are one statement: a lost connection undoes both, or neither."""
    runs: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        runs.append(delivery.id)
        if len(runs) == 1:
            pid = bench.wrapper.__dict__["connection"].info.backend_pid
            with second_connection() as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [pid])

    row = add(handler="h")
    bench.run_all(bench.claim())
    assert [*kept()] == [row.pk]
    assert not QueuedMessage.objects.exists()


@pytest.mark.usefixtures("keeping")
def test_a_lost_lease_leaves_no_history(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        with second_connection() as other:
            other.execute("update django_mq_queuedmessage set claimed_by = 'other:1'")

    add(handler="h")
    bench.fresh = True  # otherwise the handler would wait for the lock of its own slice
    bench.run(bench.claim())
    assert not kept()
    assert QueuedMessage.objects.get().claimed_by == "other:1"


@pytest.mark.usefixtures("keeping")
def test_the_causes_of_a_message_are_kept(settings: Any) -> None:
    """`drain()` keeps a history, too; a handler's broadcasts name their cause."""
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "REQUIRE_ATOMIC": False}

    @handler("first", queue="mail", name="first")
    def first(delivery: Any) -> None:
        broadcast("second")

    @handler("second", queue="mail", name="second")
    def second(delivery: Any) -> None: ...

    (cause,) = broadcast("first").ids
    assert drain() == 2
    effect_row = HandledMessage.objects.get(handler="second")
    assert (effect_row.causation_id, effect_row.correlation_id) == (cause, str(cause))
    assert kept()[cause].causation_id is None


@pytest.mark.parametrize("options", [{"history": -1}, {"history": "x"}, {"history_payload": 1}])
def test_a_handler_with_a_bad_history_is_refused(options: Any) -> None:
    with pytest.raises(InvalidHandler, match="history"):
        handler("#", **options)(lambda delivery: None)
