"""Settings that receivers of `connection_created` make are those of every message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.signals import connection_created

from django_mq import RetryPolicy, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import session_facts
from django_mq.worker import Worker
from tests.other_alias import _other_alias  # noqa: F401  (fixture)
from tests.rows import add
from tests.slow import mostly_slow

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAMES = "search_path", "timezone", "work_mem"
WANTED = '"it\'s", public', "Europe/Berlin", "8MB"


@pytest.fixture(autouse=True)
def _created() -> Iterator[None]:
    def receiver(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            for name, value in zip(NAMES, WANTED, strict=True):
                cursor.execute("select set_config(%s, %s, false)", (name, value))
            cursor.execute("select set_config('role', session_user, false)")

    for alias in "default", "other":
        connections[alias].close()
    engine = type(connections["default"])  # not the subclass that a worker watches
    connection_created.connect(receiver, sender=engine)
    yield
    connection_created.disconnect(receiver, sender=engine)
    for alias in "default", "other":
        connections[alias].close()


def read_and_change(alias: str) -> tuple[str, ...]:
    with connections[alias].cursor() as cursor:
        found = []
        for name in NAMES:
            cursor.execute("select current_setting(%s)", [name])
            found.append(cursor.fetchone()[0])
        cursor.execute("select current_setting('role') = session_user")
        assert cursor.fetchone()[0]
        cursor.execute("set search_path to public; reset work_mem")
        cursor.execute("set time zone 'UTC'; set role none")
    return tuple(found)


def subscribe(kind: str, alias: str, seen: list[Any]) -> None:
    options: dict[str, Any] = {"queue": "mail", "name": "h", "retry": RetryPolicy.never()}
    if kind == "async":

        @handler("#", **options)
        async def h(delivery: Delivery) -> None:
            seen.append(await sync_to_async(read_and_change)(alias))

    else:

        @handler("#", atomic=kind == "atomic", **options)
        def h(delivery: Delivery) -> None:
            seen.append(read_and_change(alias))


@pytest.mark.parametrize(
    ("kind", "alias", "batch"),
    mostly_slow(["atomic", "not atomic", "async"], ["default", "other"], [1, 10]),
)
def test_each_message_finds_them(kind: str, alias: str, batch: int, settings: Any) -> None:
    settings.DJANGO_MQ = {"BATCH_SIZE": batch}
    seen: list[Any] = []
    subscribe(kind, alias, seen)
    for _ in range(3):
        add(handler="h", key="k")  # one at a time, since coroutines would share the session
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert seen == [WANTED] * 3
    assert not QueuedMessage.objects.exists()
    assert not FailedAttempt.objects.exists()


def test_settings_that_cannot_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a role with more rights had made them: they end with the reset, and nothing fails."""
    made = {"work_mem": "9MB", "log_min_duration_statement": "forbidden"}
    monkeypatch.setattr(session_facts, "settings_of", lambda driver: dict(made))
    values = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("select current_setting('work_mem') <> '9MB'")
            values.append(cursor.fetchone()[0])

    for _ in range(3):
        add(handler="h")
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert values == [True] * 3
    assert not FailedAttempt.objects.exists()


def test_behind_a_transaction_pooler_nothing_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session there may have settings of any program: they would be made on all others."""
    monkeypatch.setitem(connections.settings["other"], "DISABLE_SERVER_SIDE_CURSORS", True)
    monkeypatch.setitem(connections.settings["other"], "CONN_MAX_AGE", 600)
    seen: list[Any] = []
    subscribe("atomic", "other", seen)
    for _ in range(3):
        add(handler="h")
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert seen[0] == WANTED
    assert WANTED not in seen[1:]


@pytest.mark.parametrize("alias", ["default", "other"])
def test_a_handler_that_changes_the_encoding(alias: str) -> None:
    def receiver(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("set search_path to sch\u00e9ma, public")

    paths = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("show search_path")
            paths.append(cursor.fetchone()[0])
            cursor.execute("set client_encoding to latin1")

    connection_created.connect(receiver)
    try:
        for _ in range(4):
            add(handler="h")
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        connection_created.disconnect(receiver)
    assert paths == ["sch\u00e9ma, public"] * 4 or paths == ['"sch\u00e9ma", public'] * 4
    assert not FailedAttempt.objects.exists()
