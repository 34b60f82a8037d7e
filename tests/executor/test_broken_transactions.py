"""Guarantee 2: whatever a handler does to its transaction, only that handler fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db import (
    IntegrityError,
    OperationalError,
    connection,
    transaction,
)
from django.db.backends.signals import connection_created

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from testproject.shop.models import Product
from tests.database import second_connection
from tests.executor.breaking import (
    BREAKS,
    close,
    driver_commit,
    flip_autocommit,
    inner_block_left_open,
    raw,
    set_rollback,
    stream_left_open,
    swallow_error,
    terminate_and_use,
)
from tests.rows import add, stored
from tests.slow import mostly_slow
from tests.worker.conftest import (
    BENCHES,
    Bench,
    add_many,
    attempts_of,
    effect,
    effects,
    ids,
    mostly_fresh,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

BROKE = "django_mq.exceptions.HandlerBrokeTransaction"


def run_between_good_ones(bench: Bench, bad: Callable[[Delivery], None]) -> Sequence[QueuedMessage]:
    """Run three messages, in the second of which `bad` is called; only its effect is undone."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "bad":
            bad(delivery)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk, messages[2].pk}
    return messages


@pytest.mark.parametrize(
    ("do", "first", "make_bench"),
    mostly_slow(BREAKS, [False, True], BENCHES),
    indirect=["make_bench"],
)
def test_ending_or_spoiling_the_transaction_is_the_culprits_failure(
    bench: Bench, do: Callable[[Delivery], None], first: bool
) -> None:
    """Guarantee 2: neighbours before and behind it in the slice run once and are acked."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        bad = delivery.payload == "bad"
        if bad and first:
            do(delivery)
            return
        effect(delivery)
        if bad:
            do(delivery)

    messages = [
        add(handler="h", payload=payload, after=-60 + n)
        for n, payload in enumerate(["a", "b", "bad", "c", "d"])
    ]
    bad = messages[2]
    bench.run_all(bench.claim())
    # Anything the culprit committed stays and runs again; its error said so.
    assert effects() - {bad.pk} == ids(messages) - {bad.pk}
    assert waiting() == {bad.pk}
    stored(bad)
    assert (bad.attempts, bad.claimed_by) == (1, None)
    assert len(attempts_of(bad)) == 1
    assert FailedAttempt.objects.count() == 1
    assert ran.count(bad.pk) == 1
    assert sorted(bench.settled) == sorted(ids(messages))
    # The next message starts on a clean connection.
    after = add(handler="h", payload="e")
    bench.run_all(bench.claim())
    assert after.pk in effects()
    assert after.pk not in waiting()


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (swallow_error, "swallowed a database error"),
        (set_rollback, "marked its transaction for rollback"),
        (raw("commit"), "ended its transaction"),
        (close, "connection was closed"),
        (inner_block_left_open, "left an atomic"),
        (stream_left_open, "left a stream() or a COPY unfinished"),
    ],
)
def test_error_names_the_handlers_mistake(
    bench: Bench, do: Callable[[Delivery], None], words: str
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        do(delivery)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert attempts_of(message) == [BROKE]
    assert words in stored(message).last_error


@mostly_fresh
@pytest.mark.parametrize("do", [do for do in BREAKS if "commit" not in do.__name__])
def test_the_writes_of_the_culprit_are_undone(bench: Bench, do: Callable[[Delivery], None]) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        do(delivery)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == set()
    assert waiting() == {message.pk}


@pytest.mark.parametrize(
    "do",
    [raw("commit"), driver_commit, flip_autocommit],
    ids=["raw", "driver", "autocommit"],
)
def test_neighbours_that_a_raw_commit_kept_do_not_run_again(
    bench: Bench, do: Callable[[Delivery], None]
) -> None:
    ran: list[str] = []
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)
        effect(delivery)
        transaction.on_commit(lambda: hooks.append(delivery.payload))
        if delivery.payload == "bad":
            do(delivery)
        if delivery.payload == "fails":
            raise ValueError

    messages = [
        add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "fails", "bad", "b"])
    ]
    bench.run_all(bench.claim())
    assert ran == ["a", "fails", "bad", "b"]
    assert hooks == ["a", "b"]
    assert waiting() == {messages[1].pk, messages[2].pk}
    assert attempts_of(messages[1]) == ["ValueError"]
    assert attempts_of(messages[2]) == [BROKE]


def test_the_id_of_a_lost_transaction_may_be_another_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 1: a server that crashed reuses ids that never reached its disk.

    The status of such an id is then that of somebody else's transaction.
    """
    monkeypatch.setattr(bench.settlement, "was_committed", lambda xid, changed=(): True)

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "last":
            terminate_and_use(delivery)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "last"])]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk}
    assert waiting() == {messages[1].pk}


