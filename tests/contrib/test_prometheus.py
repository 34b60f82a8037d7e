"""The metrics that Prometheus reads from the database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, connection
from django.test import RequestFactory
from django.utils.connection import ConnectionDoesNotExist
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from django_mq.contrib import prometheus
from django_mq.contrib.prometheus import QueueCollector, metrics
from django_mq.store.limits import Limits
from tests.outbox.schedules.conftest import put
from tests.rows import add, beat, decide, insert_all
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    return {
        (each.name, *each.labels.values()): each.value
        for family in text_string_to_metric_families(page.decode())
        for each in family.samples
    }


def read() -> dict[tuple[str, ...], float]:
    answer = metrics(RequestFactory().get("/metrics"))
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("text/plain")
    return samples(answer.content)


def test_queues_and_workers() -> None:
    add()
    add(after=60)
    add(dead=-1)
    add(leased=60)
    beat("worker", running=[], threads=4, threads_used=3.5, slots=100, slots_used=1.0)
    beat("other", running=[], threads=1, threads_used=0.5, slots=100, slots_used=0.0)
    beat("old", running=[])
    beat("gone", seen=-60, threads=9, threads_used=9.0)
    decide("slow", backoff_level=3, backoff=60, paused=-1, max_in_flight=5)
    found = read()
    for state, count in (("processable", 1), ("delayed", 1), ("dead", 1), ("leased", 1)):
        assert found["django_mq_messages", "mail", state] == count
    assert 60 <= found["django_mq_oldest_seconds", "mail"] < 600
    assert found["django_mq_oldest_seconds", "slow"] == 0
    assert found["django_mq_queue_backoff_level", "slow"] == 3
    assert found["django_mq_queue_paused", "slow"] == 1
    assert found["django_mq_queue_paused", "mail"] == 0
    assert found["django_mq_queue_max_in_flight", "slow"] == 5
    assert ("django_mq_queue_max_in_flight", "mail") not in found
    assert found[("django_mq_workers",)] == 3
    assert found[("django_mq_threads",)] == 5
    assert found[("django_mq_threads_used",)] == 4.0
    assert found[("django_mq_slots",)] == 200
    assert found[("django_mq_slots_used",)] == 1.0


def test_a_dead_message_that_others_wait_for() -> None:
    """Blocked messages are no trouble, unless nobody frees them."""
    add("sound", key="k", blocked_by=add("sound", key="k", after=60).pk)
    add("stuck", key="k", blocked_by=add("stuck", key="k", dead=-1).pk)
    found = read()
    assert found["django_mq_messages", "sound", "blocked"] == 1
    assert found["django_mq_queue_dead_head", "sound"] == 0
    assert found["django_mq_queue_dead_head", "stuck"] == 1


def test_a_schedule_that_is_overdue() -> None:
    overdue = ("django_mq_schedule_overdue_seconds",)
    assert read()[overdue] == 0
    put("off", enabled=False, due=None)
    put("soon", due=60)
    assert read()[overdue] == 0
    put("late", due=-300)
    put("later", due=-100)
    assert 300 <= read()[overdue] < 900


def test_beyond_the_end_of_a_count_it_exports_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flat line at 10,000 would look as if nothing happened."""
    monkeypatch.setattr(import_module("django_mq.queues.message_counts"), "MAX_COUNT", 5)
    insert_all({"dead": -1} for _ in range(30))
    add("small", dead=-1)
    found = read()
    assert found["django_mq_messages", "mail", "dead"] == 30
    assert found["django_mq_messages_estimated", "mail", "dead"] == 1
    assert found["django_mq_messages_estimated", "small", "dead"] == 0


def test_registering_asks_nothing(django_assert_num_queries: Any) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with django_assert_num_queries(0):
        registry.register(QueueCollector())
    assert registry.get_sample_value("django_mq_workers") == 0


def test_a_scrape_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails instead of waiting; the limit ends with it."""
    with connection.cursor() as cursor:
        cursor.execute("select current_setting('statement_timeout')")
        before = cursor.fetchone()
    monkeypatch.setattr(prometheus, "SCRAPE_LIMITS", Limits(0.2, 0.2))
    monkeypatch.setattr(prometheus.queues, "counts", _sleep)
    with pytest.raises(OperationalError, match="statement timeout"):
        list(QueueCollector().collect())
    with connection.cursor() as cursor:
        cursor.execute("select current_setting('statement_timeout')")
        assert cursor.fetchone() == before


def _sleep(using: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("select pg_sleep(30)")


def test_a_scrape_leaves_no_session_to_its_thread() -> None:
    """An exporter has a thread for each scrape, and never closes Django's connections."""

    def is_open_after(opens: bool) -> bool:
        if opens:
            connection.ensure_connection()
        list(QueueCollector().collect())
        is_open = connection.connection is not None
        connection.close()
        return is_open

    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(is_open_after, opens=False).result()
        assert thread.submit(is_open_after, opens=True).result()


def test_a_registry_takes_one_collector() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(QueueCollector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(QueueCollector("eu"))


def test_each_queue_has_22_series() -> None:
    add()
    assert sum("mail" in each for each in read()) == 22
    decide("mail", max_in_flight=5)
    assert sum("mail" in each for each in read()) == 23


def test_the_view_has_a_path_of_its_own() -> None:
    assert import_module("django_mq.contrib.prometheus.views").metrics is metrics
    assert prometheus.views.metrics is metrics  # after `import django_mq.contrib.prometheus.views`


def test_the_documented_protection() -> None:
    names: dict[str, Any] = {"__name__": "urls"}
    codes = snippets(ROOT / "docs/watching.md", "python")
    for code in (each for each in codes if "protected_metrics" in each):
        exec(compile(code, "watching.md", "exec"), names)  # noqa: S102
    names["settings"] = type("Settings", (), {"METRICS_TOKEN": "t0ken"})
    view = names["protected_metrics"]
    for header in ("", "Bearer t0ke", "t0ken"):
        with pytest.raises(PermissionDenied):
            view(RequestFactory().get("/metrics", headers={"Authorization": header}))
    good = RequestFactory().get("/metrics", headers={"Authorization": "Bearer t0ken"})
    assert view(good).status_code == 200
    first, second = names["urlpatterns"]
    assert (first.callback, first.default_args) == (view, {})
    assert second.callback is view
    with pytest.raises(ConnectionDoesNotExist, match="eu"):  # the tests have no such database
        view(good, **second.default_args)
    assert metrics(RequestFactory().post("/metrics")).status_code == 405
