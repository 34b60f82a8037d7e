"""Old workers hold messages that only the new ones beside them understand, uncharged."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from django_mq.models import FailedAttempt, QueuedMessage, Schedule
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.rows import add

OLD, NEW = [
    {"ACCEPTANCE_IMPORT": f"tests.acceptance.app.{module}"} for module in ("older", "newer")
]
#: Messages that only new code can run, as new producers write them.
UNKNOWN: dict[str, dict[str, Any]] = {
    "no-handler": {"type": "acceptance.fresh", "handler": "fresh"},
    "no-subscriber": {"type": "acceptance.fresh", "handler": ""},
    "newer-version": {
        "type": "acceptance.versioned",
        "handler": "versioned",
        "schema_version": 2,
    },
}


def test_an_old_worker_beside_a_new_one(start: Callable[..., Worker], queue: Queue) -> None:
    """Guarantees 14, 18; both the old and the new worker handle all messages that they know."""
    for name, columns in UNKNOWN.items():
        add("work", payload={"name": name}, **columns)
    add("work", payload={"name": "v1"}, type="acceptance.versioned", handler="versioned")
    old = start("--processes", 1, **OLD)
    queue.send("write", "before")
    old.until(
        lambda: QueuedMessage.objects.exclude(held_since=None).count() == len(UNKNOWN),
        "what it does not know is held",
    )
    old.until(lambda: queue.done() == {"v1": 1, "before": 1}, "the rest is done")
    held = QueuedMessage.objects.values_list("attempts", "leased_until", "dead_at")
    assert list(held) == [(0, None, None)] * len(UNKNOWN)

    new = start("--processes", 1, **NEW)
    new.has_started(1)
    queue.send("write", *[f"beside{n}" for n in range(40)])

    def ask_again() -> bool:
        """Make the messages due for another look by the first of the two workers."""
        QueuedMessage.objects.filter(leased_until=None).update(processable_after=Now())
        return queue.empty()

    new.until(ask_again, "an empty queue")
    beside = [f"beside{n}" for n in range(40)]
    assert queue.done() == dict.fromkeys(["v1", "before", *UNKNOWN, *beside], 1)
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert {pid for name, _, pid in queue.effects() if name in UNKNOWN} == set(new.children())
    assert not FailedAttempt.objects.exists()
    for worker in (old, new):
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0


def test_a_replaced_process_of_an_old_worker_leaves_a_schedule_to_newer_code(
    start: Callable[..., Worker],
) -> None:
    """The worker that started last wins, and a process that is replaced is no start of a worker."""

    def is_declared(version: int) -> bool:
        recent = Schedule.objects.filter(declared_at__gt=Now() - timedelta(hours=1))
        return recent.filter(payload={"version": version}).exists()

    old = start("--processes", 1, **OLD)
    old.until(lambda: is_declared(1), "it stores its schedule")
    new = start("--processes", 1, **NEW)
    new.until(lambda: is_declared(2), "so does a newer one")
    Schedule.objects.update(declared_at=Now() - timedelta(hours=2))
    old.kill_child(0)
    old.until(lambda: is_declared(2), "the next process keeps it declared")
    assert not is_declared(1)
