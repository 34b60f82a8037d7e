"""docs/operating.md: the command of each symptom finds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db.models.functions import Now
from django.utils import timezone

from django_mq.handlers import isolated
from django_mq.models import FailedAttempt, MinuteFigures, QueuedMessage
from tests.docs.pages import DOCS
from tests.rows import add, beat, decide

SECTION = (DOCS / "operating.md").read_text().partition("\n## Something is wrong\n")[2]
#: The commands by symptom.
ROWS = dict(
    re.findall(r"^\| (.+?) \| `manage\.py (.+?)`.*? \| .+ \|$", SECTION.split("\n## ")[0], re.M)
)
#: Its log says it, see `test_an_inbox_waits` of the relays; it runs until it is stopped.
INBOX = "an inbox delivers nothing"
#: This needs a lock of another session, see tests/queues/doctor/test_locks.py.
LOCKED = "nothing runs, and the admin says that the database is busy"


def waits() -> QueuedMessage:
    return add(handler="app.slow", after=-3 * 3600)


def failed() -> None:
    FailedAttempt.objects.create(
        message_id=7, queue="mail", type="t", handler="app.slow", attempt=1, error_class="KeyError"
    )


def killed() -> None:
    FailedAttempt.objects.create(
        message_id=7,
        queue="mail",
        type="t",
        attempt=1,
        error_class="django_mq.policy.outcomes.WorkerLost",
        error_text="process 4711 was killed by SIGKILL",
    )


def ran_twice() -> QueuedMessage:
    message = add()
    FailedAttempt.objects.create(
        message_id=message.pk, queue="mail", type="t", attempt=1, error_class="WorkerLost"
    )
    id = message.pk
    message.delete()
    return QueuedMessage(pk=id)


def idle() -> None:
    hour = timezone.now() - timedelta(hours=1)
    beat(started_at=hour, threads=2, threads_used=0.0)
    waits()


def hangs() -> QueuedMessage:
    message = add(handler="app.slow", leased=60)
    beat(running=[message.pk], ran={str(message.pk): 95.0})
    return message


def blocked() -> QueuedMessage:
    first = add(key="k", dead=-5)
    add(key="k", blocked_by=first.pk)
    return first


def unserved() -> None:
    beat(queues=["other"])
    waits()


def paused() -> None:
    decide(paused=-4 * 3600)
    waits()


def backing_off() -> None:
    decide(backoff=60, backoff_level=4)
    waits()


def held() -> None:
    add(held=-9, type="shop.unknown")


def gone() -> None:
    beat("a7c1585c00000000", seen=-95)


def snoozes() -> None:
    MinuteFigures.objects.create(
        minute=Now(), worker="w", queue="mail", handler="events", ran={"40": 12}
    )


#: How each symptom comes about, and what the command then says; {id} is the id of the message.
SYMPTOMS: dict[str, tuple[Callable[[], QueuedMessage | None], str]] = {
    "a handler fails": (failed, r"KeyError"),
    "a handler hangs": (hangs, r"{id}  1 min \d+ s .* app\.slow"),
    "one message does not run": (waits, r"no live worker serves its queue"),
    "messages wait behind another": (blocked, r"{id} .* k .* dead"),
    "a queue is slow": (backing_off, r"mail +backs off until .*, level 4"),
    "nobody serves a queue": (unserved, r"D013 .* no live worker serves"),
    "a pause is forgotten": (paused, r"D027 .* mail has been paused since"),
    "messages of unknown types are held": (held, r"D014 .* of type shop\.unknown is held"),
    "a worker is alive, but claims nothing": (idle, r"D032 .* although worker"),
    "worker processes die again and again": (killed, r"WorkerLost.*killed by SIGKILL"),
    "a message seems lost, or ran twice": (ran_twice, r"{id} is not stored.* last failed attempt"),
    "a worker is gone": (gone, r"a7c1585c .* gone"),
    "a broker is away": (snoozes, r"D026 .* events in the queue mail acked nothing"),
}


def test_each_symptom_has_a_test() -> None:
    assert set(ROWS) == {*SYMPTOMS, INBOX, LOCKED}
    assert (ROWS[INBOX], ROWS[LOCKED]) == ("mq_consume NAME", "mq_doctor")


@pytest.mark.django_db
@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_its_command_finds_it(symptom: str) -> None:
    provoke, text = SYMPTOMS[symptom]
    command = ROWS[symptom]
    before = _output(command.replace("ID", "1").split())
    message = provoke()
    id = str(message.pk if message else "")
    found = re.compile(text.replace("{id}", id), re.DOTALL)
    assert not found.search(before)
    assert found.search(_output(command.replace("ID", id).split()))


def _output(arguments: list[str]) -> str:
    out = StringIO()
    with isolated(), suppress(SystemExit):  # with which mq_doctor ends if it finds something
        call_command(*arguments, stdout=out, no_color=True)
    return out.getvalue()
