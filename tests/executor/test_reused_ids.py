"""Guarantee 1: a server that crashed may give the id of a lost transaction to another one.

It does not write ids to disk before their transactions have written something. A later question
about such an id gets the status of somebody else's transaction, or of a future one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.store import open_transaction
from tests.database import second_connection
from tests.slow import mostly_slow
from tests.worker.conftest import BENCHES, Bench, add_many, effect, effects, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

LOSE_CLAIM = """
update django_mq_queuedmessage set attempts = 0, claimed_by = null, leased_until = null
"""


def of_another() -> str:
    """Return the id of a transaction that is committed."""
    with second_connection() as other:
        [xid] = other.execute("select pg_current_xact_id()::text").fetchone() or [""]
    return str(xid)


def of_nobody() -> str:
    """Return an id that the server has not given out yet."""
    return str(int(of_another()) + 1_000_000)


@pytest.fixture(params=[of_another, of_nobody], ids=lambda given: given.__name__)
def asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers for another id, as if it had reused the one asked about."""
    status = open_transaction.transaction_status
    monkeypatch.setattr(
        open_transaction,
        "transaction_status",
        lambda cursor, xid: status(cursor, request.param()),
    )


@pytest.fixture
def claim_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous failover lost the claim, and the new primary has reused the id."""

    def status(cursor: Any, xid: str) -> str | None:
        with second_connection() as other:
            other.execute(LOSE_CLAIM)
        return "committed"

    monkeypatch.setattr(open_transaction, "transaction_status", status)


@pytest.mark.usefixtures("asked_for")
@pytest.mark.parametrize(
    ("asked_for", "make_bench", "count"),
    mostly_slow([of_another, of_nobody], BENCHES, [1, 3]),
    indirect=["asked_for", "make_bench"],
)
def test_a_slice_that_is_lost_runs_again(
    make_bench: Callable[..., Bench], proxy: Proxy, count: int
) -> None:
    """Its rows still carry its claim, so it was not committed, and no hook runs for it."""
    bench = make_bench(port=proxy.port)
    hooks: list[bool] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        transaction.on_commit(lambda: hooks.append(delivery.id in effects()))

    messages = add_many(count, handler="h")
    tasks = bench.claim()
    proxy.cut_at("COMMIT", arrives=False)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    assert effects() == {message.pk for message in messages}
    assert waiting() == set()
    assert hooks == [True] * count
    assert FailedAttempt.objects.count() == 0


@pytest.mark.usefixtures("asked_for")
def test_a_settle_that_is_lost_is_repeated(make_bench: Callable[..., Bench], proxy: Proxy) -> None:
    bench = make_bench(port=proxy.port)

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> Any:
        raise ValueError

    [message] = add_many(1, handler="h")
    tasks = bench.claim()
    proxy.cut_at("COMMIT", arrives=False)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    message.refresh_from_db()
    assert (message.attempts, message.claimed_by, message.leased_until) == (1, None, None)
    assert FailedAttempt.objects.count() == 1


@pytest.mark.usefixtures("claim_lost")
@pytest.mark.parametrize(
    ("count", "make_bench"), mostly_slow([1, 3], BENCHES), indirect=["make_bench"]
)
def test_a_failover_that_loses_the_claim_as_well(
    make_bench: Callable[..., Bench], proxy: Proxy, count: int
) -> None:
    """No row carries the claim, but each would be gone after a commit: so no hook runs."""
    bench = make_bench(port=proxy.port)
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        transaction.on_commit(lambda: hooks.append(delivery.id))

    messages = add_many(count, handler="h")
    tasks = bench.claim()
    proxy.cut_at("COMMIT", arrives=False)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    assert (effects(), hooks) == (set(), [])
    assert waiting() == {message.pk for message in messages}
    bench.run_all(bench.claim())
    assert effects() == set(hooks) == {message.pk for message in messages}
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


def test_an_id_to_come_is_unknown() -> None:
    with second_connection() as other:
        cursor = other.cursor()
        assert open_transaction.transaction_status(cursor, of_nobody()) is None
        assert open_transaction.transaction_status(cursor, of_another()) == "committed"
