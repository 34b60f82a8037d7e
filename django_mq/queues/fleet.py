"""The worker processes, their timings, and the snapshots that hold back vacuum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, FloatField, Func, Value
from django.db.models.functions import Now

from django_mq.conf import alias_of
from django_mq.conf.local_time import local_text
from django_mq.exceptions import InvalidName
from django_mq.models import WorkerHeartbeat
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.policy.handler_totals import HandlerTimings, HandlerTotals
from django_mq.policy.routing import Pattern
from django_mq.queues.arguments import seconds, whole_number
from django_mq.queues.transactions import reading
from django_mq.states import GONE_AFTER
from django_mq.store import oldest_snapshot
from django_mq.store.oldest_snapshot import HorizonHolder
from django_mq.values import short_repr

#: For how many seconds a worker has been silent. A number, because the driver reads intervals only
#: in the server's default IntervalStyle.
SILENT = Func(
    Value("epoch"), Now() - F("last_seen"), function="date_part", output_field=FloatField()
)
#: The share of its threads and slots below which a worker has room, and the uptime from which the
#: share says so.
IDLE, SETTLED_IN = 0.5, timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker process as of its last heartbeat, `silent` ago; not `alive` after 30 s of silence.

    `queues` holds names and patterns, and is empty for all queues; `running` holds message ids.
    `wakeup` is notify, poll, or degraded (LISTEN failed, so it polls). `unreadable` names the
    columns whose values no worker writes; those values are left out here. A `quiet` worker claims
    nothing, by order of an operator. Of its `threads` and `slots` (for messages of async handlers),
    `threads_used` and `slots_used` were in use on average since the heartbeat before.
    """

    id: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    running: tuple[int, ...]
    wakeup: str
    draining: bool
    started_at: datetime
    last_seen: datetime
    silent: timedelta
    alive: bool
    unreadable: tuple[str, ...] = ()
    quiet: bool = False
    threads: int | None = None
    threads_used: float | None = None
    slots: int | None = None
    slots_used: float | None = None

    @property
    def uptime(self) -> timedelta:
        """How long it has run; if it is gone, until its last heartbeat."""
        seen = self.last_seen - self.started_at
        return seen + self.silent if self.alive else seen

    @property
    def busy(self) -> float | None:
        """The share of its threads, or of its slots if that is more, that was in use; from 0 to 1.

        None if it is not known: the first heartbeat does not say, nor do older versions.
        """
        pairs = ((self.threads_used, self.threads), (self.slots_used, self.slots))
        shares = [used / count for used, count in pairs if used is not None and count]
        return min(1.0, max(shares)) if shares else None

    @property
    def shown_busy(self) -> str:
        """`busy` as text: `"87%"`; empty if it is not known."""
        return "" if self.busy is None else f"{self.busy:.0%}"

    @property
    def shown_name(self) -> str:
        """The beginning of its id, its host and its process as text."""
        return f"worker {self.id[:8]} (host {self.host}, process {self.pid})"

    @property
    def claims(self) -> bool:
        """Whether it takes messages: it is alive, and neither draining nor quiet."""
        return self.alive and not self.draining and not self.quiet

    @property
    def has_room(self) -> bool:
        """Whether it would have claimed by now what it can claim.

        Not while it runs anything: other messages wait for a suspect, and for the last of
        `--max-messages`, although threads are free.
        """
        idle = self.claims and not self.running and self.uptime >= SETTLED_IN
        return idle and self.busy is not None and self.busy < IDLE

    def serves(self, queue: str) -> bool:
        """Return whether this worker takes messages of `queue`."""
        all_queues = not self.queues and "queues" not in self.unreadable
        return all_queues or any(_matches(pattern, queue) for pattern in self.queues)


def workers(*, using: str | None = None) -> list[WorkerProcess]:
    """Return the worker processes, last seen first, including dead ones whose rows still exist."""
    beats = WorkerHeartbeat.objects.using(alias_of(using)).defer("timings")
    found = beats.annotate(silent=SILENT)
    return [
        _worker(beat, timedelta(seconds=beat.silent)) for beat in found.order_by("-last_seen", "pk")
    ]


