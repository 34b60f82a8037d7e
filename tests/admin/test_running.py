"""The page of a running message: its worker, the stop button, and its stack."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry

from django_mq import queues
from django_mq.models import QueuedMessage, WorkerCommand
from tests.database import second_connection
from tests.rows import add, beat

from .conftest import VIEW
from .pages import text, told, url

pytestmark = pytest.mark.django_db


@pytest.fixture
def running():
    message = add(handler="h", leased=60, claimed_by="w:1", attempts=1)
    beat("w", host="mail-1", pid=77, running=[message.pk], ran={str(message.pk): 120})
    return message


def ask(client, message, name, **data):
    return client.post(url("queuedmessage", "running", message.pk, name), data, follow=True)


def test_where_it_runs_and_for_how_long(boss, running):
    page = text(boss.get(url("queuedmessage", "change", running.pk)))
    assert "Its handler has run for 2 min" in page
    assert "on mail-1, process 77" in page
    assert "2 min" in text(boss.get(url("workerheartbeat")))
    [found] = queues.running()
    assert (found.id, found.worker, found.attempt) == (running.pk, "w", 1)


def test_stop_asks_first_and_is_logged(boss, running):
    assert "will be stopped" in text(ask(boss, running, "stop"))
    assert not WorkerCommand.objects.exists()
    assert "The worker was asked" in text(ask(boss, running, "stop", confirmed="yes"))
    command = WorkerCommand.objects.get()
    assert (command.worker, command.message_id, command.attempt) == ("w", running.pk, 1)
    assert (command.action, command.asked_by) == ("stop", "ada")
    assert LogEntry.objects.get().object_id == str(running.pk)


def test_the_stack_is_shown_once_the_worker_has_answered(boss, running):
    ask(boss, running, "stack")
    page = url("queuedmessage", "change", running.pk)
    assert "not answered yet" in text(boss.get(page))
    WorkerCommand.objects.update(answer="  in <send_mail>", answered_at=running.created_at)
    assert "in <send_mail>" in text(boss.get(page))


def test_the_stack_of_another_attempt_is_not_shown(boss, running):
    ask(boss, running, "stack")
    WorkerCommand.objects.update(answer="in send_mail", answered_at=running.created_at)
    QueuedMessage.objects.filter(pk=running.pk).update(attempts=2)
    assert "in send_mail" not in text(boss.get(url("queuedmessage", "change", running.pk)))


def test_another_session_holds_a_lock(boss, running):
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_workercommand in exclusive mode")
        response = boss.post(url("queuedmessage", "running", running.pk, "stack"))
    assert "Another session holds a lock" in told(response)[0]
    assert not WorkerCommand.objects.exists()


@pytest.mark.parametrize(("name", "right"), [("stop", "stop_message"), ("stack", "view_payload")])
def test_rights(login, running, name, right):
    WorkerCommand.objects.create(
        worker="w", message_id=running.pk, attempt=1, action="stack", answer="secret",
        answered_at=running.created_at,
    )  # fmt: skip
    viewer, may = login(*VIEW, name="viewer"), login(*VIEW, right, name="may")
    page = viewer.get(url("queuedmessage", "change", running.pk))
    assert f"/{name}/" not in page.content.decode()
    assert "secret" not in page.content.decode()
    assert ask(viewer, running, name, confirmed="yes").status_code == 403
    assert f"/{name}/" in may.get(url("queuedmessage", "change", running.pk)).content.decode()
    assert ask(may, running, name, confirmed="yes").status_code == 200
    assert WorkerCommand.objects.filter(action=name, asked_by="may").exists()


def test_only_a_running_message_can_be_stopped(boss, running):
    waiting = add(handler="h")
    assert "No live worker" in text(ask(boss, waiting, "stop", confirmed="yes"))
    QueuedMessage.objects.filter(pk=running.pk).delete()
    assert "has ended" in text(ask(boss, running, "stop", confirmed="yes"))
    assert not WorkerCommand.objects.exists()
    assert boss.get(url("queuedmessage", "running", waiting.pk, "other")).status_code == 404


@pytest.mark.parametrize("ran", [{"x": 1}, {"1": "long"}, {"1": -1}, {"1": 1e300}])
def test_odd_numbers_of_a_worker_break_nothing(boss, ran):
    message = add(handler="h", leased=60, claimed_by="w:1", attempts=1)
    beat("w", running=[message.pk], ran={str(message.pk): each for each in ran.values()})
    assert boss.get(url("workerheartbeat")).status_code == 200
    assert boss.get(url("queuedmessage", "change", message.pk)).status_code == 200
