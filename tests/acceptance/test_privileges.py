"""Roles with the documented grants and no more: S07."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import BroadcastBusy, broadcast, cancel, request
from django_mq.messages import OnDuplicate
from django_mq.models import QueuedMessage
from django_mq.store import results
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker

# What the manual tells people to grant.
PRODUCER = """
grant insert, select (id) on django_mq_queuedmessage to {role};
grant usage on sequence django_mq_queuedmessage_id_seq to {role};
"""
ASKER = """
grant select (id, wants_result, dead_at, dead_reason, last_error) on django_mq_queuedmessage
    to {role};
grant select on django_mq_result to {role};
"""
UNIQUE_PRODUCER = """
grant select, insert, update, delete on django_mq_uniquekey to {role};
grant usage on sequence django_mq_uniquekey_id_seq to {role};
grant select, update on django_mq_queuedmessage to {role};
"""
LIMITED_PRODUCER = """
grant select (queue, leased_until, blocked_by, dead_at) on django_mq_queuedmessage to {role};
"""
WORKER = """
grant select on django_migrations to {role};
grant select, insert, update, delete on django_mq_queuedmessage to {role};
grant select, insert, delete on django_mq_failedattempt to {role};
grant select, insert, update on django_mq_queuestate to {role};
grant select, insert, update, delete on django_mq_result to {role};
grant select, insert, update, delete on django_mq_workerheartbeat to {role};
grant select, insert, update, delete on django_mq_uniquekey to {role};
grant usage on sequence django_mq_uniquekey_id_seq to {role};
grant usage on sequence django_mq_queuedmessage_id_seq to {role};
grant usage on sequence django_mq_failedattempt_id_seq to {role};
"""
# What the handlers of these tests need of their own.
HANDLERS = "grant insert on acceptance_effect to {role};"


@pytest.fixture
def role(empty_tables: None) -> Iterator[Callable[[str, str], str]]:
    """Make a role that may log in and has these grants alone; dropped at the end."""
    made: list[str] = []

    def make(purpose: str, grants: str) -> str:
        name = f"mq_acceptance_{purpose}_{os.getpid()}"
        with connection.cursor() as cursor:
            cursor.execute("select rolcreaterole or rolsuper from pg_roles where rolname = user")
            if not cursor.fetchone()[0]:
                pytest.skip("the login of the test database may not create roles")
            cursor.execute(f"create role {name} login password 'secret'")
            made.append(name)
            cursor.execute(grants.format(role=name))
        return name

    yield make
    with connection.cursor() as cursor:
        for name in made:
            cursor.execute(f"drop owned by {name}; drop role {name}")


def test_a_producer(role: Callable[[str, str], str], queue: Queue) -> None:
    """It stores one message and many, by statement, by COPY and by the SQL function, and rings."""
    name = role("producer", PRODUCER)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
        queue.send("write", "one")
        queue.send("write", *[f"few{n}" for n in range(5)])
        queue.send("write", *[f"many{n}" for n in range(200)])
    with psycopg.connect(database_url(user=name, password="secret"), autocommit=True) as producer:
        producer.execute("select mq_broadcast('work', 'acceptance.write', '{\"name\": \"sql\"}')")
        for refused in ("select payload", "delete"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                producer.execute(f"{refused} from django_mq_queuedmessage")
    assert QueuedMessage.objects.count() == 207


def test_an_asker(role: Callable[[str, str], str], queue: Queue) -> None:
    """It stores a request, and looks for its reply and for nothing else of it."""
    name = role("asker", PRODUCER + ASKER)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
        pending = request("acceptance.echo", "secret")
    with psycopg.connect(database_url(user=name, password="secret"), autocommit=True) as asker:
        asker.execute(results.LISTEN)
        [found] = results.look(asker.cursor(), [pending.id])
        assert (found.answered, found.stored) == (False, True)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            asker.execute("select payload from django_mq_queuedmessage")


def test_a_producer_with_unique_ids(role: Callable[[str, str], str]) -> None:
    """It adds, updates, requeues and is refused; it may remove no message."""
    name = role("unique", PRODUCER + UNIQUE_PRODUCER)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
        options: list[OnDuplicate] = ["skip", "update", "debounce", "replace", "requeue", "rerun"]
        receipts = [broadcast("a.b", unique_id="u", on_duplicate=each) for each in options]
        told = [receipt.outcome for receipt in receipts]
        QueuedMessage.objects.update(leased_until=Now(), claimed_by="w:1")
        told.append(broadcast("a.b", unique_id="u", on_duplicate="requeue").outcome)
        told.append(broadcast("a.b", unique_id="u", on_duplicate="rerun").outcome)
    assert told[:4] == ["added", "updated", "debounced", "updated"]
    assert told[4:] == ["duplicate", "updated", "requeued", "requeued"]


def test_a_producer_with_a_limit(role: Callable[[str, str], str], settings: Any) -> None:
    """It may count what waits, and read no more of it."""
    settings.DJANGO_MQ = {"QUEUES": {"limited": {"max_backlog": 1}}}
    name = role("limited", PRODUCER + LIMITED_PRODUCER)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
        broadcast("a.b", queue="limited")
        with pytest.raises(BroadcastBusy):
            broadcast("a.b", queue="limited")


def test_a_worker(
    start: Callable[..., Worker],
    role: Callable[[str, str], str],
    queue: Queue,
    witness: Witness,
) -> None:
    """It does all that a worker does: run, fail, retry, hold, expire, recover, broadcast, drain."""
    name = role("worker", WORKER + HANDLERS)
    witness.open("open")
    queue.send("write", *[f"m{n}" for n in range(50)])
    queue.send("call", "call", gate="open")
    queue.send("acall", "acall", gate="open")
    queue.send("fail", "fail", until=2)
    queue.send("chain", "chain")
    pending = request("acceptance.echo", "asked")
    queue.send("gate", "running", gate="later")
    [expired] = queue.send("write", "expired")
    QueuedMessage.objects.filter(pk=expired).update(expires_at=Now() - timedelta(seconds=1))
    with connection.cursor() as cursor:
        cursor.execute("select mq_broadcast('work', 'acceptance.unknown', '{\"name\": \"held\"}')")
        cursor.execute("select mq_broadcast('work', 'acceptance.twin', '{\"name\": \"twin\"}')")
    worker = start("--threads", 2, url=database_url(user=name, password="secret"))
    worker.until(lambda: witness.started("running"), "one runs")
    worker.kill_child(0)
    worker.until(lambda: len(witness.started("running")) == 2, "it runs again")
    witness.open("later")
    worker.until(
        lambda: QueuedMessage.objects.count() == 2 and queue.done().total() >= 58, "all are done"
    )
    assert set(queue.done().values()) == {1, 2}
    assert [name for name, count in queue.done().items() if count == 2] == ["twin"]
    held = QueuedMessage.objects.get(type="acceptance.unknown")
    assert (held.held_since is not None, held.attempts) == (True, 0)
    assert queue.message(expired).dead_reason == "expired"
    assert pending.result() == "asked"
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert "permission" not in worker.said()
    assert "Traceback" not in worker.said()
    assert cancel(type="acceptance.unknown").ids