def last_of(queue: str, found: Iterable[WorkerProcess]) -> str:
    """Name the worker of `queue` that vanished last, to follow a sentence; empty if none is known.

    It may be frozen, or its host may be out of reach: then another one is not what is missing.
    `found` is from `workers()`.
    """
    for each in found:
        if not each.alive and each.serves(queue):
            return (
                f" The last one was {each.shown_name}, whose last heartbeat came at"
                f" {local_text(each.last_seen)}."
            )
    return ""


def _worker(beat: WorkerHeartbeat, silent: timedelta) -> WorkerProcess:
    names = _readable(beat.queues, lambda value: isinstance(value, str))
    running = _readable(beat.running, lambda value: type(value) is int and abs(value) <= MAX_BIGINT)
    read = {"queues": (names, beat.queues), "running": (running, beat.running)}
    return WorkerProcess(
        id=beat.pk,
        host=beat.host,
        pid=beat.pid,
        version=beat.version,
        queues=names,
        running=running,
        wakeup=beat.wakeup,
        draining=beat.draining,
        started_at=beat.started_at,
        last_seen=beat.last_seen,
        silent=silent,
        alive=silent < GONE_AFTER,
        unreadable=tuple(name for name, (good, all) in read.items() if list(good) != all),
        quiet=beat.quiet,
        threads=beat.threads,
        threads_used=beat.threads_used,
        slots=beat.slots,
        slots_used=beat.slots_used,
    )


def _readable(value: object, is_good: Callable[[object], bool]) -> tuple[Any, ...]:
    """Return the valid elements of a list, since other programs write rows, too."""
    return tuple(filter(is_good, value)) if isinstance(value, list) else ()


def timings(*, worker: str | None = None, using: str | None = None) -> dict[str, HandlerTimings]:
    """Return counts and durations by handler name, over all live workers or for one `worker`.

    The numbers cover the time since each worker started, as of its last heartbeat, so they are up
    to 10 s old; numbers of a worker that has ended no longer count. The empty name stands for
    messages without a handler, or with a handler unknown to their worker.
    """
    if worker is not None and not (isinstance(worker, str) and worker and worker.isprintable()):
        raise ValueError(
            f"worker must be the id of a worker, as workers() has it, not {short_repr(worker)}"
        )
    beats = WorkerHeartbeat.objects.using(alias_of(using)).order_by("-last_seen", "pk")
    if worker is None:
        beats = beats.filter(last_seen__gt=Now() - GONE_AFTER)
    else:
        beats = beats.filter(pk=worker)
    return added_up(beats.values_list("timings", flat=True))


def added_up(columns: Iterable[object]) -> dict[str, HandlerTimings]:
    """Merge the `timings` columns of heartbeats, the latest first, into timings by handler.

    Skips values that no worker of this version writes, since other programs write rows, too.

    >>> added_up([{"mail": {"acked": "many"}}, None])
    {}
    """
    totals: dict[str, HandlerTotals] = {}
    for each in columns:
        for handler, written in each.items() if isinstance(each, Mapping) else ():
            try:
                total = HandlerTotals.from_json(written)
            except ValueError:
                continue
            if handler in totals:
                totals[handler].merge(total)
            else:
                totals[handler] = total
    return {name: totals[name].timings(name) for name in sorted(totals)}


def horizon(
    *, older_than: float | timedelta = 60.0, limit: int = 5, using: str | None = None
) -> list[HorizonHolder]:
    """Return the holders that have kept vacuum back for `older_than`, the oldest first.

    `older_than` is seconds or a timedelta; a holder is a snapshot, a transaction or a slot.

    Vacuum keeps every row that died after a snapshot was taken, or after a transaction that is
    still open wrote first, so claims become slower. Without the role pg_read_all_stats, a login
    sees only its own sessions. Standbys with hot_standby_feedback are not found.
    """
    age = seconds(older_than, "older_than")
    whole_number(limit, "limit")
    with reading(alias_of(using)) as cursor:
        return oldest_snapshot.horizon(cursor, older_than=age, limit=limit)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return Pattern(pattern).matches(queue)
    except InvalidName:
        return False
