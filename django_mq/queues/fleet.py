"""The worker processes, and who keeps the database from clearing up behind them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F
from django.db.models.functions import Now

from django_mq.exceptions import InvalidName
from django_mq.models import WorkerHeartbeat
from django_mq.queues.connecting import alias_of, reading
from django_mq.routing import Pattern
from django_mq.states import GONE_AFTER
from django_mq.store import horizon as store


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process, as it last spoke of itself, `silent` ago; not `alive` after 30 s.

    `queues` are names and patterns, none for all queues; `running` ids of messages. `wakeup` is
    notify, poll, or degraded: LISTEN is dead and it polls.
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

    def serves(self, queue: str) -> bool:
        """Return whether this worker takes messages of `queue`."""
        return not self.queues or any(_matches(pattern, queue) for pattern in self.queues)


def workers(*, using: str | None = None) -> list[Worker]:
    """Return the worker processes, last seen first; the dead are listed until they are struck."""
    beats = WorkerHeartbeat.objects.using(alias_of(using)).defer("timings")
    found = beats.annotate(silent=Now() - F("last_seen"))
    return [
        Worker(
            id=beat.pk,
            host=beat.host,
            pid=beat.pid,
            version=beat.version,
            queues=tuple(beat.queues),
            running=tuple(beat.running),
            wakeup=beat.wakeup,
            draining=beat.draining,
            started_at=beat.started_at,
            last_seen=beat.last_seen,
            silent=beat.silent,
            alive=beat.silent < GONE_AFTER,
        )
        for beat in found.order_by("-last_seen", "pk")
    ]


@dataclass(frozen=True, slots=True)
class HorizonHolder:
    """What keeps vacuum from removing dead rows: `kind` says what it is, `name` which.

    A session is named by its process id; `since` is unknown (None) for a replication slot.
    """

    kind: str
    name: str
    login: str
    application: str
    state: str
    since: datetime | None


def horizon(
    *, older_than: float = 60.0, limit: int = 5, using: str | None = None
) -> list[HorizonHolder]:
    """Return who has held a snapshot for more than `older_than` seconds, oldest first.

    While one does, vacuum removes no row that was dead since, and claims become slower. Without
    the role pg_read_all_stats only the login's own sessions can be seen.
    """
    with reading(alias_of(using)) as cursor:
        return [
            HorizonHolder(*holder)
            for holder in store.horizon(cursor, older_than=older_than, limit=limit)
        ]


def _matches(pattern: str, queue: str) -> bool:
    try:
        return Pattern(pattern).matches(queue)
    except InvalidName:
        return False
