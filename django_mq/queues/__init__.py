"""Inspect and manage queues and schedules; the admin and the commands call these functions.

`using` is a database alias; None means the setting DATABASE or, without it, the router's choice.
All functions work inside and outside `atomic()`. Arguments are checked before any SQL: a bad name
raises InvalidName, any other bad argument ValueError, and an alias that is not in DATABASES
Django's ConnectionDoesNotExist.
"""

from django_mq.policy.figures import Counted
from django_mq.policy.handler_totals import HandlerTimings
from django_mq.policy.histogram import Latency
from django_mq.queues.actions import Changed, cancel, discard, purge, requeue, run_now
from django_mq.queues.causes import Chain, ChainLink, chain
from django_mq.queues.decisions import end_backoff, limit, pause, resume
from django_mq.queues.editing import edit
from django_mq.queues.errors import ErrorGroup, errors
from django_mq.queues.figures import Figures, Rate, figures, rates
from django_mq.queues.fleet import WorkerProcess, horizon, timings, workers
from django_mq.queues.history import history, replay
from django_mq.queues.known_queues import names
from django_mq.queues.message_counts import QueueCounts, counts
from django_mq.queues.operations import cancel_operation, operate, operations
from django_mq.queues.reasons import Why, why
from django_mq.queues.redaction import redacted
from django_mq.queues.running import RunningMessage, ask_stack, commands, running, stop
from django_mq.queues.scheduling import (
    disable_schedule,
    enable_schedule,
    next_times,
    run_schedule,
    schedules,
)
from django_mq.queues.stalled import Head, heads
from django_mq.queues.states import State, peek, state
from django_mq.queues.topology import MessageType, Subscriber, Topology, topology
from django_mq.queues.worker_orders import (
    quiet_workers,
    resume_workers,
    stop_workers,
    worker_orders,
)
from django_mq.store.oldest_snapshot import HorizonHolder

__all__ = [
    "Chain",
    "ChainLink",
    "Changed",
    "Counted",
    "ErrorGroup",
    "Figures",
    "HandlerTimings",
    "Head",
    "HorizonHolder",
    "Latency",
    "MessageType",
    "QueueCounts",
    "Rate",
    "RunningMessage",
    "State",
    "Subscriber",
    "Topology",
    "Why",
    "WorkerProcess",
    "ask_stack",
    "cancel",
    "cancel_operation",
    "chain",
    "commands",
    "counts",
    "disable_schedule",
    "discard",
    "edit",
    "enable_schedule",
    "end_backoff",
    "errors",
    "figures",
    "heads",
    "history",
    "horizon",
    "limit",
    "names",
    "next_times",
    "operate",
    "operations",
    "pause",
    "peek",
    "purge",
    "quiet_workers",
    "rates",
    "redacted",
    "replay",
    "requeue",
    "resume",
    "resume_workers",
    "run_now",
    "run_schedule",
    "running",
    "schedules",
    "state",
    "stop",
    "stop_workers",
    "timings",
    "topology",
    "why",
    "worker_orders",
    "workers",
]
