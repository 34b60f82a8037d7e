"""What operators ask and do: the admin and the commands are faces of these functions.

`using` is an alias; None is the one of the settings or, without it, of the router. All of them
work inside and outside `atomic()`. Names are checked before any SQL: a bad one is InvalidName;
other bad arguments are ValueError.
"""

from django_mq.queues.acting import (
    Changed,
    cancel,
    discard,
    purge,
    requeue,
    run_now,
)
from django_mq.queues.counting import QueueCounts, counts, names
from django_mq.queues.deciding import end_backoff, limit, pause, resume
from django_mq.queues.explaining import Why, why
from django_mq.queues.fleet import HorizonHolder, Worker, horizon, workers
from django_mq.queues.looking import State, peek, state
from django_mq.queues.redacting import redacted
from django_mq.queues.standing import Head, heads
from django_mq.queues.timing import timings
from django_mq.timing import HandlerTimings

__all__ = [
    "Changed",
    "HandlerTimings",
    "Head",
    "HorizonHolder",
    "QueueCounts",
    "State",
    "Why",
    "Worker",
    "cancel",
    "counts",
    "discard",
    "end_backoff",
    "heads",
    "horizon",
    "limit",
    "names",
    "pause",
    "peek",
    "purge",
    "redacted",
    "requeue",
    "resume",
    "run_now",
    "state",
    "timings",
    "why",
    "workers",
]
