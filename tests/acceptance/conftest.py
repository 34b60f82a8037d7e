"""Fixtures: workers on the test database, messages for their handlers, and the effects."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from django.db import connection, transaction

from django_mq import Message, RetryPolicy, broadcast_many, handlers
from django_mq.models import FailedAttempt, QueuedMessage
from tests.acceptance.app import effects
from tests.acceptance.app.witness import Witness
from tests.acceptance.processes import SOON, Worker


def database_url(**others: Any) -> str:
    """Return the URL of the test database; `others` replace user, password, host, port or name."""
    given = {**connection.get_connection_params(), **others}
    login = quote(str(given.get("user") or ""), safe="")
    if given.get("password"):
        login += ":" + quote(str(given["password"]), safe="")
    place = urlencode({key: given[key] for key in ("host", "port") if given.get(key)})
    return f"postgresql://{login}@/{given['dbname']}?{place}"


#: The environment of a worker that keeps for a while what waits behind long handlers. Normally it
#: releases it after a second, in which a busy test may not have looked.
PATIENT = {"ACCEPTANCE_IMPORT": "tests.acceptance.app.patient"}
#: The environment of such a worker whose heartbeats, and stalled parts, are seen soon.
HURRIED = {"ACCEPTANCE_IMPORT": "tests.acceptance.app.hurried"}


@pytest.fixture(scope="session")
def acceptance_handlers() -> tuple[handlers.Handler, ...]:
    """The handlers of the acceptance app, unknown to this process's registry."""
    with handlers.isolated():
        importlib.import_module("tests.acceptance.app.handlers")
        return handlers.all_handlers()


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests the test database, in which everything is committed."""
    mark = pytest.mark.django_db(transaction=True)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(mark)


@pytest.fixture
def empty_tables(transactional_db: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(effects.CREATE)
    yield
    with connection.cursor() as cursor:
        cursor.execute(effects.DROP)


@pytest.fixture
def start(empty_tables: None, tmp_path: Path, witness: Witness) -> Iterator[Callable[..., Worker]]:
    """Start `manage.py mq_worker` with options on the test database; destroyed at the end.

    `mq` are settings for DJANGO_MQ, `database` for DATABASES["default"], `url` replaces its URL.
    """
    workers: list[Worker] = []

    def start(
        *options: str | int | float,
        mq: dict[str, Any] | None = None,
        database: dict[str, Any] | None = None,
        url: str | None = None,
        **environment: str,
    ) -> Worker:
        # A lease that no test waits for by accident: tests of lapsed leases set a short one.
        given = {"LEASE": 300, **(mq or {})}
        worker = Worker(
            [str(option) for option in options],
            {
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
                "DATABASE_URL": url or database_url(),
                "ACCEPTANCE_MQ": json.dumps(given),
                "ACCEPTANCE_DATABASE": json.dumps(database or {}),
                "ACCEPTANCE_DIR": str(witness.directory),
                **environment,
            },
            tmp_path / f"worker-{len(workers)}.log",
            # The reloader restarts its own command line, and Python reads its own when it starts.
            anew="--reload" in options or any(name.startswith("PYTHON") for name in environment),
        )
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.destroy()


class Queue:
    """The messages of a test, and their effects."""

    def send(
        self,
        kind: str,
        *names: str,
        queue: str | None = None,
        retry: RetryPolicy | None = None,
        **payload: Any,
    ) -> list[int]:
        """Broadcast a message for each name, all in one transaction; return their ids."""
        with transaction.atomic():
            receipts = broadcast_many(
                [
                    Message(
                        f"acceptance.{kind}", {**payload, "name": name}, queue=queue, retry=retry
                    )
                    for name in names
                ]
            )
        return [id for receipt in receipts for id in receipt.ids]

    def reconnect(self) -> None:
        """Open a new connection, since the server cut the old one."""
        connection.close()

    def done(self) -> Counter[str]:
        """The number of effects per message."""
        with connection.cursor() as cursor:
            return Counter(name for name, _, _ in effects.rows(cursor))

    def effects(self) -> list[tuple[str, int, int]]:
        """Name, attempt and pid of each effect."""
        with connection.cursor() as cursor:
            return effects.rows(cursor)

    def message(self, id: int) -> QueuedMessage:
        return QueuedMessage.objects.get(pk=id)

    def leased(self) -> int:
        return QueuedMessage.objects.filter(leased_until__isnull=False).count()

    def empty(self) -> bool:
        return not QueuedMessage.objects.exists()

    def wait_empty(self, worker: Worker, seconds: float = SOON) -> None:
        worker.until(self.empty, "an empty queue", seconds)

    def left(self) -> list[QueuedMessage]:
        return list(QueuedMessage.objects.order_by("id"))

    def failures(self, id: int) -> list[str]:
        """The error classes, without their modules, of the failed attempts of message `id`."""
        attempts = FailedAttempt.objects.filter(message_id=id).order_by("attempt", "id")
        return [attempt.error_class.rpartition(".")[2] for attempt in attempts]


@pytest.fixture
def queue(empty_tables: None, acceptance_handlers: tuple[handlers.Handler, ...]) -> Iterator[Queue]:
    with handlers.isolated(acceptance_handlers):
        yield Queue()
