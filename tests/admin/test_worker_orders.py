"""Orders to a worker from its page and from the list are confirmed, given, logged, and shown."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db.models.functions import Now

from django_mq.models import Operation, WorkerCommand
from tests.admin.conftest import VIEW
from tests.admin.pages import text, told, url
from tests.database import second_connection
from tests.rows import add, beat

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

LIST = url("workerheartbeat")
PAGE = url("workerheartbeat", "change", "w")


def order(client, name, worker="w", **data):
    return client.post(url("workerheartbeat", "order", name), {"worker": worker, **data})


@pytest.mark.parametrize(
    ("name", "action", "words"),
    [("quiet", "quiet", "will claim nothing more"), ("stop", "leave", "will drain and end")],
)
def test_order_is_given_after_a_confirmation(boss, name, action, words):
    message = add(leased=60)
    beat("w", host="mail-1", pid=77, running=[message.pk])
    asked = order(boss, name, page="1")
    assert f"Worker mail-1, process 77 {words}" in text(asked)
    assert "The message that runs now is finished." in text(asked)
    assert not WorkerCommand.objects.exists()
    done = order(boss, name, page="1", confirmed="yes")
    assert done.url == PAGE
    assert "The worker was told" in told(done)[0]
    command = WorkerCommand.objects.get()
    assert (command.worker, command.action, command.asked_by) == ("w", action, "ada")
    assert (command.message_id, command.attempt) == (None, None)
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.object_repr) == (boss.user, "w", "mail-1:77")
    assert "not read yet" in text(boss.get(PAGE))
    WorkerCommand.objects.update(taken_at=Now())
    page = text(boss.get(PAGE))
    assert f"{name.capitalize()} by ada" in page
    assert "not read yet" not in page
    assert "Told to" in text(boss.get(url("workerheartbeat", "history", "w")))


def test_names_of_users_may_be_numbers(boss, monkeypatch):
    """Custom user models have such: phone numbers, numbers of employees."""
    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    name = str(boss.user.pk)
    message = add(leased=60, claimed_by="w:1", attempts=1)
    beat("w", running=[message.pk])
    order(boss, "quiet", confirmed="yes")
    boss.post(url("queuedmessage", "running", message.pk, "stop"), {"confirmed": "yes"})
    assert [each.asked_by for each in WorkerCommand.objects.all()] == [name, name]
    boss.post(url("queuedmessage", "everything", "cancel"), {"matched": "1"})
    assert Operation.objects.get().by == name


def test_the_question_names_queues_that_no_other_worker_claims_from(boss):
    for name in ("alone", "shared", "resting"):
        add(name)
    beat("w", queues=["alone", "shared", "resting"])
    beat("other", queues=["shared"]), beat("quiet", queues=["resting"], quiet=True)
    assert "No other worker claims from: alone, resting ." in text(order(boss, "stop"))
    beat("every", queues=["#"])
    assert "No other worker" not in text(order(boss, "stop"))


def test_a_quiet_worker_is_resumed_without_a_question(boss):
    beat("w", quiet=True)
    assert order(boss, "resume").url == LIST
    assert WorkerCommand.objects.get().action == "resume"
    assert LogEntry.objects.get().change_message == "Told to claim again."


def test_another_session_holds_a_lock(boss):
    beat("w", quiet=True)
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_workercommand in exclusive mode")
        response = order(boss, "resume")
    assert "Another session holds a lock" in told(response)[0]
    assert not WorkerCommand.objects.exists()


@pytest.mark.parametrize(
    ("columns", "offered"),
    [
        ({}, {"quiet", "stop"}),
        ({"quiet": True}, {"resume", "stop"}),
        ({"quiet": True, "draining": True}, set()),
        ({"seen": -95}, set()),
    ],
)
def test_offered_orders_fit_the_worker(boss, columns, offered):
    beat("w", **columns)
    for page in (boss.get(LIST), boss.get(PAGE)):
        html = page.content.decode()
        names = {n for n in ("quiet", "resume", "stop") if f"orders/{n}/" in html}
        assert names == offered


def test_vanished_worker_gets_no_order(boss):
    beat("w", seen=-95)
    assert "is not alive" in told(order(boss, "quiet", confirmed="yes"))[0]
    for id in ("unknown", "a\0b", ""):
        assert "has ended" in told(order(boss, "stop", id, confirmed="yes"))[-1]
    assert not WorkerCommand.objects.exists()
    assert not LogEntry.objects.exists()
    assert order(boss, "kill").status_code == 404
    assert boss.get(url("workerheartbeat", "order", "stop")).url == LIST


def test_the_right(login):
    beat("w")
    viewer, may = login(*VIEW, name="viewer"), login(*VIEW, "stop_worker", name="may")
    blind = login("stop_worker", name="blind")
    for client in (viewer, blind):
        assert order(client, "stop", confirmed="yes").status_code == 403
    for page in (LIST, PAGE):
        assert "orders/" not in viewer.get(page).content.decode()
        assert "orders/stop/" in may.get(page).content.decode()
    assert not WorkerCommand.objects.exists()
    assert order(may, "stop", confirmed="yes").status_code == 302
    assert WorkerCommand.objects.get().asked_by == "may"


def test_pages_show_that_workers_are_quiet(boss):
    add()
    beat("w", queues=["mail"], quiet=True)
    assert "workers quiet" in text(boss.get(url("queuestate")))
    assert "process 7 quiet" in text(boss.get(url("queuestate", "change", "mail")))
    assert "1 worker, 1 quiet" in text(boss.get(url("overview"))).replace(" ,", ",")
    beat("other", queues=["#"])
    assert "all" in text(boss.get(url("workerheartbeat"))).split()
    assert "workers quiet" not in text(boss.get(url("queuestate")))
