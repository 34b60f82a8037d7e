"""Calls that make a message due also ring: after the commit, and not after a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, cancel, handler, handlers, queues
from django_mq.models import QueuedMessage
from django_mq.outbox import notify
from tests.database import Listener, listening
from tests.rows import add, stored

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():

        @handler("a.b", name="h", queue="mail", queues=("mail", "line"))
        def h(delivery: Any) -> None: ...

        yield


@pytest.fixture(autouse=True)
def _settings(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(notify, "RING_INTERVAL", 0.0)  # no ring is coalesced


@pytest.fixture
def bell() -> Iterator[Listener]:
    with listening() as listener:
        yield listener


def first_of_a_key() -> tuple[QueuedMessage, QueuedMessage]:
    """Return a delayed message with a unique id, and the message that it blocks."""
    with transaction.atomic():
        [id] = broadcast("a.b", key="k", unique_id="u", after=3600).ids
    follower = add(handler="h", type="a.b", key="k", blocked_by=id)
    return QueuedMessage.objects.get(pk=id), follower


def changes_key(key: str | None) -> Callable[[], Any]:
    return lambda: broadcast("a.b", key=key, unique_id="u", on_duplicate="update")


def the_first() -> int:
    return QueuedMessage.objects.order_by("id").values_list("id", flat=True)[0]


CHANGES: dict[str, Callable[[], Any]] = {
    "cancel by id": lambda: cancel(id=the_first()),
    "cancel by unique id": lambda: cancel(unique_id="u"),
    "another key": changes_key("other"),
    "no key": changes_key(None),
    "queues.cancel": lambda: queues.cancel(the_first()),
    "purge": lambda: queues.purge(ids=the_first(), waiting=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_that_frees_a_follower_rings(bell: Listener, change: str) -> None:
    _, follower = first_of_a_key()
    bell.heard()
    with transaction.atomic():
        assert CHANGES[change]()
        assert bell.heard() == []
    assert bell.heard() == [""]
    assert stored(follower).blocked_by is None


@pytest.mark.parametrize("change", CHANGES)
def test_rolled_back_change_does_not_ring(bell: Listener, change: str) -> None:
    _, follower = first_of_a_key()
    bell.heard()
    with transaction.atomic():
        assert CHANGES[change]()
        transaction.set_rollback(True)
    assert bell.heard() == []
    assert stored(follower).blocked_by is not None


@pytest.mark.parametrize("after", [0, 3600])
def test_a_debounce_that_makes_a_message_due_rings(bell: Listener, after: float) -> None:
    first_of_a_key()
    bell.heard()
    with transaction.atomic():
        broadcast("a.b", unique_id="u", on_duplicate="debounce", after=after)
    assert bell.heard() == ([] if after else [""])


def test_a_blocked_message_that_leaves_its_key_rings(bell: Listener) -> None:
    """The message itself is due."""
    first = add(handler="h", type="a.b", key="k", after=3600)
    with transaction.atomic():
        [id] = broadcast("a.b", key="k", unique_id="u").ids
    QueuedMessage.objects.filter(pk=id).update(blocked_by=first.pk)
    bell.heard()
    with transaction.atomic():
        broadcast("a.b", key=None, unique_id="u", on_duplicate="update")
    assert bell.heard() == [""]


@pytest.mark.parametrize(
    ("state", "change"),
    [({"after": 3600}, lambda id: cancel(id=id)), ({"dead": -1}, queues.discard)],
    ids=["waiting", "dead"],
)
def test_the_first_of_an_ordered_queue_rings(
    bell: Listener, state: dict[str, float], change: Callable[[int], Any]
) -> None:
    first = add("line", handler="h", type="a.b", ordered=True, **state)
    add("line", handler="h", type="a.b", ordered=True)
    bell.heard()
    assert change(first.pk)
    assert bell.heard() == [""]


def test_change_that_frees_no_message_does_not_ring(bell: Listener) -> None:
    with transaction.atomic():
        broadcast("a.b", key="k", unique_id="u", after=3600)
        broadcast("a.b", unique_id="v", after=3600)
    bell.heard()
    with transaction.atomic():
        broadcast("a.b", key="k", unique_id="u", on_duplicate="update")
    assert cancel(unique_id="v")
    assert bell.heard() == []


def test_where_workers_poll_nothing_rings(bell: Listener, settings: Any) -> None:
    settings.DJANGO_MQ = {"WAKEUP": "poll"}
    first_of_a_key()
    with transaction.atomic():
        assert cancel(unique_id="u")
    assert bell.heard() == []


def test_a_new_end_of_a_pause_rings(bell: Listener) -> None:
    """The new end may come before the one that workers sleep until."""
    queues.pause("mail", until=3600)
    bell.heard()
    queues.pause("mail", until=0.5)
    assert bell.heard() == [""]
