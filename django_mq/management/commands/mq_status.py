"""`mq_status`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, span, table
from django_mq.queues.obstacles import shown

COUNTED = ("depth", "processable", "in_flight", "delayed", "retrying", "held", "blocked", "dead")


class Command(OperatorCommand):
    help = "Show queues, workers, and who keeps the database from clearing up."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true")

    def operate(self, *, database: str | None, **options: Any) -> None:
        counted = queues.counts(using=database)
        workers = queues.workers(using=database)
        holders = queues.horizon(using=database)
        if options["json"]:
            found = {"queues": list(counted.values()), "workers": workers, "horizon": holders}
            self.stdout.write(as_json(found))
            return
        headers = ("queue", "state", *(name.replace("_", " ") for name in COUNTED), "oldest")
        rows = [
            (each.queue, _state(each), *map(each.shown, COUNTED), span(each.oldest))
            for each in counted.values()
        ]
        self.stdout.write(table(headers, rows) + "\n")
        headers = ("worker", "host", "pid", "state", "queues", "running", "woken by", "last seen")
        self.stdout.write(
            table(headers, map(_worker, workers)) if workers else "No worker has been heard of."
        )
        if holders:
            self.stdout.write("\nThese hold old rows back from vacuum, so claims become slower:")
            headers = ("what", "which", "login", "application", "state", "since")
            self.stdout.write(table(headers, map(_holder, holders)))


def _state(queue: queues.QueueCounts) -> str:
    if queue.paused:
        return f"paused until {shown(queue.paused_until)}" if queue.paused_until else "paused"
    if queue.backoff_until:
        return f"backs off until {shown(queue.backoff_until)}"
    if queue.processable:
        return "processable"
    return "waiting" if queue.depth else "empty"


def _worker(worker: queues.Worker) -> tuple[object, ...]:
    state = "gone" if not worker.alive else "draining" if worker.draining else "alive"
    return (
        worker.id[:8],
        worker.host,
        worker.pid,
        state,
        " ".join(worker.queues) or "all",
        len(worker.running),
        worker.wakeup,
        f"{span(worker.silent)} ago",
    )


def _holder(holder: queues.HorizonHolder) -> tuple[object, ...]:
    known = (holder.login or "-", holder.application or "-", holder.state or "-")
    return (holder.kind, holder.name, *known, shown(holder.since))
