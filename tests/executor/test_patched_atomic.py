"""Packages that change `Atomic`, as caches of the ORM do, to learn when a transaction ends."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from django.db.transaction import Atomic

from django_mq import handler
from django_mq.executor import session
from django_mq.messages import Delivery
from tests.database import second_connection
from tests.rows import add
from tests.worker.conftest import Bench, effect, effects

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks of django_mq that were entered, ended by a commit, and left, in order."""
    found: list[str] = []
    enter, leave = Atomic.__enter__, Atomic.__exit__

    def entering(self: Any) -> None:
        enter(self)
        found.append("entered")
        transaction.on_commit(lambda: found.append("committed"), using=self.using)

    def leaving(self: Any, *exc_info: Any) -> None:
        try:
            leave(self, *exc_info)
        finally:
            found.append("left")

    monkeypatch.setattr(Atomic, "__enter__", entering)
    monkeypatch.setattr(Atomic, "__exit__", leaving)
    return found


@pytest.mark.parametrize("writes", [False, True], ids=["others", "users"])
def test_the_hook_of_the_block_runs_before_the_block_is_left(
    bench: Bench, events: list[str], writes: bool
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if writes:
            effect(delivery)
        transaction.on_commit(lambda: events.append("hook"))

    for _ in range(2):
        add(handler="h")
    tasks = bench.claim()
    events.clear()
    bench.run_all(tasks)
    assert events[:3] == ["entered", "committed", "left"]
    assert events.count("hook") == 2


def test_a_block_that_was_prepared_on_a_lost_connection_is_left(
    bench: Bench, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    message = add(handler="h")
    tasks = bench.claim()
    with second_connection() as other:
        pid = bench.session.connect().info.backend_pid
        other.execute("select pg_terminate_backend(%s, 10000)", [pid])
    events.clear()
    bench.slices.prepare()  # as an executor does before it waits
    monkeypatch.setattr(session, "STALE_AFTER", -1.0)
    bench.run_all(tasks)
    assert effects() == {message.pk}
    assert events.count("entered") == events.count("left")
    assert events[:2] == ["entered", "left"]
