"""LISTEN: the events that ring, and how often."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import connections
from django.db.backends.postgresql.base import DatabaseWrapper

from django_mq.executor.watchdog import Link
from django_mq.worker import listener as listener_module
from django_mq.worker.listener import Listener
from django_mq.worker.wakeup import Wakeup
from tests.database import second_connection
from tests.queues.pooler import Pooler

pytestmark = pytest.mark.django_db(transaction=True)


class Counted(Wakeup):
    def __init__(self) -> None:
        super().__init__()
        self.rings = 0
        self._changed = threading.Condition()

    def ring(self) -> None:
        with self._changed:
            self.rings += 1
            self._changed.notify_all()

    def until(self, rings: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.rings >= rings, 30)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(listener_module, "PING_INTERVAL", 0.05)
    listener = Listener("default", Counted(), link=Link(), on_command=lambda: None)
    yield listener
    listener.stop()
    listener.join(30)
    assert not listener.is_alive()


def notify(times: int = 1) -> None:
    with second_connection() as other:
        for _ in range(times):
            other.execute("notify django_mq")


def until_all_is_read(listener: Listener) -> None:
    """Wait until it rested, read, and listened once more."""
    deadline = monotonic() + 30
    for _ in range(4):
        before = listener._heard_at
        while listener._heard_at == before:
            assert monotonic() < deadline


def test_a_notification_is_one_ring(listener: Listener) -> None:
    """A second ring would make an idle worker claim twice."""
    listener.start()
    wakeup = listener._wakeup
    wakeup.until(1)  # it rings at the start, since it may have missed a notification
    for rings in (2, 3):
        notify()
        wakeup.until(rings)
        until_all_is_read(listener)
        assert wakeup.rings == rings


def test_notification_during_a_rest_still_rings(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may NOTIFY: a ring is obeyed at most every REST seconds, and none is lost."""
    resting, rested = threading.Semaphore(0), threading.Semaphore(0)

    def rest(seconds: float) -> None:
        resting.release()
        rested.acquire(timeout=30)

    listener.start()
    wakeup = listener._wakeup
    wakeup.until(1)
    monkeypatch.setattr(listener._stopping, "wait", rest)
    for rings in (2, 3, 4):
        notify()  # while it rests for the one before
        if rings > 2:
            rested.release()
        wakeup.until(rings)
        assert resting.acquire(timeout=30)
        assert wakeup.rings == rings
    rested.release(10)


def test_notification_with_the_answer_of_a_ping_rings(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "PING_INTERVAL", 0.001)
    listener.start()
    listener._wakeup.until(1)
    for rings in range(2, 50):
        notify()
        listener._wakeup.until(rings)


def test_it_listens_past_djangos_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool's connections are lent and checked: no listener may keep one, so W002 is silent."""
    settings = connections.settings["default"]
    options = {**settings.get("OPTIONS", {}), "pool": True}
    monkeypatch.setitem(connections.settings, "pooled", {**settings, "OPTIONS": options})
    listener = Listener("pooled", Counted(), link=Link(), on_command=lambda: None)
    try:
        listener.start()
        listener._wakeup.until(1)
        assert "pooled" not in DatabaseWrapper._connection_pools
    finally:
        listener.stop()
        listener.join(30)
        assert not listener.is_alive()


def test_it_connects_as_the_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some backends fetch a short-lived password, or a client's certificate, as they connect."""
    backend = type(connections["default"])
    connect, own = backend.get_new_connection, connections["default"].settings_dict["USER"]

    def with_credentials(self: DatabaseWrapper, params: dict[str, Any]) -> Any:
        return connect(self, {**params, "user": own} if self.alias == "rotating" else params)

    monkeypatch.setattr(backend, "get_new_connection", with_credentials)
    settings = {**connections.settings["default"], "USER": "nobody_has_this_name"}
    monkeypatch.setitem(connections.settings, "rotating", settings)
    listener = Listener("rotating", Counted(), link=Link(), on_command=lambda: None)
    try:
        listener.start()
        listener._wakeup.until(1)
        assert not listener.degraded()
    finally:
        listener.stop()
        listener.join(30)
        assert not listener.is_alive()


def test_notifications_arrive_through_a_session_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = connections.settings["default"]
    with Pooler(connections["default"].get_connection_params()) as pooler:
        here = {"HOST": "127.0.0.1", "PORT": str(pooler.port)}
        monkeypatch.setitem(connections.settings, "pooler", {**settings, **here})
        listener = Listener("pooler", Counted(), link=Link(), on_command=lambda: None)
        try:
            listener.start()
            listener._wakeup.until(1)
            notify()
            listener._wakeup.until(2)
            assert not listener.degraded()
        finally:
            listener.stop()
            listener.join(30)
            assert not listener.is_alive()
