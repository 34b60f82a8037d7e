"""mq_workers: the list, the choice of workers, the question, and the orders."""

from __future__ import annotations

import re

import pytest
from django.core.management import CommandError, call_command

from django_mq import handlers, queues
from django_mq.management.commands import mq_workers
from django_mq.models import QueuedMessage, WorkerCommand, WorkerHeartbeat
from django_mq.queues.doctor.subscriptions import unserved
from tests.management.conftest import rows, run, run_json
from tests.rows import add, beat

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _fleet():
    with handlers.isolated():
        beat("aa11111111", host="mail-1", queues=["mail"], quiet=True)
        beat("aa22222222", host="mail-1", queues=["mail"])
        beat("bb33333333", host="web-1", queues=["web"], draining=True, quiet=True)
        beat("cc44444444", host="gone-1", queues=["web"], seen=-95)
        yield


def told():
    found = WorkerCommand.objects.order_by("worker")
    return [(each.worker, each.action, each.asked_by) for each in found]


def test_the_list():
    for name in ("mq_workers", "mq_status"):
        found = rows(run(name))
        states = {id: found[id][3] for id in ("aa111111", "aa222222", "bb333333", "cc444444")}
        assert list(states.values()) == ["quiet", "alive", "draining", "gone"]
    listed = run_json("mq_workers", "list")
    assert {each["id"]: each["quiet"] for each in listed}["aa11111111"] is True
    assert [each["quiet"] for each in run_json("mq_status")["workers"]].count(True) == 2


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["quiet", "aa2", "bb33333333"], ["aa22222222", "bb33333333"]),
        (["quiet", "aa2", "aa2", "aa22222222"], ["aa22222222"]),
        (["quiet", "--host", "mail-1"], ["aa11111111", "aa22222222"]),
        (["quiet", "--all"], ["aa11111111", "aa22222222", "bb33333333"]),
    ],
)
def test_only_named_workers_get_the_order(arguments, ids):
    text = run("mq_workers", *arguments, "--by", "ana", "--yes")
    assert f"Told {len(ids)} worker process" in text
    assert told() == [(id, "quiet", "ana") for id in ids]


def test_they_are_also_named_by_keyword():
    """Django passes keywords on only for arguments that argparse does not require."""
    call_command("mq_workers", action="quiet", ids=["aa2"], by="ana", yes=True)
    assert told() == [("aa22222222", "quiet", "ana")]


@pytest.mark.parametrize(("action", "stored"), [("resume", "resume"), ("stop", "leave")])
def test_the_other_orders(action, stored):
    found = run_json("mq_workers", action, "aa1", "--by", "ana", "--yes")
    assert found == {"action": action, "workers": ["aa11111111"]}
    assert told() == [("aa11111111", stored, "ana")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "by ID, by --host, or --all"),
        (["aa1", "--all"], "by ID, by --host, or --all"),
        (["aa"], "the ids of 2 live workers begin with 'aa'"),
        (["cc44444444"], "no live worker has the id"),
        (["--host", "gone-1"], "hosts with workers: mail-1, web-1"),
    ],
)
def test_ambiguous_or_unknown_worker_is_refused(arguments, words):
    with pytest.raises(CommandError, match=words):
        run("mq_workers", "stop", *arguments, "--yes")
    with pytest.raises(CommandError, match="name workers after"):
        run("mq_workers", "list", "--all")
    assert told() == []


def test_it_asks_unless_it_is_undone_easily(terminal):
    questions = terminal("n", "y")
    assert run("mq_workers", "stop", "aa1").endswith("Nothing was changed.\n")
    assert told() == []
    run("mq_workers", "stop", "aa1")
    run("mq_workers", "resume", "aa1")
    assert [each.split("?")[0] for each in questions] == ["Stop 1 worker process"] * 2
    assert [action for _, action, _ in told()] == ["leave", "resume"]


def test_without_a_terminal_it_wants_yes():
    with pytest.raises(CommandError, match="Pass --yes"):
        run("mq_workers", "quiet", "aa1")
    assert told() == []


def test_why_and_the_doctor_name_quiet_workers():
    message = add("web")
    assert "every worker of its queue is draining" in str(queues.why(message.pk))
    beat("dd55555555", queues=["web"], quiet=True)
    assert "every worker of its queue is quiet or draining" in str(queues.why(message.pk))
    (found,) = (each for each in unserved("default") if "web" in each.text)
    assert (found.id, "that is not quiet" in found.text) == ("D013", True)
    assert "mq_workers resume" in found.hint
    beat("ee66666666", queues=["web"])
    assert not [each for each in unserved("default") if "web" in each.text]


def runs(worker, **given):
    """Insert a running message of `worker`, which has a heartbeat, and return its id."""
    message = add(leased=60, claimed_by=f"{worker}:1", handler="app.slow", **given)
    found = WorkerHeartbeat.objects.get(pk=worker)
    found.running, found.ran = [*found.running, message.pk], {**found.ran, str(message.pk): 95.0}
    found.save()
    return message.pk


def test_list_ends_with_the_running_messages():
    assert "ATTEMPT" not in run("mq_workers")
    ids = [runs("aa11111111", attempts=3), runs("aa22222222", type="shop.mail")]
    WorkerHeartbeat.objects.filter(pk="aa22222222").update(ran={str(ids[1]): 8000.0})
    workers, messages = run("mq_workers").split("\n\n")
    assert len(workers.splitlines()) == 5
    header, *rows = [" ".join(line.split()) for line in messages.splitlines()]
    assert header == "WORKER MESSAGE RAN FOR ATTEMPT HANDLER TYPE"
    for row, text in zip(
        rows,
        (
            rf"aa222222 {ids[1]} 2 h 1\d min 0 app\.slow shop\.mail",
            rf"aa111111 {ids[0]} [1-9] min \d+ s 3 app\.slow shop\.orders\.placed",
        ),
        strict=True,
    ):
        assert re.fullmatch(text, row)
    assert max(map(len, messages.splitlines())) <= 80


def test_a_message_whose_start_is_unknown_and_one_without_a_handler():
    id = runs("aa11111111")
    WorkerHeartbeat.objects.update(ran={})
    QueuedMessage.objects.update(handler="")
    assert f"{id}  -              0  -        shop." in run("mq_workers")


def test_a_long_list_is_cut(monkeypatch):
    monkeypatch.setattr(mq_workers, "MAX_RUNNING", 2)
    for _ in range(4):
        runs("aa11111111")
    lines = run("mq_workers").splitlines()
    assert lines[-1] == "... and 2 more: --json has them all"
    assert [line.split()[0] for line in lines[-3:-1]] == ["aa111111", "aa111111"]


def test_the_json_has_the_messages_of_each_worker():
    id = runs("aa11111111", attempts=3)
    listed = {each["id"]: each for each in run_json("mq_workers")}
    assert listed["aa22222222"]["messages"] == []
    assert listed["aa11111111"]["running"] == [id]
    [message] = listed["aa11111111"]["messages"]
    assert message.pop("ran_for") >= 95.0
    assert message == {
        "id": id,
        "queue": "mail",
        "type": "shop.orders.placed",
        "handler": "app.slow",
        "attempt": 3,
    }
