"""The worker processes, and who holds a snapshot."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_mq import queues
from tests.rows import beat

pytestmark = pytest.mark.django_db


def test_workers_last_seen_first():
    beat("old", seen=-31, queues=["mail"], running=[4, 5], draining=True, wakeup="degraded")
    beat("new", seen=-29, host="other", pid=8)
    new, old = queues.workers()
    assert (new.id, new.host, new.pid, new.alive) == ("new", "other", 8, True)
    assert (old.id, old.queues, old.running, old.alive) == ("old", ("mail",), (4, 5), False)
    assert (old.draining, old.wakeup) == (True, "degraded")
    assert timedelta(seconds=31) <= old.silent < timedelta(seconds=60)


@pytest.mark.parametrize(
    ("served", "queue", "serves"),
    [
        ([], "mail", True),
        (["mail"], "mail", True),
        (["mail"], "mailbox", False),
        (["shop.*", "mail"], "shop.eu", True),
        (["shop.*"], "shop.eu.north", False),
        (["#"], "shop.eu.north", True),
        (["no such pattern*"], "mail", False),
    ],
)
def test_a_worker_serves_names_and_patterns(served, queue, serves):
    beat(queues=served)
    assert queues.workers()[0].serves(queue) is serves


def test_the_session_that_holds_a_snapshot_is_named(other):
    """Guarantee 19."""
    other.execute("set application_name = 'a\x01report'")
    other.connection.commit()
    other.execute("set transaction isolation level repeatable read")
    other.execute("select pg_backend_pid()")
    pid = other.fetchone()[0]
    found = {holder.name: holder for holder in queues.horizon(older_than=0, limit=100)}
    holder = found[str(pid)]
    assert (holder.kind, holder.state) == ("session", "idle in transaction")
    assert holder.login == connection.settings_dict["USER"]
    assert holder.since is not None


def test_a_short_transaction_is_not_named(other):
    other.execute("set transaction isolation level repeatable read")
    other.execute("select pg_backend_pid()")
    pid = other.fetchone()[0]
    assert str(pid) not in {holder.name for holder in queues.horizon(older_than=60)}


def test_asking_is_not_holding(transactional_db):
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        own = str(cursor.fetchone()[0])
    assert own not in {holder.name for holder in queues.horizon(older_than=0, limit=100)}
