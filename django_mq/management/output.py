"""Tables and JSON for the commands, safe for a terminal regardless of the rows' content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, timedelta
from typing import Any

from django_mq.conf.local_time import local_text
from django_mq.management.screen import width_of
from django_mq.policy import durations
from django_mq.policy.plain_text import one_line
from django_mq.queues import Head, RunningMessage, WorkerProcess

#: Table cells are cut to this width; names have at most 128 characters.
MAX_CELL_WIDTH = 200
#: The headers of columns of counts and ids, which stand on the right. If the values decided that, a
#: column would change sides while it has only dashes.
NUMBERS = {
    "id", "message", "first", "pid", "version", "attempt", "attempts", "behind", "count",
    "newest messages", "depth", "processable", "in flight", "delayed", "retrying", "held",
    "blocked", "dead", "waiting", "running", "busy", "acked", "failed", "retried", "snoozed",
}  # fmt: skip
WORKER_HEADERS = (
    "worker",
    "host",
    "pid",
    "state",
    "queues",
    "running",
    "busy",
    "wakeup",
    "uptime",
    "last seen",
)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows in columns under headers, `NUMBERS` on the right; control characters replaced.

    >>> print(table(("queue", "dead"), [("mail", 12), ("a\\x1b[2Jb", 3)]))
    QUEUE   DEAD
    mail      12
    a\ufffd[2Jb     3
    """
    cells = [[one_line(str(cell), MAX_CELL_WIDTH) for cell in row] for row in rows]
    right = [header in NUMBERS for header in headers]
    lines = [[header.upper() for header in headers], *cells]
    widths = [max(width_of(line[n]) for line in lines) for n in range(len(headers))]
    return "\n".join(
        "  ".join(
            _padded(cell, width, to_the_right)
            for cell, width, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _padded(cell: str, width: int, to_the_right: bool) -> str:
    blanks = " " * (width - width_of(cell))
    return blanks + cell if to_the_right else cell + blanks


def as_json(value: object) -> str:
    """Return `value` as ASCII JSON, which cannot control a terminal.

    Dataclasses become objects, datetimes ISO 8601, durations seconds.
    """
    return json.dumps(_plain(value), indent=2)


def span(duration: timedelta | None) -> str:
    """Return a duration in the form of the pages, `-` for None.

    >>> span(timedelta(seconds=93.7)), span(None)
    ('1 min 33 s', '-')
    """
    return "-" if duration is None else durations.span(duration)


def heads_table(heads: Iterable[Head]) -> str:
    """Return a table of the messages behind which others wait."""
    headers = ("first", "queue", "key", "handler", "type", "state", "attempts", "at", "behind")
    return table(
        headers,
        (
            (
                head.id,
                head.queue,
                head.key or "(the whole queue)",
                head.handler or "-",
                head.type,
                head.state,
                f"{head.attempts}/{head.max_attempts}",
                local_text(head.at),
                head.shown_behind,
            )
            for head in heads
        ),
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date):
        return value.isoformat()
    return value


def workers_table(workers: Iterable[WorkerProcess]) -> str:
    """Return a table of worker processes, each with the beginning of its id."""
    return table(WORKER_HEADERS, map(_worker, workers))


def running_table(messages: Iterable[RunningMessage]) -> str:
    """Return a table of running messages: the columns that may be long come last."""
    headers = ("worker", "message", "ran for", "attempt", "handler", "type")
    return table(
        headers,
        (
            (
                each.worker[:8],
                each.id,
                span(each.ran_for),
                each.attempt,
                each.handler or "-",
                each.type,
            )
            for each in messages
        ),
    )


def _queues(worker: WorkerProcess) -> str:
    """Return the readable names of its queues; a worker without --queue stores the pattern #."""
    return "all" if worker.queues in ((), ("#",)) else " ".join(worker.queues)


def _worker(worker: WorkerProcess) -> tuple[object, ...]:
    state = "gone" if not worker.alive else "draining" if worker.draining else "alive"
    if worker.alive and worker.quiet and not worker.draining:
        state = "quiet"
    if worker.unreadable:
        state += f", unreadable {' and '.join(worker.unreadable)}"
    return (
        worker.id[:8],
        worker.host,
        worker.pid,
        state,
        " ".join(worker.queues) or "-" if "queues" in worker.unreadable else _queues(worker),
        len(worker.running),
        worker.shown_busy or "-",
        worker.wakeup,
        span(worker.uptime),
        f"{span(worker.silent)} ago",
    )
