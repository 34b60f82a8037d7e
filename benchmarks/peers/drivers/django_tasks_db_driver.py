"""django-tasks-db: https://github.com/RealOrangeOne/django-tasks-db

Enqueued with stock settings. The worker is tuned: a connection that stays open, statements prepared
and bound by the server, a poll each 50 ms (it has no LISTEN). It claims and finishes tasks one by
one, and has no bulk enqueue.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import Any

from common import Work, main
from django_project import producers, real_work, setup

INTERVAL = 0.05
TUNED = {"prepare_threshold": 5, "server_side_binding": True}

setup(
    "django_tasks_db",
    tuned=TUNED if sys.argv[1] == "work" else None,
    TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
)
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
handle = real_work()


def act(number: int) -> None:
    """The work of the task, if it has any."""


@task(takes_context=True)
def noop(context: Any, **payload: Any) -> None:
    work.handled(context.task_result.id)
    act(payload["number"])


def schema() -> None:
    call_command("migrate", verbosity=0)


def _adder() -> Any:
    return lambda payload: noop.enqueue(**payload).id


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    began = monotonic()
    with transaction.atomic():
        ids = [noop.enqueue(**{**payload, "number": number}).id for number in range(count)]
    return {"seconds": monotonic() - began, "ids": ids}


def work_on(task: str = "noop") -> dict[str, Any]:
    if task == "orm":
        globals()["act"] = handle
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


main({"schema": schema, "bulk": bulk, "work": work_on, **producers(_adder)})
