"""What operators ask and do: the admin and the commands are faces of these functions.

`using` is an alias; None is the one of the settings or, without it, of the router. All of them
work inside and outside `atomic()`. Names are checked before any SQL: a bad one is InvalidName;
other bad arguments are ValueError.
"""

from django_mq.queues.acting import (
    Changed,
    cancel,
    discard,
    pause,
    purge,
    requeue,
    resume,
    run_now,
)
from django_mq.queues.counting import QueueCounts, counts, names
from django_mq.queues.explaining import Why, why
from django_mq.queues.fleet import HorizonHolder, Worker, horizon, workers
from django_mq.queues.looking import State, peek, state
from django_mq.queues.redacting import redacted

__all__ = [
    "Changed",
    "HorizonHolder",
    "QueueCounts",
    "State",
    "Why",
    "Worker",
    "cancel",
    "counts",
    "discard",
    "horizon",
    "names",
    "pause",
    "peek",
    "purge",
    "redacted",
    "requeue",
    "resume",
    "run_now",
    "state",
    "why",
    "workers",
]
