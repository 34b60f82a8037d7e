"""Findings about queues and handlers that make no progress: D025 to D027."""

from __future__ import annotations

import re
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_mq.conf.local_time import local_text
from django_mq.models import (
    MinuteFigures,
)
from django_mq.queues.doctor import examine
from tests.queues.doctor.examined import found
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def test_d025_a_queue_that_backs_off() -> None:
    beat()
    state = decide(backoff=60, backoff_level=5)
    decide("empty", backoff=60, backoff_level=5)
    decide("paused", backoff=60, backoff_level=5, paused=-1)
    add("paused")
    add(dead=-5)
    assert found("D025") == []  # only an ack lowers the level, so that of an empty queue stays
    add()
    add(after=60)
    (finding,) = [each for each in examine() if each.id == "D025"]
    until = local_text(state.backoff_until)
    assert finding.level == "warning"
    assert finding.text == (
        f"The queue mail backs off until {until} (level 5), and 2 messages wait in it."
    )
    commands = re.findall(r"mq_errors \S+ \S+|mq_resume \S+ --backoff", finding.hint)
    assert [command.split()[0] for command in commands] == ["mq_errors", "mq_resume"]
    assert "mq_why ID" in finding.hint
    for command in commands:
        call_command(*command.split(), stdout=StringIO())
    assert found("D025") == []


def test_d025_one_that_probes() -> None:
    beat()
    decide(backoff=-1, backoff_level=2)
    add()
    (text,) = found("D025")
    assert text.startswith(
        "The queue mail backs off and probes (level 2), and 1 message waits in it."
    )


def test_d026_a_handler_that_acks_nothing() -> None:
    """The figures of snoozes are only the times that the handler ran."""
    figures_of("relay", ran={"40": 8})
    figures_of("relay", ago=5, worker="v", ran={"40": 1, "67": 2})
    figures_of("relay", ago=30, ran={"40": 900})
    assert found("D026") == []
    figures_of("relay", ago=2, failed=1, retried=1, ran={"40": 1})
    (finding,) = [each for each in examine() if each.id == "D026"]
    assert (finding.level, finding.text) == (
        "warning",
        "The handler relay in the queue mail acked nothing in the last 10 minutes: 12 attempts"
        " failed or were snoozed.",
    )
    command = re.findall(r"mq_errors \S+ \S+", finding.hint)[0]
    call_command(*command.split(), stdout=StringIO())
    figures_of("relay", ago=3, acked=1)
    assert found("D026") == []


def test_d026_attempts_that_left_no_time() -> None:
    """A killed worker's attempts fail, and nobody knows how long they ran."""
    figures_of("h", failed=200, dead=200)
    figures_of("", failed=200, dead=200)  # without a handler known here: D014 reports it
    (text,) = found("D026")
    assert text.startswith("The handler h in the queue mail acked nothing")
    assert "200 attempts failed" in text


def test_d027_a_forgotten_pause() -> None:
    beat()
    state = decide(paused=-4 * 3600)
    decide("empty", paused=-4 * 3600)
    decide("resumed", paused=-4 * 3600, until=-60)
    add("resumed", after=-3 * 3600)
    add("running", after=-3 * 3600)
    add(after=-3500)
    add(after=60)
    add(after=-3 * 3600, held=-60)
    add(after=-3 * 3600, leased=60)
    add(after=-3 * 3600, dead=-60)
    assert found("D027") == []
    add(after=-3 * 3600)
    (finding,) = [each for each in examine() if each.id == "D027"]
    assert (finding.level, finding.text) == (
        "warning",
        f"The queue mail has been paused since {local_text(state.paused_at)}, and its oldest"
        " message has been due for 3 h.",
    )
    (command,) = re.findall(r"mq_resume \w+", finding.hint)
    call_command(*command.split(), stdout=StringIO())
    assert found("D027") == []


def test_d027_a_pause_with_an_end() -> None:
    state = decide(paused=-4 * 3600, until=86_400)
    add(after=-2 * 86_400)
    (text,) = found("D027")
    assert f", until {local_text(state.paused_until)}, and its oldest message" in text
    assert "has been due for 2 d." in text


def figures_of(handler: str, ago: int = 0, worker: str = "w", **given: Any) -> None:
    """Store the figures of a minute, `ago` minutes before this one."""
    at = timezone.now().replace(second=0, microsecond=0) - timedelta(minutes=ago)
    MinuteFigures.objects.create(minute=at, worker=worker, queue="mail", handler=handler, **given)
