"""A Django project with stock settings, as the Python peers' users have: what enqueues runs in it.

Only the connection stays open (CONN_MAX_AGE), as it does within a request. Statements are bound by
the client and are not prepared, which is Django's default; `tuned` is for a worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import django
from common import paced, timed
from django.conf import settings


def setup(*apps: str, tuned: dict[str, Any] | None = None, **more: Any) -> None:
    """Make the project, with these apps, these options of the connection and other settings."""
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ.get("PGHOST", ""),
        "PORT": os.environ.get("PGPORT", ""),
        "USER": os.environ.get("PGUSER", ""),
        "PASSWORD": os.environ.get("PGPASSWORD", ""),
        "NAME": os.environ["PGDATABASE"],
        "CONN_MAX_AGE": None,
        "OPTIONS": tuned or {},
    }
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=apps,
        LOGGING_CONFIG=None,
        USE_TZ=True,
        **more,
    )
    django.setup()


def producers(
    prepare: Callable[[], Callable[[dict[str, Any]], Any]],
) -> dict[str, Callable[..., Any]]:
    """Return the commands that enqueue one at a time, each with a business row in `atomic()`.

    `prepare()` is called with an open connection; it returns what enqueues one payload and returns
    the job's id.
    """
    from django.db import connection, transaction

    def one(insert: str, payload: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
        connection.ensure_connection()
        add = prepare()

        def enqueue() -> tuple[Any, Any]:
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute(insert, ["both"])
                    (order,) = cursor.fetchone()
                return order, add({**payload, "number": order})

        return enqueue

    def enqueue(count: int, warm_up: int, **how: Any) -> dict[str, Any]:
        return timed(count, warm_up, one(**how))

    def produce(count: int, every: float, **how: Any) -> dict[str, Any]:
        return paced(count, every, one(**how))

    return {"enqueue": enqueue, "produce": produce}


def real_work() -> Callable[[int], None]:
    """Return a handler that loads, updates and inserts a row in `atomic()`, as ours does.

    The tables are the benchmarks'.
    """
    from django.db import models, transaction

    class Counter(models.Model):  # noqa: DJ008
        value = models.PositiveIntegerField(default=0)

        class Meta:
            app_label, db_table, managed = "bench", "bench_counter", False

    class Entry(models.Model):  # noqa: DJ008
        id = models.BigAutoField(primary_key=True)
        message = models.BigIntegerField()
        note = models.TextField()

        class Meta:
            app_label, db_table, managed = "bench", "bench_entry", False

    @transaction.atomic
    def handle(number: int) -> None:
        counter = Counter.objects.get(pk=1 + number * 7919 % 500)
        counter.value = models.F("value") + 1
        counter.save()
        Entry.objects.create(message=number, note="handled")

    return handle
