"""Credentials that expire: whatever connects again does so with the current ones."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import RetryPolicy, handler
from django_mq.executor.connections import plain_connection
from django_mq.executor.watchdog import Link
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.store.server_errors import LOST
from tests.database import second_connection
from tests.rows import add
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start, effect, effects
from tests.worker.test_outages import terminate_all

pytestmark = pytest.mark.django_db(transaction=True)

#: Roles that may log in one after the other, as with credentials that a vault lends. All databases
#: of a server share its roles, so another run of the tests needs other names.
FIRST, SECOND = (f"mq_lent_{secrets.token_hex(4)}" for _ in range(2))


@pytest.fixture
def log_in_as() -> Iterator[Callable[[str], None]]:
    """Write another login into the settings; FIRST and SECOND have all rights."""
    settings = connections.settings["default"]
    own = settings["USER"]
    for role in (FIRST, SECOND):
        with second_connection() as other:
            other.execute(f"create role {role} login superuser")
    yield lambda role: settings.update(USER=role)
    settings["USER"] = own
    connection.close()
    terminate_all()
    for role in (FIRST, SECOND):
        with second_connection() as other:
            other.execute(f"drop role {role}")


def test_credentials_that_the_project_changes_are_taken_up(
    log_in_as: Callable[[str], None], start: Start
) -> None:
    """A program may write a new password into its settings: Django takes it as it connects."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        effect(delivery)

    log_in_as(FIRST)
    connection.close()
    first = add(handler="h")
    running = start(threads=2)
    until(lambda: effects() == {first.pk}, "it works with the first login")
    log_in_as(SECOND)
    with second_connection() as other:
        other.execute(f"alter role {FIRST} nologin")
        terminate_all()
    connection.close()
    more = [add(handler="h") for _ in range(10)]
    until(lambda: effects() == {first.pk, *(each.pk for each in more)}, "and with the second")
    running.stop()


class _Unreachable(Exception):
    """The error of a vault's client."""


@pytest.mark.parametrize("method", ["get_new_connection", *slow("get_connection_params")])
def test_a_vault_that_is_away_is_an_outage(
    method: str, start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt is charged, although the error is not one of the database."""
    backend = type(connections["default"])
    plain, away, tries = getattr(backend, method), threading.Event(), threading.Semaphore(0)

    def fetch(self: BaseDatabaseWrapper, *args: Any) -> Any:
        if away.is_set():
            tries.release()
            raise _Unreachable
        return plain(self, *args)

    monkeypatch.setattr(backend, method, fetch)

    @handler("#", queue="mail", name="last", atomic=False, retry=RetryPolicy.never())
    def last(delivery: Delivery) -> None:
        connection.close()  # that of the worker's thread; the one that claims stays
        away.set()

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        effect(delivery)

    ran_before = add(handler="last", after=-1)
    ran_after = add(handler="h")
    running = start(threads=1)
    for _ in range(5):
        assert tries.acquire(timeout=PATIENCE)
    away.clear()
    said.wait("message_acked", 2)
    running.stop()
    assert set(said.ids("message_acked")) == {ran_before.pk, ran_after.pk}
    assert effects() == {ran_after.pk}
    assert not FailedAttempt.objects.exists()


@pytest.mark.parametrize("method", ["get_connection_params", "get_new_connection"])
def test_an_error_of_the_backend_is_logged_once_per_outage_and_class(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a bug, which needs its traceback; its text may hold the password."""
    backend = type(connections["default"])
    plain, password = getattr(backend, method), "1234"
    errors = [TypeError, TypeError, KeyError, None, TypeError, None]

    def fetch_password(self: BaseDatabaseWrapper, *args: Any) -> Any:
        if error := errors.pop(0):
            raise error(password)
        return plain(self, *args)

    monkeypatch.setattr(backend, method, fetch_password)
    for _ in range(len(errors)):
        wrapper = plain_connection("default", Link())
        with contextlib.suppress(*LOST), contextlib.closing(wrapper):
            wrapper.connect()
    assert [each.getMessage().split(" at ")[0] for each in caplog.records] == [
        f"the backend of the alias default cannot connect: {name}"
        for name in ("TypeError", "KeyError", "TypeError")
    ]
    assert {each.event for each in caplog.records} == {"connect_failed"}  # type: ignore[attr-defined]
    assert caplog.text.count("raise error(password)") == 3
    assert password not in caplog.text


def test_a_wrong_setting_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "NAME", "n" * 64)
    with pytest.raises(ImproperlyConfigured):
        plain_connection("default", Link()).connect()
