"""django-tasks-db: https://github.com/RealOrangeOne/django-tasks-db

Tuned: a connection that stays open, statements prepared and bound by the server, a poll each
50 ms (it has no LISTEN). It claims and finishes tasks one by one, and has no bulk enqueue.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import Any

import django
from common import Work, main, paced, timed
from django.conf import settings

INTERVAL = 0.05

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": os.environ.get("PGHOST", ""),
            "PORT": os.environ.get("PGPORT", ""),
            "USER": os.environ.get("PGUSER", ""),
            "PASSWORD": os.environ.get("PGPASSWORD", ""),
            "NAME": os.environ["PGDATABASE"],
            "CONN_MAX_AGE": None,
            "OPTIONS": {"prepare_threshold": 5, "server_side_binding": True},
        }
    },
    INSTALLED_APPS=["django_tasks_db"],
    TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
    LOGGING_CONFIG=None,
    USE_TZ=True,
)
django.setup()
# A task is found by the name of its module.
sys.modules["django_tasks_db_driver"] = sys.modules[__name__]
__name__ = "django_tasks_db_driver"

from django.core.management import call_command  # noqa: E402
from django.db import connection, transaction  # noqa: E402
from django_tasks_db.compat import task_finished  # noqa: E402
from django_tasks_db.management.commands.db_worker import Worker  # noqa: E402

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

work = Work()


@task(takes_context=True)
def noop(context: Any, **payload: Any) -> None:
    work.handled(context.task_result.id)


def schema() -> None:
    call_command("migrate", verbosity=0)


def _one(insert: str, payload: dict[str, Any]) -> Any:
    def enqueue() -> tuple[Any, Any]:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(insert, ["both"])
                (order,) = cursor.fetchone()
            return order, noop.enqueue(**{**payload, "number": order}).id

    return enqueue


def enqueue(count: int, warm_up: int, **how: Any) -> dict[str, Any]:
    return timed(count, warm_up, _one(**how))


def produce(count: int, every: float, **how: Any) -> dict[str, Any]:
    return paced(count, every, _one(**how))


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    began = monotonic()
    with transaction.atomic():
        ids = [noop.enqueue(**{**payload, "number": number}).id for number in range(count)]
    return {"seconds": monotonic() - began, "ids": ids}


def work_on() -> dict[str, Any]:
    worker = Worker(
        queue_names=["default"], interval=INTERVAL, batch=False, backend_name="default",
        startup_delay=False, max_tasks=None, worker_id=str(os.getpid()), excluded_queue_names=[],
    )  # fmt: skip
    task_finished.connect(lambda **_: work.settled(), weak=False)
    connection.ensure_connection()
    work.wait(lambda: setattr(worker, "running", False))
    work.claiming()
    worker.run()
    return work.seen()


commands = {"schema": schema, "enqueue": enqueue, "produce": produce, "bulk": bulk}
main({**commands, "work": work_on})
