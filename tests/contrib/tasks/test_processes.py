"""Tasks in real workers: `manage.py mq_worker` is stopped, interrupted and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from django_mq.contrib.tasks.compat import TaskResultStatus
from django_mq.policy.outcomes import WorkerLost
from tests.acceptance.conftest import database_url
from tests.acceptance.processes import Worker
from tests.contrib.tasks.app import more
from tests.contrib.tasks.app import tasks as app_tasks
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

READY, FAILED = TaskResultStatus.READY, TaskResultStatus.FAILED
SUCCESSFUL = TaskResultStatus.SUCCESSFUL


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start `manage.py mq_worker` on the test database; it is destroyed at the end."""
    workers: list[Worker] = []

    def start(*options: str) -> Worker:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.contrib.tasks.settings",
            "DATABASE_URL": database_url(),
        }
        worker = Worker(options, environment, tmp_path / f"worker-{len(workers)}.log")
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.destroy()


def refreshed(result: Any) -> Any:
    result.refresh()
    return result


def test_a_worker_finds_the_tasks_by_itself(start: Callable[..., Worker], tmp_path: Path) -> None:
    """The tasks in `tasks.py` of each app, and in the modules that OPTIONS names."""
    noted, added = app_tasks.note.enqueue(str(tmp_path), "a"), more.add.enqueue(1, 2)
    assert start("--until-empty").ends() == 0
    assert refreshed(added).return_value == 3
    assert str(refreshed(noted).return_value) == (tmp_path / "a").read_text().strip()


def test_the_checks_of_the_backend_run() -> None:
    """Django registers these checks once its tasks are imported."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.contrib.tasks.settings",
        "DATABASE_URL": database_url(),
        "TASK_OPTIONS": '{"retries": 3}',
    }
    command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("(django_mq.E020) TASKS['default']['OPTIONS']['retries']") == 1


def test_the_most_messages(start: Callable[..., Worker], tmp_path: Path) -> None:
    results = [app_tasks.note.enqueue(str(tmp_path), "b") for _ in range(3)]
    assert start("--max-messages", "2").ends() == 0
    assert [refreshed(each).status for each in results] == [SUCCESSFUL, SUCCESSFUL, READY]


def test_no_task_runs_twice_in_two_workers(start: Callable[..., Worker], tmp_path: Path) -> None:
    results = [app_tasks.note.enqueue(str(tmp_path), f"c{n}") for n in range(200)]
    workers = [start("--until-empty"), start("--until-empty")]
    assert [worker.ends() for worker in workers] == [0, 0]
    assert {refreshed(each).status for each in results} == {SUCCESSFUL}
    assert {len((tmp_path / f"c{n}").read_text().split()) for n in range(200)} == {1}


def test_a_stopped_worker_finishes_its_task(start: Callable[..., Worker], tmp_path: Path) -> None:
    result = app_tasks.hold.enqueue(str(tmp_path))
    worker = start()
    worker.until((tmp_path / "attempt-1").exists, "the task runs")
    assert refreshed(result).status == TaskResultStatus.RUNNING
    worker.tell(signal.SIGTERM)
    worker.says("drain")
    (tmp_path / "open").touch()
    assert worker.ends() == 0
    assert refreshed(result).return_value == 1


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_killed_process(start: Callable[..., Worker], tmp_path: Path, attempts: int) -> None:
    """It costs an attempt, by default the only one; otherwise another process takes it over."""
    result = app_tasks.hold.using(max_attempts=attempts).enqueue(str(tmp_path))
    worker = start()
    pid = int(worker.until(lambda: read(tmp_path / "attempt-1"), "the task runs"))
    os.kill(pid, signal.SIGKILL)
    if attempts == 2:
        worker.until(lambda: read(tmp_path / "attempt-2"), "the task runs again")
    (tmp_path / "open").touch()
    until(lambda: refreshed(result).is_finished, "the end of the task")
    assert result.status == (FAILED if attempts == 1 else SUCCESSFUL)
    assert [each.exception_class for each in result.errors] == [WorkerLost]
    assert result.attempts == len(set(result.worker_ids)) == attempts


def test_an_interrupt_stops_the_worker_and_a_second_one_ends_it(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    """The task that is cut off has used its attempt, which the next worker discovers."""
    result = app_tasks.hold.enqueue(str(tmp_path))
    worker = start()
    worker.until((tmp_path / "attempt-1").exists, "the task runs")
    worker.tell(signal.SIGINT)
    worker.says("drain")
    worker.tell(signal.SIGINT)
    assert worker.ends() == -signal.SIGINT
    assert refreshed(result).status in (TaskResultStatus.RUNNING, FAILED)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
