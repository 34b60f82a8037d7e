"""`mq_status`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import sleep
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.timezone import now

from django_mq import handlers, queues
from django_mq.conf import alias_of, get_settings
from django_mq.executor.connections import LOST
from django_mq.management.arguments import duration
from django_mq.management.base import OperatorCommand, add_queue
from django_mq.management.output import as_json, heads_table, span, table, workers_table
from django_mq.policy.durations import measured
from django_mq.policy.histogram import Durations
from django_mq.queues.doctor import Finding
from django_mq.queues.doctor.links import pooler
from django_mq.queues.obstacles import shown

#: Moves the cursor home and clears the terminal.
CLEAR = "\x1b[H\x1b[2J"

#: The least number of seconds between two looks.
LEAST = 0.1
#: The maximum number of blocking messages shown; mq_peek --heads shows more.
MOST_HEADS = 10
COUNTED_OF_HANDLERS = ("acked", "failed", "retried", "dead")
COUNTED = ("depth", "processable", "in_flight", "delayed", "retrying", "held", "blocked", "dead")


class Command(OperatorCommand):
    help = "Show queues, workers, handlers, and sessions that keep vacuum from removing dead rows."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue(parser)
        parser.add_argument(
            "--watch",
            nargs="?",
            const=2.0,
            type=_interval,
            metavar="SECONDS",
            help="refresh the output, every 2 s by default, until Ctrl-C",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        if options["watch"] is None:
            self._show(options["queue"], database, as_data=options["json"])
            return
        if options["json"]:
            raise CommandError("--watch cannot be combined with --json")
        try:
            while True:
                self.stdout.write(f"{CLEAR if self.stdout.isatty() else ''}{shown(now())}\n")
                self._show(options["queue"], database, as_data=False)
                self.stdout.flush()
                sleep(options["watch"])
        except KeyboardInterrupt:
            return

    def _show(self, queue: str | None, database: str | None, *, as_data: bool) -> None:
        if queue is None:
            counted = queues.counts(using=database)
        else:
            counted = {queue: queues.counts(queue, using=database)}
            self.warn_of_unknown(queue, database)
        workers = [
            each for each in queues.workers(using=database) if queue is None or each.serves(queue)
        ]
        timings = _timings(queue, database)
        heads = queues.heads(queue, limit=MOST_HEADS + 1, using=database)
        holders = queues.horizon(using=database)
        pooled = _pooled(alias_of(database))
        if as_data:
            found = {"queues": list(counted.values()), "workers": workers, "horizon": holders}
            found |= {"handlers": timings, "heads": heads[:MOST_HEADS]}
            self.stdout.write(as_json({**found, "warnings": [each.text for each in pooled]}))
            return
        self._show_queues(counted.values(), heads)
        self._show_workers(queue, workers, timings)
        if holders:
            self.stdout.write(
                "\nThese keep vacuum from removing dead rows, which slows down claims:"
            )
            headers = ("what", "which", "login", "application", "state", "since")
            self.stdout.write(table(headers, map(_holder, holders)))
        for each in pooled:
            self.stdout.write(f"\n{each.text} {each.hint}")

    def _show_queues(
        self, counted: Iterable[queues.QueueCounts], heads: Sequence[queues.Head]
    ) -> None:
        headers = ("queue", "state", *(name.replace("_", " ") for name in COUNTED), "oldest")
        rows = [
            (each.queue, _label(each), *(_count(each, name) for name in COUNTED), span(each.oldest))
            for each in counted
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

    def _show_workers(
        self,
        queue: str | None,
        workers: Sequence[queues.WorkerProcess],
        timings: Sequence[queues.HandlerTimings],
    ) -> None:
        none = "No worker is known" if queue is None else f"No worker serves {queue}"
        text = f"{none}: start one with manage.py mq_worker."
        self.stdout.write(workers_table(workers) if workers else text)
        timings = [each for each in timings if each.handler or any(_counts(each))]
        if timings:
            headers = ("handler", *COUNTED_OF_HANDLERS, "waited p50", "p99", "ran p50", "p99")
            self.stdout.write("\n" + table(headers, map(_handler, timings)))


def _interval(text: str) -> float:
    """Read the seconds between two looks; without a pause the command would be a load."""
    found = duration(text)
    if found < LEAST:
        raise ArgumentTypeError(f"{text!r} is too short: at least {LEAST:g} seconds")
    return found


def _pooled(alias: str) -> list[Finding]:
    """Return the findings about a pooler's settings; none if no session can be opened."""
    with suppress(*LOST):
        return list(pooler(alias))
    return []


def _timings(queue: str | None, database: str | None) -> list[queues.HandlerTimings]:
    """Return the timings of all handlers, or of those that may have messages of `queue`."""
    found = queues.timings(using=database)
    if queue is None:
        return list(found.values())
    settings = get_settings()
    return [
        found[each.name]
        for each in handlers.all_handlers()
        if each.name in found and queue in handlers.allowed_queues(each, settings)
    ]


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


def _counts(handler: queues.HandlerTimings) -> list[int]:
    return [getattr(handler, name) for name in COUNTED_OF_HANDLERS]


def _handler(handler: queues.HandlerTimings) -> tuple[object, ...]:
    counts = (f"{count:,}" for count in _counts(handler))
    return (handler.handler or "-", *counts, *_spread(handler.waited), *_spread(handler.ran))


def _spread(durations: Durations | None) -> tuple[str, str]:
    return (measured(durations.p50), measured(durations.p99)) if durations else ("-", "-")


def _holder(holder: queues.HorizonHolder) -> tuple[object, ...]:
    known = (holder.login or "-", holder.application or "-", holder.state or "-")
    return (holder.kind, holder.name, *known, shown(holder.since))
