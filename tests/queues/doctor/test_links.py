"""Findings about connections: D010 to D012, D016 and D017."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from django_mq import handler
from django_mq.queues.doctor import links
from django_mq.store import session_facts
from django_mq.store.session_facts import LoginLimits
from tests.queues.doctor.conftest import Alias
from tests.queues.doctor.examined import found
from tests.queues.pooler import Pooler
from tests.rows import beat

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


class TestD010Listening:
    def test_it_arrives(self) -> None:
        assert found("D010") == []

    def test_another_database(
        self, alias: Alias, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(links, "RING_SECONDS", 0.1)
        settings.DJANGO_MQ = {"WAKEUP": alias("elsewhere", NAME="postgres")}
        (text,) = found("D010")
        assert "does not reach LISTEN on 'elsewhere'" in text

    def test_a_server_that_refuses(self, alias: Alias, settings: Any) -> None:
        settings.DJANGO_MQ = {"WAKEUP": alias("nowhere", NAME="no_such_database")}
        (text,) = found("D010")
        assert "no_such_database" in text

    def test_a_worker_that_cannot_listen(self) -> None:
        beat(wakeup="degraded", host="h", pid=9)
        beat("gone", wakeup="degraded", host="g", seen=-60)
        (text,) = found("D010")
        assert "poll: h:9." in text


def test_d011_a_pooler_without_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D011") == []
    with Pooler(connection.get_connection_params()) as pooler:
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", pooler.port)
        (text,) = found("D011")
        assert "'default' connects through a pooler" in text
        monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
        assert found("D011") == []


def test_d012_clocks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D012") == []
    monkeypatch.setattr(session_facts, "time", lambda: 1_000_000_000.0)
    (text,) = found("D012")
    assert "ahead of this machine's" in text
    monkeypatch.setattr(session_facts, "time", lambda: 10_000_000_000.0)
    (text,) = found("D012")
    assert "s behind this machine's" in text


def test_d012_a_difference_that_the_way_to_the_server_may_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for ahead, is_found in ((1.4, False), (-1.4, False), (1.6, True), (-1.6, True)):
        monkeypatch.setattr(session_facts, "compare_clocks", lambda _, ahead=ahead: (ahead, 0.5))
        assert bool(found("D012")) == is_found


class TestLimits:
    def test_d016_statements_shorter_than_handlers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handler("a.b", name="long", timeout=60)(print)
        assert found("D016") == []
        options = {**connection.settings_dict["OPTIONS"], "options": "-c statement_timeout=5000"}
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
        (text,) = found("D016")
        assert "is 5 s" in text
        assert "long" in text

    def test_d017_too_few_connections(self, settings: Any) -> None:
        assert found("D017") == []
        settings.DJANGO_MQ = {"PROCESSES": 1000}
        (text,) = found("D017")
        assert "6000 connections" in text

    def test_d017_not_if_they_are_just_enough(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.DJANGO_MQ = {"PROCESSES": 2, "THREADS": 4}
        for connections_, is_found in ((18, False), (17, True)):
            limits = LoginLimits(statement=0, connections=connections_)
            monkeypatch.setattr(session_facts, "login_limits", lambda _, limits=limits: limits)
            assert bool(found("D017")) == is_found
