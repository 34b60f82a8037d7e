"""`mq_status`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, heads_table, span, table
from django_mq.policy.histogram import Durations, brief
from django_mq.queues.obstacles import shown

#: Blocking messages shown; mq_peek --heads shows more.
MOST_HEADS = 10
COUNTED_OF_HANDLERS = ("acked", "failed", "retried", "dead")
COUNTED = ("depth", "processable", "in_flight", "delayed", "retrying", "held", "blocked", "dead")


class Command(OperatorCommand):
    help = "Show queues, workers, handlers, and sessions that keep vacuum from removing dead rows."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true")

    def operate(self, *, database: str | None, **options: Any) -> None:
        counted = queues.counts(using=database)
        workers = queues.workers(using=database)
        timings = queues.timings(using=database).values()
        heads = queues.heads(limit=MOST_HEADS + 1, using=database)
        holders = queues.horizon(using=database)
        if options["json"]:
            found = {"queues": list(counted.values()), "workers": workers, "horizon": holders}
            found |= {"handlers": list(timings), "heads": heads[:MOST_HEADS]}
            self.stdout.write(as_json(found))
            return
        headers = ("queue", "state", *(name.replace("_", " ") for name in COUNTED), "oldest")
        rows = [
            (each.queue, _label(each), *(_count(each, name) for name in COUNTED), span(each.oldest))
            for each in counted.values()
        ]
        self.stdout.write(table(headers, rows) + "\n")
        if heads:
            self.stdout.write("Others wait behind these, the first of their keys or queues:")
            self.stdout.write(heads_table(heads[:MOST_HEADS]))
            more = "There are more: see mq_peek --heads. " if len(heads) > MOST_HEADS else ""
            self.stdout.write(
                f"{more}mq_why ID explains one; mq_requeue --id or mq_purge --id ends the wait"
                " behind a dead one.\n"
            )
        headers = ("worker", "host", "pid", "state", "queues", "running", "woken by", "last seen")
        self.stdout.write(
            table(headers, map(_worker, workers))
            if workers
            else "No worker is known: start one with manage.py mq_worker."
        )
        if timings:
            headers = ("handler", *COUNTED_OF_HANDLERS, "waited p50", "p99", "ran p50", "p99")
            self.stdout.write("\n" + table(headers, map(_handler, timings)))
        if holders:
            self.stdout.write("\nThese keep vacuum from removing dead rows, which slows claims:")
            headers = ("what", "which", "login", "application", "state", "since")
            self.stdout.write(table(headers, map(_holder, holders)))


def _label(queue: queues.QueueCounts) -> str:
    ordered = ", ordered" if queue.ordered else ""
    owner = f", owned by {queue.owner[:8]}" if queue.owner else ""
    return f"{_state(queue)}{ordered}{owner}"


def _state(queue: queues.QueueCounts) -> str:
    if queue.paused:
        return f"paused until {shown(queue.paused_until)}" if queue.paused_until else "paused"
    if queue.backoff_level:
        now = f"until {shown(queue.backoff_until)}" if queue.backoff_until else "and probes"
        return f"backs off {now}, level {queue.backoff_level}"
    if queue.max_in_flight == 0:
        return "held back by its limit"
    if queue.ordered and queue.head is not None:
        return f"waits for message {queue.head}"
    if queue.processable:
        return "processable"
    return "waiting" if queue.depth else "empty"


def _count(queue: queues.QueueCounts, name: str) -> str:
    limited = name == "in_flight" and queue.max_in_flight is not None
    return f"{queue.shown(name)}/{queue.max_in_flight:,}" if limited else queue.shown(name)


def _worker(worker: queues.WorkerProcess) -> tuple[object, ...]:
    state = "gone" if not worker.alive else "draining" if worker.draining else "alive"
    if worker.unreadable:
        state += f", unreadable {' and '.join(worker.unreadable)}"
    return (
        worker.id[:8],
        worker.host,
        worker.pid,
        state,
        " ".join(worker.queues) or ("-" if "queues" in worker.unreadable else "all"),
        len(worker.running),
        worker.wakeup,
        f"{span(worker.silent)} ago",
    )


def _handler(handler: queues.HandlerTimings) -> tuple[object, ...]:
    counts = (f"{getattr(handler, name):,}" for name in COUNTED_OF_HANDLERS)
    return (handler.handler or "-", *counts, *_spread(handler.waited), *_spread(handler.ran))


def _spread(durations: Durations | None) -> tuple[str, str]:
    return (brief(durations.p50), brief(durations.p99)) if durations else ("-", "-")


def _holder(holder: queues.HorizonHolder) -> tuple[object, ...]:
    known = (holder.login or "-", holder.application or "-", holder.state or "-")
    return (holder.kind, holder.name, *known, shown(holder.since))
