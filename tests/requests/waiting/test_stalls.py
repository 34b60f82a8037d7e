"""Waiting threads outlive connections that never answer, and statements that wait for locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.db import connections

from django_mq import PendingReply, Unanswered, agather, cancel, gather, request
from django_mq.requests import connection as link
from django_mq.requests.collecting import TIMEOUT
from django_mq.store.limits import Limits
from tests.database import second_connection
from tests.requests.questions import echo
from tests.requests.waiting.conftest import names, waiting
from tests.slow import mostly_slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start, proxy  # noqa: F401  (a fixture)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def through(
    proxy: Proxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Proxy]:
    """Through the proxy goes whatever uses the alias "far": no worker, and not the test itself."""
    far = {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": str(proxy.port)}
    monkeypatch.setitem(connections.settings, "far", far)
    yield proxy
    if hasattr(connections._connections, "far"):  # type: ignore[attr-defined]
        del connections["far"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[psycopg.Connection[Any]]:
    """The connections that waiting threads have made."""
    made: list[psycopg.Connection[Any]] = []
    connect = link.driver_connection

    def record(*args: Any) -> Any:
        made.append(connect(*args))
        return made[-1]

    monkeypatch.setattr(link, "driver_connection", record)
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LIMITS", Limits(1.0, 0.2))
    monkeypatch.setattr(link, "STALL_MARGIN", 0.2)


POOLED = ("direct", "pooled")


@pytest.fixture(params=POOLED)
def pooled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the connection seems to go through a pooler, so that no SET may outlast a query."""
    is_pooled: bool = request.param == "pooled"
    monkeypatch.setattr(link, "is_pooled", lambda driver: is_pooled)
    return is_pooled


def far(payload: Any) -> PendingReply:
    """Store a request; its reply is waited for through the proxy."""
    return PendingReply(request("test.echo", payload).id, using="far")


def one_by_one(*pendings: PendingReply) -> list[Any]:
    return [each.result(timeout=PATIENCE) for each in pendings]


def together(*pendings: PendingReply) -> list[Any]:
    return gather(*pendings, timeout=PATIENCE)


def on_a_loop(*pendings: PendingReply) -> list[Any]:
    return async_to_sync(agather)(*pendings, timeout=PATIENCE)


@pytest.mark.usefixtures("quick", "pooled")
@pytest.mark.parametrize(
    ("wait", "pooled"), mostly_slow([one_by_one, on_a_loop, together], POOLED), indirect=["pooled"]
)
def test_a_stalled_connection_is_replaced(
    start: Start,
    through: Proxy,
    opened: list[psycopg.Connection[Any]],
    caplog: pytest.LogCaptureFixture,
    wait: Callable[..., list[Any]],
) -> None:
    """Each wait for the server has a bound."""
    echo()
    start()
    held = request("test.echo", after=3600)
    with waiting(PendingReply(held.id, using="far")) as replies:  # one thread waits throughout
        for n in range(2):
            assert wait(far(n)) == [n]
            assert len(opened) == n + 1
            through.freeze()
            assert wait(far(n), far(-n)) == [n, -n]
            assert len(opened) == n + 2
            assert [each.closed for each in opened] == [True] * (n + 1) + [False]
            assert names().count("mq-replies") == 1
        cancel(id=held.id)
        with pytest.raises(Unanswered):
            replies.result()
    assert caplog.text.count("database lost (connection stalled") == 2
    until(lambda: all(each.closed for each in opened), "the last one is closed")


def test_the_default_bound_is_below_the_default_timeout() -> None:
    """The caller of `ask()` outlasts a stalled connection."""
    assert link.LIMITS.statement + link.STALL_MARGIN + 0.5 < TIMEOUT


@pytest.mark.usefixtures("quick")
def test_a_stalled_connection_that_only_listens_is_replaced(
    through: Proxy,
    opened: list[psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:
    """No query uses it, so only a repeated LISTEN can show that it stalls."""
    monkeypatch.setattr(link, "LISTEN_INTERVAL", -1.0)
    settings.DJANGO_MQ = {"WAKEUP": "far"}
    server = link.ServerLink("default", link.SleepBreaker())
    try:
        for _ in range(2):
            assert [each.id for each in server.query([1])] == [1]
            assert server.is_listening()
        assert len(opened) == 2
        through.freeze()
        assert [each.id for each in server.query([1])] == [1]
        assert not server.is_listening()
        assert [each.closed for each in opened] == [False, True]
        assert [each.id for each in server.query([1])] == [1]
        assert server.is_listening()
        with second_connection() as other:
            other.execute("notify django_mq_replies")
        assert server.sleep(PATIENCE)
    finally:
        server.close()
    assert [each.closed for each in opened] == [True] * 3


def test_an_alias_for_listen_that_never_answers_delays_one_query(
    through: Proxy, opened: list[psycopg.Connection[Any]], settings: Any
) -> None:
    settings.DJANGO_MQ = {"WAKEUP": "far"}
    through.hold(True)
    server = link.ServerLink("default", link.SleepBreaker())
    try:
        began = monotonic()
        for _ in range(3):
            assert [each.id for each in server.query([1])] == [1]
        assert not server.is_listening()
        assert monotonic() - began < 2 * link.STALL_MARGIN + 1
    finally:
        server.close()
    assert len(opened) == 1


@pytest.mark.usefixtures("quick", "pooled")
def test_a_lock_is_waited_for_without_a_new_connection(
    start: Start, opened: list[psycopg.Connection[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends a query that waits for a lock, so none is left behind; it is repeated."""
    echo()
    pending = request("test.echo", 1)
    with second_connection() as other, waiting(pending) as replies:
        other.autocommit = False
        other.execute("lock table django_mq_result in access exclusive mode")
        until(lambda: "the database refused a statement" in caplog.text, "it waited for the lock")
        other.commit()
        start()
        assert replies.result() == [1]
    assert len(opened) == 1
    assert "database lost" not in caplog.text


def test_behind_a_pooler_no_limit_outlasts_a_query(
    opened: list[psycopg.Connection[Any]], pooled: bool
) -> None:
    """The session may be the application's next."""
    server = link.ServerLink("default", link.SleepBreaker())
    try:
        server.query([1])
        [(limit,)] = opened[0].execute("show statement_timeout").fetchall()
        assert (limit != "5s") is pooled
    finally:
        server.close()
