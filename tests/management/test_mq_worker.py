"""`mq_worker` where it cannot work; its processes are tested in `acceptance`."""

from __future__ import annotations

import os
import socket
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.backends.postgresql.base import DatabaseWrapper

from django_mq import handler
from django_mq.handlers import isolated
from django_mq.management import capacity
from django_mq.management.capacity import check_connections
from django_mq.management.commands.mq_worker import _warn_of_surroundings
from django_mq.queues.doctor.links import connections_needed
from django_mq.store.session_facts import login_limits
from tests.management.conftest import run


@pytest.mark.django_db
@pytest.mark.parametrize("arguments", [(), ("--until-empty",), ("--reload",)])
def test_it_refuses_to_start_inside_a_transaction(arguments: tuple[str, ...]) -> None:
    """As Worker().run() does. Its processes would be refused again and again, for ever."""
    with pytest.raises(CommandError, match=r"in a TestCase use django_mq\.testing\.drain\(\)"):
        run("mq_worker", *arguments)
    assert connection.in_atomic_block
    assert connection.is_usable()  # the test goes on with its transaction


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("option", ["health_port", "metrics_port"])
def test_a_command_that_starts_workers_may_give_a_port_as_a_number(option: str) -> None:
    """`call_command()` hands over keyword arguments as they are."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given in (port, (port, "127.0.0.1")):
            with pytest.raises(CommandError, match=f"port {port} cannot be opened"):
                call_command("mq_worker", **{option: given})


class Lent:
    """A driver connection as the pool of another package lends it."""

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self.__dict__["driver"] = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.driver, name, value)


@pytest.mark.django_db(transaction=True)
def test_an_engine_with_a_pool_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool outlives close(), so all processes would send on the same connections."""
    engine = type(connections["default"])
    connect = engine.get_new_connection

    def lend(self: DatabaseWrapper, params: dict[str, Any]) -> Any:
        return Lent(connect(self, params))

    monkeypatch.setattr(engine, "get_new_connection", lend)
    with pytest.raises(CommandError, match=r"connections of type Lent, but .*'pool'"):
        run("mq_worker", "--until-empty")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("option", ["--processes=2", "--health-port=8999", "--until-empty"])
def test_reload_goes_with_no_option_that_needs_a_supervisor(option: str) -> None:
    with pytest.raises(CommandError, match=f"cannot be combined with {option.partition('=')[0]}$"):
        run("mq_worker", "--reload", option)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "given",
    [
        ("--queue", "mail", "shop.*", "other"),
        ("--queue", "mail", "--queue", "shop.*", "other"),
        ("--queue=mail", "--queue=shop.*", "--queue=other"),
    ],
)
def test_queues_are_named_after_one_option_or_several(
    given: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """In the order given. (Without the port the worker would run.)"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} cannot be opened"):
            run("mq_worker", *given, "--health-port", port)
    unknown = [each.queue for each in caplog.records if each.event == "unknown_queue"]  # type: ignore[attr-defined]
    assert unknown == ["mail", "shop.*", "other"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("registered", [True, False])
def test_project_without_handlers_logs_where_they_are_looked_for(
    registered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a file that is named handler.py. (Without the port the worker would run.)"""
    with socket.create_server(("127.0.0.1", 0)) as taken, isolated():
        if registered:
            handler("shop.orders.placed", name="h")(lambda delivery: None)
        with pytest.raises(CommandError, match="cannot be opened"):
            call_command("mq_worker", health_port=taken.getsockname()[1])
    said = [each for each in caplog.records if vars(each).get("event") == "no_handlers"]
    assert [each.getMessage() for each in said] == [
        "no handler is registered: handlers are looked for in handlers.py of each installed app"
    ][registered:]


def test_unsafe_surroundings_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """S23."""
    settings.DEBUG = True
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    _warn_of_surroundings()
    assert [vars(each)["event"] for each in caplog.records] == ["debug_on", "is_root"]


class TestMoreThanTheServerGives:
    """A typo such as `--processes 5000` takes a host down if it is obeyed."""

    def test_more_processes_than_any_host_runs(self) -> None:
        with pytest.raises(CommandError, match="'5000' is not a whole number from 1 to 1,000"):
            run("mq_worker", "--processes", "5000")
        with pytest.raises(CommandError, match="processes is 5000; it must be a whole number"):
            call_command("mq_worker", processes=5000)

    @pytest.mark.django_db(transaction=True)
    def test_fewer_connections_than_the_processes_need_at_least(self) -> None:
        with pytest.raises(CommandError, match="900 processes need at least 2700 connections, and"):
            run("mq_worker", "--processes", "900")

    @pytest.mark.django_db(transaction=True)
    def test_fewer_connections_than_it_may_open(self, caplog: pytest.LogCaptureFixture) -> None:
        """It may never open them all, so it starts. (Without the port it would run.)"""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(CommandError, match="cannot be opened"):
                call_command("mq_worker", threads=1000, health_port=port)
        assert "opens up to 1005 connections, and this login may have" in caplog.text

    @pytest.mark.django_db
    def test_exactly_as_many_connections_as_the_login_may_have_are_enough(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection.ensure_connection()
        driver = connection.connection
        allowed = login_limits(driver).connections
        assert allowed
        threads = allowed - connections_needed(1, 0)
        check_connections(driver, processes=1, threads=threads)
        assert not caplog.records
        check_connections(driver, processes=1, threads=threads + 1)
        assert [each.event for each in caplog.records] == ["too_few_connections"]  # type: ignore[attr-defined]
        monkeypatch.setattr(capacity, "MIN_CONNECTIONS", allowed)
        check_connections(driver, processes=1, threads=1)
        with pytest.raises(CommandError, match=f"at least {2 * allowed} connections"):
            check_connections(driver, processes=2, threads=1)