def test_a_raw_rollback_runs_neighbours_again_uncharged(bench: Bench) -> None:
    attempts: list[tuple[str, int]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        attempts.append((delivery.payload, delivery.attempt))
        effect(delivery)
        if delivery.payload == "bad":
            connection.cursor().execute("rollback")

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad"])]
    bench.run_all(bench.claim())
    assert attempts == [("a", 1), ("bad", 1), ("a", 1)]
    assert effects() == {messages[0].pk}


def test_the_culprit_is_charged_when_its_connection_is_lost_as_well(
    make_bench: Callable[..., Bench], proxy: Proxy
) -> None:
    """The atomic block then ends with the error of its attempt to connect again."""
    bench = make_bench(port=proxy.port)

    def refuse_once(**kwargs: Any) -> None:
        connection_created.disconnect(refuse_once)
        raise OperationalError("starting up")

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        raw("select 1", "commit; begin")(delivery)
        proxy.cut_at("ROLLBACK", arrives=False)
        connection_created.connect(refuse_once)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert proxy.cuts == 1
    assert attempts_of(message) == [BROKE]


def test_an_error_within_a_stream_is_the_handlers_failure(bench: Bench) -> None:
    """The traceback keeps the stream, which keeps the driver's lock."""

    def leave_a_stream(delivery: Delivery) -> None:
        for _ in connection.connection.cursor().stream("select generate_series(1, 3)"):
            raise LookupError

    messages = run_between_good_ones(bench, leave_a_stream)
    assert attempts_of(messages[1]) == ["LookupError"]


def test_a_transaction_block_of_the_driver_that_is_left_open_is_charged(bench: Bench) -> None:
    """The driver refuses the COMMIT each time, and the ROLLBACK, too."""
    blocks = []

    def leave_a_block_open(delivery: Delivery) -> None:
        blocks.append(connection.connection.transaction())
        blocks[-1].__enter__()

    messages = run_between_good_ones(bench, leave_a_block_open)
    assert attempts_of(messages[1]) == ["django.db.utils.ProgrammingError"]
    assert len(blocks) < 10


def test_a_handler_may_use_savepoints_of_its_own(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        with pytest.raises(IntegrityError), transaction.atomic():
            effect(delivery)
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            Product.objects.create(name="undone 1", price=1)
            1 / 0  # noqa: B018
        sid = transaction.savepoint()
        Product.objects.create(name="undone 2", price=1)
        transaction.savepoint_rollback(sid)
        connection.cursor().execute("savepoint mine; rollback to mine; release mine")

    messages = add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert effects() == ids(messages)
    assert waiting() == set()


def test_durable_blocks_are_refused_inside(bench: Bench) -> None:
    """They are not promised, and the error says so: section 11 of the design."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with transaction.atomic(durable=True):
            pass

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert attempts_of(message) == ["RuntimeError"]


@pytest.fixture
def family(transactional_db: None) -> Iterator[Callable[[Delivery], None]]:
    """Returns a function that writes a child without a parent: COMMIT checks its foreign key."""
    with second_connection() as other:
        other.execute(
            "create table worker_parent (id bigint primary key);"
            "create table worker_child (parent bigint references worker_parent"
            " deferrable initially deferred)"
        )

        def write_child(delivery: Delivery) -> None:
            connection.cursor().execute("insert into worker_child values (%s)", [delivery.id])

        yield write_child
        other.execute("drop table worker_child, worker_parent")


def test_a_deferred_violation_is_blamed_on_the_right_message(
    bench: Bench, family: Callable[[Delivery], None]
) -> None:
    """COMMIT checks a Django foreign key, and would undo the whole slice."""

    messages = run_between_good_ones(bench, family)
    assert waiting() == {messages[1].pk}
    assert attempts_of(messages[1]) == ["django.db.utils.IntegrityError"]
    assert bench.runs == [[m.pk for m in messages]]  # found without running any handler twice


def test_constraints_are_deferred_again_for_the_next_message(
    bench: Bench, family: Callable[[Delivery], None]
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        family(delivery)
        connection.cursor().execute("insert into worker_parent values (%s)", [delivery.id])

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert effects() == ids(messages)


@pytest.fixture
def immediate() -> Iterator[str]:
    """A table whose unique constraint is deferrable, and checked at once unless told otherwise."""
    with second_connection() as other:
        other.execute(
            "create table worker_immediate"
            " (n int, constraint worker_immediate_n unique (n) deferrable initially immediate)"
        )
        yield "worker_immediate"
        other.execute("drop table worker_immediate")


def test_constraints_that_are_initially_immediate_stay_so(bench: Bench, immediate: str) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"insert into {immediate} values (%s)", [delivery.id])
            with pytest.raises(IntegrityError), transaction.atomic():
                cursor.execute(f"insert into {immediate} values (%s)", [delivery.id])

    add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()


def test_a_constraint_that_goes_away_meanwhile_is_nobodys_failure(
    bench: Bench, immediate: str
) -> None:
    """A migration dropped it while this worker's connection remembered it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    first = add(handler="h")
    bench.run_all(bench.claim())
    with second_connection() as other:
        other.execute(f"alter table {immediate} drop constraint worker_immediate_n")
    second = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == {first.pk, second.pk}
    assert FailedAttempt.objects.count() == 0


def test_a_violation_that_only_commit_finds_is_blamed_on_the_right_message(
    bench: Bench, family: Callable[[Delivery], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMMIT fails nevertheless: the slice runs again one by one, and nothing is charged twice."""
    monkeypatch.setattr(
        bench.session.savepoint._statements,
        "compose_release",
        lambda cursor: b"release savepoint django_mq_delivery",
    )

    messages = run_between_good_ones(bench, family)
    assert attempts_of(messages[1]) == ["django.db.utils.IntegrityError"]
    assert FailedAttempt.objects.count() == 1
    assert stored(messages[1]).attempts == 1


@mostly_fresh
@pytest.mark.parametrize("do", [None, *BREAKS], ids=lambda do: do.__name__ if do else "raise")
def test_a_batch_that_fails_runs_one_by_one(
    bench: Bench, do: Callable[[Delivery], None] | None
) -> None:
    """PMQ-21, PMQ-58 as changed: one bad message does not fail the others."""
    calls: list[list[str]] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.payload for each in deliveries])
        for each in deliveries:
            if each.payload == "bad":
                if do is None:
                    raise ValueError
                do(each)
                return
            effect(each)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    if do is not None and "commit" in do.__name__:
        pytest.skip("what a batch committed itself is done twice: it was told")
    bench.run_all(bench.claim())
    # A message that still meets the locks of the lost connection comes later.
    assert (calls[0], sorted(calls[1:])) == (["a", "bad", "b"], [["a"], ["b"], ["bad"]])
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert len(attempts_of(messages[1])) == 1
    assert stored(messages[1]).attempts == 1
