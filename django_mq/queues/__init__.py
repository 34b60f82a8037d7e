"""Inspect and manage queues and schedules; the admin and the commands call these functions.

`using` is a database alias; None means the setting DATABASE or, without it, the router's choice.
All functions work inside and outside `atomic()`. Arguments are checked before any SQL: a bad name
raises InvalidName, any other bad argument ValueError.
"""

from django_mq.policy.handler_stats import HandlerTimings
from django_mq.queues.actions import Changed, cancel, discard, purge, requeue, run_now
from django_mq.queues.decisions import end_backoff, limit, pause, resume
from django_mq.queues.fleet import WorkerProcess, horizon, timings, workers
from django_mq.queues.reasons import Why, why
from django_mq.queues.redaction import redacted
from django_mq.queues.scheduling import (
    disable_schedule,
    enable_schedule,
    next_times,
    run_schedule,
    schedules,
)
from django_mq.queues.stalled import Head, heads
from django_mq.queues.states import State, peek, state
from django_mq.queues.totals import QueueCounts, counts, names
from django_mq.store.oldest_snapshot import HorizonHolder

__all__ = [
    "Changed",
    "HandlerTimings",
    "Head",
    "HorizonHolder",
    "QueueCounts",
    "State",
    "Why",
    "WorkerProcess",
    "cancel",
    "counts",
    "disable_schedule",
    "discard",
    "enable_schedule",
    "end_backoff",
    "heads",
    "horizon",
    "limit",
    "names",
    "next_times",
    "pause",
    "peek",
    "purge",
    "redacted",
    "requeue",
    "resume",
    "run_now",
    "run_schedule",
    "schedules",
    "state",
    "timings",
    "why",
    "workers",
]
