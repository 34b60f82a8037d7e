"""The JSON of a command has everything that its text has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.db import connection

from django_mq import handlers
from django_mq.management.commands import mq_status
from tests.admin.pages import fail
from tests.management.conftest import run, run_json
from tests.outbox.schedules.conftest import put
from tests.queues.pooler import Pooler
from tests.rows import add

pytestmark = pytest.mark.django_db


def test_status_has_the_sums():
    add()
    add(leased=30, attempts=1, claimed_by="w:1")
    [mail] = [each for each in run_json("mq_status")["queues"] if each["queue"] == "mail"]
    assert (mail["depth"], mail["in_flight"]) == (2, 1)


def test_status_has_the_label_of_a_queue():
    add("line", ordered=True, after=60)
    [line] = [each for each in run_json("mq_status")["queues"] if each["queue"] == "line"]
    assert line["label"] in run("mq_status")
    assert line["label"].endswith("waiting")


def test_status_marks_that_there_are_more_heads(monkeypatch):
    monkeypatch.setattr(mq_status, "MAX_HEADS", 1)
    head = add(key="a", dead=-1)
    add(key="a", blocked_by=head.pk)
    assert run_json("mq_status")["more_heads"] is False
    head = add(key="b", dead=-1)
    add(key="b", blocked_by=head.pk)
    found = run_json("mq_status")
    assert (len(found["heads"]), found["more_heads"]) == (1, True)


def test_status_warns_behind_a_pooler(monkeypatch):
    with Pooler(connection.get_connection_params()) as pooler:
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", pooler.port)
        [warning] = run_json("mq_status")["warnings"]
        assert warning in run("mq_status")
    assert "DISABLE_SERVER_SIDE_CURSORS" in warning


def test_routes_have_the_tasks_and_the_handlers_of_none_of_the_types():
    handlers.handler("other.#", name="idle")(lambda delivery: None)
    [idle] = handlers.all_handlers()
    handlers.add(replace(idle, name="work", function=print, patterns=()))
    found = run_json("mq_routes")
    assert (found["tasks"], found["idle"]) == (["work"], ["idle"])


def test_errors_have_the_text_of_the_newest():
    fail(add(), error_text="no\x1b such thing\nmore")
    [found] = run_json("mq_errors")
    assert found["text"] == "no\x1b such thing"
    assert "no\ufffd such thing" in run("mq_errors")


def test_schedule_without_a_next_time_has_the_reason():
    put(cron="61 * * * *")
    [found] = run_json("mq_schedule", "next")
    assert found["next"] == []
    assert "Bad minute" in found["problem"]
    assert found["problem"] in run("mq_schedule", "next")
