"""Findings about due messages that no worker claims: D028, D032 and D035."""

from __future__ import annotations

import re
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_mq.conf.local_time import local_text
from django_mq.models import QueuedMessage, WorkerHeartbeat
from django_mq.queues.doctor import capacity, examine
from tests.queues.doctor.examined import found
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def test_d028_busy_workers() -> None:
    """More room would start the message: it waits for nothing else."""
    due = {"after": -3600}
    busy = {"threads": 4, "threads_used": 4.0, "slots": 10, "slots_used": 0.0}
    beat("a", queues=["mail", "short", "full", "off", "slow", "quick"], **busy)
    beat("b", queues=["quick"], **{**busy, "threads_used": 3.5})
    beat("quiet", queues=["mail"], quiet=True)
    beat("gone", queues=["mail"], seen=-60)
    add("short", after=-200)
    decide("off", paused=-5)
    decide("slow", backoff=60, backoff_level=5)
    decide("full", max_in_flight=1)
    add("full", leased=60)
    for queue in ("full", "off", "slow", "quick", "unserved"):
        add(queue, **due)
    assert found("D028") == []
    add("mail", **due)
    (finding,) = [each for each in examine() if each.id == "D028"]
    assert (finding.level, finding.text) == (
        "warning",
        "A message in the queue mail has been due for 1 h, and the worker that serves it is"
        " 100% busy.",
    )
    beat("c", queues=["mail"], **{**busy, "slots_used": 9.2, "threads_used": 0.0})
    (text,) = found("D028")
    assert "1 h, and all 2 workers that serve it are at least 92% busy." in text
    assert "or give each more threads: " in text
    call_command(*re.findall(r"mq_workers", text), stdout=StringIO())
    WorkerHeartbeat.objects.filter(pk="a").update(threads_used=1.0, slots_used=10.0)
    assert "or give each more slots (ASYNC_SLOTS): " in found("D028")[0]
    beat("unknown", queues=["mail"])
    assert found("D028") == []


@pytest.mark.parametrize("running", [False, True])
def test_d028_an_ordered_queue_is_not_faster_with_more_threads(
    settings: Any, running: bool
) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
    beat(threads=1, threads_used=1.0)
    if running:
        add("line", ordered=True, leased=60)
    add("line", ordered=True, after=-3600)
    assert len(found("D028")) == (not running)


def test_d032_a_worker_with_room_claims_nothing(settings: Any) -> None:
    """It lacks a right, or a session has locked the rows: its log says so, nothing else did."""
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}, "full": {"max_in_flight": 1}}}
    hour = timezone.now() - timedelta(hours=1)
    beat("young", threads=2, threads_used=0.0)
    beat("working", queues=["mail"], started_at=hour, threads=2, threads_used=1.0)
    beat("new", queues=["mail"], started_at=hour)
    # A suspect runs alone, or the last handler before max_messages: that takes one thread of 8.
    beat("alone", running=[1], started_at=hour, threads=8, threads_used=1.0)
    add("mail", after=-3600)
    assert found("D032") == []
    beat("idle", started_at=hour, host="h", pid=7, threads=2, threads_used=0.1)
    (finding,) = [each for each in examine() if each.id == "D032"]
    assert (finding.level, finding.text) == (
        "warning",
        "A message in the queue mail has been due for 1 h, and none of the queue is in flight,"
        " although worker idle (host h, process 7) serves it and is 5% busy.",
    )
    assert "manage.py mq_why ID" in finding.hint
    assert "loop_blocked" in finding.hint
    options = settings.DJANGO_MQ
    settings.DJANGO_MQ = {**options, "POLL_INTERVAL": 1900.0}
    assert found("D032") == []  # a worker may sleep for that long
    settings.DJANGO_MQ = options
    add("mail", leased=60)
    for queue in ("off", "slow", "full"):
        add(queue, after=-3600)
    decide("off", paused=-1)
    decide("slow", backoff=60, backoff_level=1)
    add("full", leased=60)
    add("line", ordered=True, after=-3600)  # behind a head that is retried
    add("recent", after=-60)
    assert found("D032") == []


def test_d032_looks_again_before_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose queue was resumed just now has been due for long, and is claimed next."""
    beat(started_at=timezone.now() - timedelta(hours=1), threads=2, threads_used=0.0)
    claimed, stays = add("resumed", after=-3600), add("mail", after=-3600)

    def claim(seconds: float) -> None:
        QueuedMessage.objects.filter(pk=claimed.pk).delete()

    monkeypatch.setattr(capacity, "sleep", claim)
    (text,) = found("D032")
    assert f"queue {stays.queue} has been due" in text


def test_d035_messages_of_a_lost_host_take_up_the_limit(settings: Any) -> None:
    """Their handlers had extended their leases, which nobody can shorten."""
    settings.DJANGO_MQ = {"QUEUES": {name: {"max_in_flight": 2} for name in ("mail", "idle")}}
    beat("alive")
    beat("gone", seen=-60)
    lease = {"claimed_by": "gone:1"}
    for queue in ("mail", "idle", "free"):
        add(queue, leased=30, claimed_by="alive:1")
        add(queue, leased=30, claimed_by="alive:2")
    add("idle", leased=600, **lease)
    add("free", leased=600, **lease)
    add("mail")
    add("free")
    assert found("D035") == []
    lost = add("mail", leased=600, **lease)
    (finding,) = [each for each in examine() if each.id == "D035"]
    assert (finding.level, finding.text) == (
        "warning",
        "Messages wait because the queue mail has reached its limit of messages in flight, 2."
        f" 1 of them is held by a worker that is gone, until {local_text(lost.leased_until)}.",
    )
    (command,) = re.findall(r"mq_limit mail", finding.hint)
    call_command(*command.split(), "4", stdout=StringIO())
    assert found("D035") == []
