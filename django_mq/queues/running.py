"""Messages whose handlers run now: where, for how long, and the commands to their workers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from django.db.models.functions import Now

from django_mq.conf import alias_of
from django_mq.messages import worker_of
from django_mq.models import QueuedMessage, WorkerCommand, WorkerHeartbeat
from django_mq.policy.column_bounds import MAX_BIGINT, MAX_SPAN_SECONDS
from django_mq.queues.actions import Changed, Ids, checked_ids
from django_mq.queues.arguments import operator_name
from django_mq.queues.fleet import SILENT
from django_mq.queues.transactions import after_commit, writing
from django_mq.states import GONE_AFTER
from django_mq.store import commands as commands_store

logger = logging.getLogger("django_mq")


@dataclass(frozen=True, slots=True)
class RunningMessage:
    """A message whose handler ran at the last heartbeat of its worker, up to 10 s ago.

    `ran_for` is None if the worker did not report the start.
    """

    id: int
    queue: str
    type: str
    handler: str
    attempt: int
    worker: str
    host: str
    pid: int
    ran_for: timedelta | None


def running(
    *, ids: Collection[int] | None = None, using: str | None = None
) -> list[RunningMessage]:
    """Return the messages whose handlers run now, of all or of `ids`; longest running first."""
    wanted = None if ids is None else set(checked_ids(ids))
    alias = alias_of(using)
    beats = WorkerHeartbeat.objects.using(alias).filter(last_seen__gt=Now() - GONE_AFTER)
    columns = beats.annotate(silent=SILENT).values_list(
        "id", "host", "pid", "running", "ran", "silent"
    )
    at: dict[int, tuple[str, str, int, timedelta | None]] = {}
    for worker, host, pid, listed, ran, silent in columns:
        for id in listed if isinstance(listed, list) else ():
            if type(id) is int and 0 < id <= MAX_BIGINT and (wanted is None or id in wanted):
                at[id] = (worker, host, pid, _ran_for(ran, id, silent))
    found = QueuedMessage.objects.using(alias).filter(pk__in=at, leased_until__isnull=False)
    rows = found.values_list("pk", "queue", "type", "handler", "attempts", "claimed_by")
    here = [
        RunningMessage(id, queue, type, handler, attempt, *at[id])
        for id, queue, type, handler, attempt, claimer in rows
        if worker_of(claimer) == at[id][0]
    ]
    return sorted(here, key=lambda each: (-(each.ran_for or timedelta()), each.id))


def _ran_for(ran: object, id: int, silent: float) -> timedelta | None:
    """Return for how long a message has run; None for a value that no worker writes."""
    seconds = ran.get(str(id)) if isinstance(ran, Mapping) else None
    if not isinstance(seconds, int | float) or not 0 < seconds < MAX_SPAN_SECONDS:
        return None
    return timedelta(seconds=seconds + silent)


def stop(ids: Ids, *, by: str = "", using: str | None = None) -> Changed:
    """Ask the workers that have `ids` to stop their handlers; the failed attempt names `by`.

    A coroutine is cancelled; any other handler is stopped by ending its process, as at a timeout.
    The attempt fails, and the retry policy decides what comes next. A message that does not run is
    left alone. Returns the messages whose workers are alive and were asked. They act within about a
    second, or within a heartbeat (10 s) without LISTEN.
    """
    return _ask("stop", "message_stop_asked", ids, by, using)


def ask_stack(ids: Ids, *, by: str = "", using: str | None = None) -> Changed:
    """Ask the workers that run `ids` where their handlers are; `commands()` returns the answers."""
    return _ask("stack", "message_stack_asked", ids, by, using)


def commands(id: int, *, using: str | None = None) -> list[WorkerCommand]:
    """Return the commands about message `id` in the last hour, the latest first."""
    [id] = checked_ids(id)
    found = WorkerCommand.objects.using(alias_of(using)).filter(message_id=id)
    return list(found.order_by("-id")[:10])


def _ask(action: str, event: str, ids: Ids, by: str, using: str | None) -> Changed:
    wanted, name, alias = checked_ids(ids), operator_name(by), alias_of(using)
    with writing(alias) as cursor:
        asked = sorted(commands_store.ask(cursor, ids=wanted, action=action, by=name))
    if asked:
        after_commit(
            alias,
            lambda: logger.info(
                "asked workers to %s: %d messages, by %s",
                "stop" if action == "stop" else "show the stack",
                len(asked),
                name or "an operator",
                extra={"event": event, "message_ids": asked[:1000], "by": name},
            ),
        )
    return Changed(tuple(asked), len(wanted) - len(asked))
