"""The log has a record of each action of an operator, with the event and fields of the reference.

`tests/docs` compares the log calls of the source with the reference; these tests carry out the
actions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

from django_mq import handler, queues
from django_mq.conf.local_time import local_text
from django_mq.testing import drain
from tests.outbox.schedules.conftest import put
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, settings: Any) -> pytest.LogCaptureFixture:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {}}}  # known, so no decision about it logs a warning
    caplog.set_level(logging.INFO, "django_mq")
    return caplog


def only(log: pytest.LogCaptureFixture, *fields: str) -> list[Any]:
    """Return level, event and `fields` of the one record, as JSON has them, and forget it."""
    [record] = log.records
    log.clear()
    found = [record.levelname, record.event, *(getattr(record, name) for name in fields)]  # type: ignore[attr-defined]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("action", "event", "state"),
    [
        ("requeue", "messages_requeued", {"dead": -1}),
        ("discard", "messages_discarded", {"dead": -1}),
        ("purge", "messages_purged", {"dead": -1}),
        ("cancel", "messages_cancelled", {"after": 60}),
        ("run_now", "messages_run_now", {"after": 60}),
    ],
)
def test_messages(log: pytest.LogCaptureFixture, action: str, event: str, state: Any) -> None:
    message, leased = add(**state), add(leased=30, attempts=1)
    getattr(queues, action)(ids=[message.pk, leased.pk])
    assert only(log, "message_ids", "skipped") == ["INFO", event, [message.pk], 1]


def test_replay(log: pytest.LogCaptureFixture) -> None:
    handler("t", queue="mail", name="h", history=60, history_payload=True)(lambda delivery: None)
    message = add(type="t", handler="h")
    drain()
    log.clear()
    queues.replay(ids=[message.pk])
    fields = ("message_ids", "skipped")
    assert only(log, *fields) == ["INFO", "messages_replayed", [message.pk], 0]


def test_one_message(log: pytest.LogCaptureFixture) -> None:
    waiting, leased = add(), add(leased=30, claimed_by="w:1", attempts=1)
    beat("w", running=[leased.pk])
    queues.edit(waiting.pk, priority=3)
    assert only(log, "message_ids") == ["INFO", "message_edited", [waiting.pk]]
    queues.stop([leased.pk], by="ada")
    fields = ("message_ids", "by")
    assert only(log, *fields) == ["INFO", "message_stop_asked", [leased.pk], "ada"]
    queues.ask_stack([leased.pk], by="ada")
    assert only(log, *fields) == ["INFO", "message_stack_asked", [leased.pk], "ada"]


def test_workers(log: pytest.LogCaptureFixture) -> None:
    beat("w")
    for action in ("quiet", "resume", "stop"):
        getattr(queues, f"{action}_workers")(["w"], by="ada")
        fields = ("workers", "by")
        assert only(log, *fields) == ["INFO", f"worker_{action}_asked", ["w"], "ada"]


def test_a_queue(log: pytest.LogCaptureFixture) -> None:
    queues.pause("mail")
    assert only(log, "queue") == ["INFO", "queue_paused", "mail"]
    queues.resume("mail")
    assert only(log, "queue") == ["INFO", "queue_resumed", "mail"]


def test_the_end_of_a_pause_is_a_local_time(log: pytest.LogCaptureFixture) -> None:
    until = queues.pause("mail", until=7200)
    assert until is not None
    assert log.messages == [f"queue mail paused until {local_text(until)}"]


def test_a_schedule(log: pytest.LogCaptureFixture) -> None:
    put("daily")
    queues.run_schedule("daily")
    assert only(log, "schedule") == ["INFO", "schedule_run", "daily"]
    queues.disable_schedule("daily")
    assert only(log, "schedule") == ["INFO", "schedule_disabled", "daily"]
    queues.enable_schedule("daily")
    assert only(log, "schedule") == ["INFO", "schedule_enabled", "daily"]


def _edit() -> None:
    queues.edit(add().pk, priority=3)


def _requeue() -> None:
    queues.requeue(add(dead=-1).pk)


def _stop() -> None:
    message = add(leased=30, claimed_by="w:1", attempts=1)
    beat("w", running=[message.pk])
    queues.stop([message.pk])


def _quiet() -> None:
    beat("w")
    queues.quiet_workers(["w"])


def _enable() -> None:
    put("daily")
    queues.enable_schedule("daily")


def _limit() -> None:
    queues.limit("mail", 3)


def _pause() -> None:
    queues.pause("mail")


def _resume() -> None:
    decide("mail", paused=-1)
    queues.resume("mail")


def _operate() -> None:
    queues.operate("requeue", queue="mail")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("act", "event"),
    [
        (_edit, "message_edited"),
        (_requeue, "messages_requeued"),
        (_stop, "message_stop_asked"),
        (_quiet, "worker_quiet_asked"),
        (_enable, "schedule_enabled"),
        (_limit, "queue_limited"),
        (_pause, "queue_paused"),
        (_resume, "queue_resumed"),
        (_operate, "operation_asked_for"),
    ],
)
def test_an_action_in_a_transaction_is_logged_once_it_is_committed(
    log: pytest.LogCaptureFixture, act: Callable[[], None], event: str
) -> None:
    """A rollback undoes it, and then the log must not report it."""
    with suppress(ZeroDivisionError), transaction.atomic():
        act()
        raise ZeroDivisionError
    assert log.records == []
    with transaction.atomic():
        act()
        assert log.records == []
    assert only(log) == ["INFO", event]


def test_actions_that_change_nothing(log: pytest.LogCaptureFixture) -> None:
    """A rule that looks for an event must not find one that did not take place."""
    put("daily", overlap="skip")
    queues.run_schedule("daily")
    leased = add(leased=30, attempts=1)
    log.clear()
    assert not queues.run_schedule("daily")
    for action in ("requeue", "discard", "purge", "cancel", "run_now", "stop", "ask_stack"):
        assert not getattr(queues, action)(ids=[leased.pk])
    assert not queues.replay(ids=[leased.pk])
    assert not queues.quiet_workers(["gone"])
    assert not queues.resume("mail")
    assert log.messages == []
