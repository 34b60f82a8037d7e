"""Huey by its backend of Django's tasks: https://github.com/coleifer/huey

Its PostgreSQL storage with one worker and no scheduler. It has a connection of its own, so that a
task is committed before the transaction of its business row ends, and no bulk enqueue. A task is
removed before it runs; its result is kept.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import Any

from common import Work, main
from django_project import producers, setup

PARAMETERS = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
}

setup(
    "huey.contrib.djhuey",
    TASKS={"default": {"BACKEND": "huey.contrib.djhuey.tasks_backend.HueyBackend"}},
    HUEY={
        "name": "bench",
        "huey_class": "huey.PostgresHuey",
        "connection": {
            key: os.environ[name] for key, name in PARAMETERS.items() if name in os.environ
        },
    },
)
# A task is found by the name of its module.
sys.modules["huey_driver"] = sys.modules[__name__]
__name__ = "huey_driver"

from django.db import transaction  # noqa: E402
from huey.contrib.djhuey import HUEY  # noqa: E402

try:
    from django.tasks import task
    from django.tasks.signals import task_finished
except ImportError:
    from django_tasks import task
    from django_tasks.signals import task_finished

work = Work()


@task(takes_context=True)
def noop(context: Any, **payload: Any) -> None:
    work.handled(context.task_result.id)


def schema() -> None:
    HUEY.storage.initialize_schema()


def _adder() -> Any:
    return lambda payload: noop.enqueue(**payload).id


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    began = monotonic()
    with transaction.atomic():
        ids = [noop.enqueue(**{**payload, "number": number}).id for number in range(count)]
    return {"seconds": monotonic() - began, "ids": ids}


def work_on(task: str = "noop") -> dict[str, Any]:
    worker = HUEY.create_consumer(workers=1, periodic=False)._create_worker()
    stopped: list[bool] = []
    task_finished.connect(lambda **_: work.settled(), weak=False)
    worker.initialize()
    work.wait(lambda: stopped.append(True))
    work.claiming()
    while not stopped:
        worker.loop()
    return work.seen()


main({"schema": schema, "bulk": bulk, "work": work_on, **producers(_adder)})
