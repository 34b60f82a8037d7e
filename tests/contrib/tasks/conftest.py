"""The backend under test, and a registry with the tasks of `jobs` and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from django_mq import handlers
from django_mq.contrib.tasks.compat import BaseTaskBackend

BACKEND = "django_mq.contrib.tasks.MessageQueueBackend"
#: A backend of another package.
DUMMY = f"{BaseTaskBackend.__module__.removesuffix('.base')}.dummy.DummyBackend"
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "second"]},
    "second": {"BACKEND": BACKEND, "QUEUES": ["own"]},
    "other": {"BACKEND": BACKEND, "QUEUES": ["default"]},
}

with override_settings(TASKS=TASKS), handlers.isolated():
    from django_mq.contrib.tasks import MessageQueueBackend
    from tests.contrib.tasks import jobs, own_jobs
    from tests.contrib.tasks.app import more, tasks

ALL = [
    each
    for module in (jobs, own_jobs, tasks, more)
    for each in vars(module).values()
    if isinstance(each, MessageQueueBackend.task_class)
]


@pytest.fixture(autouse=True)
def backend(settings: Any) -> Iterator[handlers.Registry]:
    """TASKS names the backend, and the registry contains the tasks of `jobs`."""
    settings.TASKS = TASKS
    with handlers.isolated() as registry:
        MessageQueueBackend.load_tasks()
        for task in ALL:
            task.get_backend().validate_task(task)
        jobs.ran.clear()
        yield registry
