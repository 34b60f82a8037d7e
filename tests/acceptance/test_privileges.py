"""Logins with the documented roles: S07. ../test_roles.py tests the rights of each role."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import cancel, periodic, request
from django_mq.conf import get_settings
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage, Schedule
from django_mq.outbox.schedules.declaring import declare_all, keep_declared, retire
from django_mq.store import results
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker
from tests.roles import documented, documented_names, skip_unless_able

# Tables that the handlers of these tests need.
HANDLERS = "grant insert on acceptance_effect to {role};"


@pytest.fixture
def role(empty_tables: None) -> Iterator[Callable[[str], str]]:
    """Return the name of a documented role of this test run that may log in."""
    skip_unless_able()
    names = {name: f"{name}_{os.getpid()}" for name in documented_names()}
    with connection.cursor() as cursor:
        for block in documented():
            cursor.execute(re.sub(r"\bmq_\w+", lambda match: names.get(match[0], match[0]), block))

    def may_log_in(name: str) -> str:
        with connection.cursor() as cursor:
            cursor.execute(f"alter role {names[name]} login password 'secret'")
        return names[name]

    yield may_log_in
    made = ", ".join(names.values())
    with connection.cursor() as cursor:
        cursor.execute(f"drop owned by {made}; drop role {made}")


def test_a_producer(role: Callable[[str], str], queue: Queue) -> None:
    """It stores one message or many, by statement, by COPY and by the SQL function, and rings."""
    name = role("mq_producer")
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


def test_an_asker(role: Callable[[str], str], queue: Queue) -> None:
    """It stores a request and reads its reply, and nothing else of it."""
    name = role("mq_asker")
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
        pending = request("acceptance.echo", "secret")
    with psycopg.connect(database_url(user=name, password="secret"), autocommit=True) as asker:
        asker.execute(results.LISTEN)
        [found] = results.reply_states(asker.cursor(), [pending.id])
        assert (found.answered, found.stored) == (False, True)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            asker.execute("select payload from django_mq_queuedmessage")


def test_a_worker(
    start: Callable[..., Worker],
    role: Callable[[str], str],
    queue: Queue,
    witness: Witness,
) -> None:
    """It does all of a worker's work: run, fail, retry, hold, expire, recover, broadcast, drain;
    and it broadcasts schedules.
    """
    name = role("mq_worker")
    with connection.cursor() as cursor:
        cursor.execute(HANDLERS.format(role=name))
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
    Schedule.objects.create(
        name="due",
        type="acceptance.write",
        payload={"name": "clock"},
        every=timedelta(days=1),
        next_at=Now(),
    )
    worker = start("--threads", 2, url=database_url(user=name, password="secret"))
    worker.until(lambda: witness.started("running"), "one runs")
    worker.until(lambda: "Traceback" in worker.said(), "one has failed, and not by the kill")
    worker.kill_child(0)
    worker.until(lambda: len(witness.started("running")) == 2, "it runs again")
    witness.open("later")
    worker.until(
        lambda: QueuedMessage.objects.count() == 2 and queue.done().total() >= 59, "all are done"
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
    assert worker.said().count("Traceback") == 1, "of the handler that fails once"
    assert cancel(type="acceptance.unknown").ids


def test_a_worker_stores_the_schedules_of_its_code(role: Callable[[str], str]) -> None:
    name = role("mq_worker")

    @contextmanager
    def block() -> Iterator[Any]:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"set local role {name}")
            yield cursor

    with isolated():
        for every in (60, 61):
            periodic(f"every-{every}", "a.b", every=every)
            declare_all(block, get_settings())
        Schedule.objects.update(declared_at=Now() - timedelta(days=2))
        keep_declared(block, get_settings())
        retire(block)
    assert Schedule.objects.filter(enabled=True).count() == 2
