"""Sessions that a pool of Django's lends to handlers."""

from __future__ import annotations

import pytest
from django.db import connections
from django.db.backends.postgresql.base import DatabaseWrapper

from django_mq import RetryPolicy, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.worker import Worker
from tests.database import second_connection
from tests.executor.other_threads import own_pid
from tests.other_alias import _other_alias  # noqa: F401  (fixture)
from tests.rows import add
from tests.worker.conftest import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_a_session_that_ended_in_its_pool_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reset of a lent session notices it, and another session of the pool serves."""
    other = connections.settings["other"]
    pool = {"min_size": 1, "max_size": 1, "timeout": PATIENCE}
    monkeypatch.setitem(other, "OPTIONS", {**other["OPTIONS"], "pool": pool})
    pids: list[int] = []

    @handler("#", queue="mail", name="h", atomic=False, retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        pids.append(own_pid("other"))
        connections["other"].close()
        with second_connection() as killer:
            killer.execute("select pg_terminate_backend(%s, 10000)", pids[-1:])

    try:
        for _ in range(3):
            add(handler="h")
        assert Worker().run(until_empty=True)
    finally:
        DatabaseWrapper._connection_pools.pop("other").close()
    assert not FailedAttempt.objects.exists()
    assert len(set(pids)) == 3
