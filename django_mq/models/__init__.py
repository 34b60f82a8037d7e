"""Tables, constraints and indexes. `store/` uses them in SQL; users query these models.

The store names tables and columns itself; a test compares the two. The migration sets the tables'
vacuum options, for which Django has none.
"""

from django_mq.models.figures import HourFigures, MinuteFigures, Overview
from django_mq.models.fleet import QueueState, WorkerCommand, WorkerHeartbeat
from django_mq.models.history import HandledMessage
from django_mq.models.message import MessageQuerySet, QueuedMessage
from django_mq.models.operation import Operation
from django_mq.models.records import FailedAttempt, Result, UniqueKey
from django_mq.models.schedule import Schedule

__all__ = [
    "FailedAttempt",
    "HandledMessage",
    "HourFigures",
    "MessageQuerySet",
    "MinuteFigures",
    "Operation",
    "Overview",
    "QueueState",
    "QueuedMessage",
    "Result",
    "Schedule",
    "UniqueKey",
    "WorkerCommand",
    "WorkerHeartbeat",
]
