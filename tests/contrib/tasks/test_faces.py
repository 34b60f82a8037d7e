"""The admin, the commands, pauses, limits and test helpers treat tasks like messages."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import transaction
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from django_mq import fixed, handler, handlers, queues
from django_mq.admin import QueueStateAdmin
from django_mq.conf import get_settings
from django_mq.contrib.tasks import MessageQueueBackend
from django_mq.contrib.tasks.compat import TaskResultStatus
from django_mq.exceptions import InvalidName
from django_mq.management.serving import served
from django_mq.models import QueuedMessage, Result
from django_mq.testing import assert_broadcast, capture_broadcasts, deliver, drain, due
from django_mq.worker import Worker
from tests.admin.pages import text, url
from tests.contrib.tasks import jobs
from tests.contrib.tasks.conftest import BACKEND, DUMMY
from tests.rows import beat, the_message
from tests.worker.conftest import Bench, bench, make_bench  # noqa: F401  (fixtures)

pytestmark = pytest.mark.django_db(transaction=True)

NOTE = "tests.contrib.tasks.jobs.note"


def said(command: str, *arguments: object, **options: Any) -> str:
    out = StringIO()
    call_command(command, *map(str, arguments), stdout=out, **options)
    return out.getvalue()


@pytest.fixture
def boss(settings: Any) -> Client:
    static = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    settings.STORAGES = {**settings.STORAGES, "staticfiles": static}
    client = Client()
    client.force_login(User.objects.create(username="ada", is_staff=True, is_superuser=True))
    return client


# ---- the admin


def test_the_page_of_a_waiting_task(boss: Client) -> None:
    result = jobs.note.enqueue("visible", token="secret")
    listing = text(boss.get(url("queuedmessage")))
    assert f"tasks.{NOTE}" in listing
    page = text(boss.get(url("queuedmessage", "change", result.id)))
    assert NOTE in page
    assert "visible" in page
    assert "secret" not in page


def test_the_page_of_a_result(boss: Client) -> None:
    result = jobs.note.using(priority=7).enqueue("visible", token="secret")
    drain()
    assert NOTE in text(boss.get(url("result")))
    page = text(boss.get(url("result", "change", result.id)))
    for shown in (NOTE, "returned", "visible", "Priority", "7", "default", "RESULT_RETENTION"):
        assert shown in page
    assert "secret" not in page


def test_arguments_are_private(boss: Client) -> None:
    result = jobs.note.enqueue("visible")
    drain()
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename="view_result"))
    client = Client()
    client.force_login(viewer)
    page = text(client.get(url("result", "change", result.id)))
    assert NOTE in page
    assert "visible" not in page


def test_the_page_of_types_and_handlers(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    page = reverse("admin:django_mq_queuestate_topology")
    listed = text(boss.get(page)).partition("Tasks, which only enqueue() reaches: ")[2]
    assert NOTE in listed.split(". ")[0].replace(" ,", ",")
    monkeypatch.setattr(QueueStateAdmin, "get_queues", lambda self, request: {"elsewhere"})
    assert NOTE not in text(boss.get(page))


# ---- commands and operations


def test_why_and_routes_and_peek() -> None:
    result = jobs.note.enqueue()
    assert f"Message {result.id} (tasks.{NOTE}, queue default)" in said("mq_why", result.id)
    assert NOTE in said("mq_routes", f"tasks.{NOTE}")
    assert NOTE in said("mq_peek", "default")
    everything = said("mq_routes")
    assert NOTE in everything.partition("Tasks, which only enqueue() reaches: ")[2].split(", ")
    assert "No handler is registered" not in everything
    drain()
    assert f"handler {NOTE} returned a value" in said("mq_why", result.id)


def test_the_routes_of_a_type_list_no_tasks_but_the_one_it_names() -> None:
    handler("shop.*", name="books")(lambda delivery: None)
    found = json.loads(said("mq_routes", "shop.placed", json=True))
    assert {row["handler"]: row["gets_it"] for row in found} == {"books": True}
    found = json.loads(said("mq_routes", f"tasks.{NOTE}", json=True))
    assert {row["handler"]: row["gets_it"] for row in found} == {NOTE: True, "books": False}


def test_the_commands_know_the_tasks_of_other_backends(settings: Any, capsys: Any) -> None:
    settings.TASKS = {"elsewhere": {"BACKEND": DUMMY}, "default": {"BACKEND": BACKEND}}
    name = import_module("tests.contrib.tasks.elsewhere_jobs").note.module_path
    for given in ({"handler": name}, {"type": f"tasks.{name}"}):
        with handlers.isolated():
            MessageQueueBackend.load_tasks()
            said("mq_purge", waiting=True, dry_run=True, **given)
    assert "no handler here" not in capsys.readouterr().err
    with handlers.isolated():
        MessageQueueBackend.load_tasks()
        [row] = json.loads(said("mq_routes", f"tasks.{name}", json=True))
    assert (row["handler"], row["gets_it"]) == (name, True)


def test_the_routes_of_a_task_that_is_not_registered() -> None:
    """It has no route: nothing splits it, and no other queue may suit."""
    [line] = said("mq_routes", f"tasks.{NOTE}s").strip().splitlines()
    assert line == (
        f"No task registered here has the type tasks.{NOTE}s (did you mean tasks.{NOTE}? tasks are"
        " looked for in tasks.py of each installed app and in OPTIONS['modules']): workers hold its"
        " messages until their code has the task."
    )
    [line] = said("mq_routes", "tasks.x").strip().splitlines()
    assert line.startswith("No task registered here has the type tasks.x (tasks are looked for in")


def test_a_worker_lists_a_task_once_with_all_its_queues() -> None:
    def line(*patterns: str) -> list[str]:
        table = served(patterns, get_settings())
        [found] = [line for line in table.splitlines() if f" {NOTE} " in line]
        return re.split("  +", found.strip())

    assert line("#") == ["default, second, own", NOTE, "(a task)"]
    assert line("own", "other") == ["own", NOTE, "(a task)"]


def test_requeue() -> None:
    result = jobs.fail.enqueue()
    drain(errors="keep")
    said("mq_requeue", "--queue", "default", "--yes")
    result.refresh()
    assert result.status == TaskResultStatus.READY
    drain(errors="keep")
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 2)


def test_pause_and_limit() -> None:
    jobs.note.enqueue()
    queues.pause("default")
    assert drain() == 0
    queues.resume("default")
    queues.limit("default", 0)
    assert drain() == 0
    queues.limit("default", None)
    assert drain() == 1


def test_queue_backoff(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"default": {"backoff": {"multiplier": 60}}}}
    jobs.fail.using(max_attempts=9, backoff=fixed(0)).enqueue()
    Worker(max_messages=1).run()
    assert queues.state("default").backoff_level == 1


# ---- users' tests


def test_drain_and_due_and_captures() -> None:
    with capture_broadcasts() as captured, transaction.atomic():
        jobs.note.enqueue(1)
    [broadcast] = captured
    assert (broadcast.type, broadcast.handlers) == (f"tasks.{NOTE}", (NOTE,))
    assert_broadcast(f"tasks.{NOTE}", payload={"args": [1], "kwargs": {}}, times=1)
    later = jobs.note.using(run_after=jobs.in_an_hour()).enqueue(2)
    assert drain() == 1
    due()
    assert drain() == 1
    later.refresh()
    assert later.status == TaskResultStatus.SUCCESSFUL


def test_assert_broadcast_names_the_type_of_a_task() -> None:
    with pytest.raises(InvalidName, match=rf"is a Django task: .* type 'tasks\.{NOTE}'"):
        assert_broadcast(jobs.note)  # type: ignore[arg-type]


def test_an_error_is_raised_by_drain() -> None:
    jobs.fail.enqueue()
    with pytest.raises(ValueError, match="this task failed"):
        drain()


# ---- the executor


def test_many_tasks_share_a_transaction(bench: Bench) -> None:  # noqa: F811
    """Nobody waits for their results, so no result ends its slice."""
    results = [jobs.write.enqueue(f"product {n}") for n in range(5)]
    remainder = bench.run(bench.claim("default"))
    assert not remainder.left
    assert not QueuedMessage.objects.exists()
    assert Result.objects.count() == len(results)


def test_a_task_broadcasts_and_enqueues_in_its_own_transaction() -> None:
    """Tasks that a failing task enqueued are undone with it."""
    jobs.enqueue_and_fail.enqueue()
    assert len(drain(errors="keep")) == 1
    assert drain() == 0
    assert jobs.ran == []


def test_deliver_explains_how_to_test_a_task() -> None:
    with pytest.raises(LookupError, match=r"is a Django task: .*\.call\(.*drain\(\)"):
        deliver(jobs.note, {"args": [], "kwargs": {}})


def test_why_names_no_timeout_of_a_task_whose_message_may_have_its_own() -> None:
    with transaction.atomic():
        jobs.sleep.using(timeout=7200).enqueue(60)
    message = the_message()
    QueuedMessage.objects.update(
        leased_until=Now() + timedelta(seconds=30), claimed_by="w:1", attempts=1
    )
    beat("w", running=[message.pk], ran={str(message.pk): 600})
    why = queues.why(message.pk).text
    assert "runs now" in why
    assert "timeout" not in why
