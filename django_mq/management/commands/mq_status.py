"""`mq_status`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import sleep
from typing import Any

from django.core.management.base import CommandParser
from django.db import OperationalError
from django.utils.timezone import now
from psycopg.errors import LockNotAvailable

from django_mq import handlers, queues
from django_mq.conf import alias_of, command_on, get_settings
from django_mq.conf.local_time import local_text
from django_mq.management.arguments import interval, wrong_arguments
from django_mq.management.base import OperatorCommand, add_queue
from django_mq.management.databases import refusal
from django_mq.management.output import as_json, heads_table, span, table, workers_table
from django_mq.management.screen import CLEAR, Section, all_lines, erased, fitted, size_of
from django_mq.management.serving import unserved_warning
from django_mq.policy.durations import precise_span
from django_mq.policy.histogram import Durations
from django_mq.queues.doctor import Finding
from django_mq.queues.doctor.links import pooler
from django_mq.queues.known_queues import unknown_queue_warning
from django_mq.store.server_errors import LOST

HOLDERS = "These keep vacuum from removing dead rows:"
HOLDER_HEADERS = ("what", "which", "login", "application", "state", "since")
#: The maximum number of blocking messages shown; mq_peek --heads shows more.
MAX_HEADS = 10
#: Some dead letters have no failed attempt: they expired, or were held for too long.
FAILED = "Messages are dead or retried: {} groups failed attempts, {} lists dead letters."
COUNTED_OF_HANDLERS = ("acked", "failed", "retried", "snoozed", "dead")
COUNTED = ("depth", "processable", "in_flight", "delayed", "retrying", "held", "blocked", "dead")


class Command(OperatorCommand):
    help = "Show queues, workers, handlers, and sessions that keep vacuum from removing dead rows."
    role = "mq_monitor"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue(parser)
        parser.add_argument(
            "--watch",
            nargs="?",
            const=2.0,
            type=interval,
            metavar="SECONDS",
            help="refresh the output, every 2 s by default, until Ctrl-C",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        if options["watch"] is None:
            self._show(options["queue"], database, as_data=options["json"])
            return
        if options["json"]:
            raise wrong_arguments("--watch cannot be combined with --json")
        with suppress(KeyboardInterrupt):
            self._watch(options["queue"], database, is_first=True)
            while True:
                sleep(options["watch"])
                self._watch(options["queue"], database)

    def _watch(self, queue: str | None, database: str | None, *, is_first: bool = False) -> None:
        try:
            sections = _watched(queue, database)
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            refused = refusal(error, alias_of(database), self.role)  # the next look may succeed
            sections = [Section([f"Note: {refused}"], rank=0)]
        moment, size = local_text(now()), size_of(self.stdout)
        if size is None:
            clear, text = CLEAR, f"{moment}\n{all_lines(sections)}\n\n"
        else:
            clear, text = CLEAR if is_first else erased(size), fitted(moment, sections, size)
        self.stdout.write(f"{clear if self.stdout.isatty() else ''}{text}")
        self.stdout.flush()

    def _show(self, queue: str | None, database: str | None, *, as_data: bool) -> None:
        found = _read(queue, database)
        self.warn_of_unknown(queue=queue, database=database)
        if as_data:
            self.stdout.write(as_json(_data(found)))
        else:
            self.stdout.write(all_lines(_sections(found)))


@dataclass(frozen=True, slots=True)
class Status:
    """One look: what the command shows of one `queue`, or of all queues, of `alias`."""

    alias: str
    queue: str | None
    counted: Sequence[queues.QueueCounts]
    heads: Sequence[queues.Head]
    workers: Sequence[queues.WorkerProcess]
    timings: Sequence[queues.HandlerTimings]
    holders: Sequence[queues.HorizonHolder]
    pooled: Sequence[Finding]

    @property
    def unserved(self) -> list[str]:
        """The queues with waiting messages that no live worker claims from, unless paused."""
        claiming = [each for each in self.workers if each.claims]
        return [
            each.queue
            for each in self.counted
            if each.depth and not each.paused and not any(w.serves(each.queue) for w in claiming)
        ]


def _read(queue: str | None, database: str | None) -> Status:
    if queue is None:
        counted = list(queues.counts(using=database).values())
    else:
        counted = [queues.counts(queue, using=database)]
    workers = queues.workers(using=database)
    return Status(
        alias_of(database),
        queue,
        counted,
        queues.heads(queue, limit=MAX_HEADS + 1, using=database),
        [each for each in workers if queue is None or each.serves(queue)],
        _timings(queue, database),
        queues.horizon(using=database),
        _pooled(alias_of(database)),
    )


def _watched(queue: str | None, database: str | None) -> list[Section]:
    sections = _sections(_read(queue, database))
    if queue is not None and (
        warning := unknown_queue_warning(queue, queues.names(using=database))
    ):
        sections.insert(0, Section([f"Note: {warning}"], rank=0))
    return sections


def _data(found: Status) -> dict[str, Any]:
    """Return the JSON form, with everything that the text has."""
    unserved = [unserved_warning(found.unserved)] if found.unserved else []
    return {
        "queues": [
            {
                **asdict(each),
                "label": _label(each),
                "depth": each.depth,
                "in_flight": each.in_flight,
            }
            for each in found.counted
        ],
        "workers": found.workers,
        "horizon": found.holders,
        "handlers": found.timings,
        "heads": found.heads[:MAX_HEADS],
        "more_heads": len(found.heads) > MAX_HEADS,
        "warnings": unserved + [_pooled_text(each) for each in found.pooled],
    }


def _sections(found: Status) -> list[Section]:
    sections = [_queues(found.counted)]
    if found.heads:
        sections.append(_heads(found.heads))
    if found.workers:
        sections.append(Section.of_table(workers_table(found.workers), name="worker"))
    else:
        none = "No worker is known" if found.queue is None else f"No worker serves {found.queue}"
        sections.append(Section([f"{none}: start one with manage.py mq_worker."]))
    if found.unserved and found.workers:
        sections.append(Section([unserved_warning(found.unserved)], rank=0))
    if any(each.dead or each.retrying for each in found.counted):
        hints = (command_on(found.alias, each) for each in ("mq_errors", "mq_peek --dead"))
        sections.append(Section([FAILED.format(*hints)]))
    if timings := [each for each in found.timings if each.handler or any(_counts(each))]:
        headers = ("handler", *COUNTED_OF_HANDLERS, "waited p50", "p99", "ran p50", "p99")
        rows = table(headers, map(_handler, timings))
        sections.append(Section.of_table(rows, name="handler", rank=2))
    if found.holders:
        holders = table(HOLDER_HEADERS, map(_holder, found.holders))
        sections.append(Section.of_table(holders, title=HOLDERS, name="session"))
    return sections + [Section([_pooled_text(each)]) for each in found.pooled]


def _pooled_text(finding: Finding) -> str:
    return f"{finding.text} {finding.hint}"


def _queues(counted: Sequence[queues.QueueCounts]) -> Section:
    headers = ("queue", "state", *(name.replace("_", " ") for name in COUNTED), "oldest")
    rows = (
        (each.queue, _label(each), *(_count(each, name) for name in COUNTED), span(each.oldest))
        for each in counted
    )
    return Section.of_table(
        table(headers, rows), name="queue", rank=0, urgency=lambda n: _urgency(counted[n])
    )


def _urgency(queue: queues.QueueCounts) -> tuple[bool, bool, timedelta, str]:
    """Return the sort key of queues: first those that stand still, by their oldest due message."""
    stopped = queue.dead_head is not None or queue.held or queue.backoff_level or queue.paused
    waits = queue.blocked or (queue.ordered and queue.head is not None)
    has_any = queue.depth or queue.dead
    return (not has_any, not (stopped or waits), -(queue.oldest or timedelta()), queue.queue)


def _heads(heads: Sequence[queues.Head]) -> Section:
    more = "There are more: see mq_peek --heads. " if len(heads) > MAX_HEADS else ""
    note = (
        f"{more}mq_why ID explains one; mq_requeue --id or mq_purge --id ends the wait behind a"
        " dead one."
    )
    title = "Others wait behind these, the first of their keys or queues:"
    return Section.of_table(heads_table(heads[:MAX_HEADS]), title=title, note=note, name="head")


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
        return f"paused until {local_text(queue.paused_until)}" if queue.paused_until else "paused"
    if queue.backoff_level:
        now = f"until {local_text(queue.backoff_until)}" if queue.backoff_until else "and probes"
        return f"backs off {now}, level {queue.backoff_level}"
    if queue.max_in_flight == 0:
        return "held back by its limit"
    if queue.ordered and queue.head is not None:
        return f"waits for message {queue.head}"
    if queue.processable:
        return "processable"
    if queue.in_flight:
        return "in flight"
    if queue.depth and queue.blocked == queue.depth:
        return f"behind dead message {queue.dead_head}" if queue.dead_head else "blocked"
    if queue.held:
        return "held" if queue.held == queue.depth else "waiting, partly held"
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
    return (precise_span(durations.p50), precise_span(durations.p99)) if durations else ("-", "-")


def _holder(holder: queues.HorizonHolder) -> tuple[object, ...]:
    known = (holder.login or "-", holder.application or "-", holder.state or "-")
    return (holder.kind, holder.name, *known, local_text(holder.since))
