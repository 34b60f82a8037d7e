"""Transactional-outbox queueing for Django on PostgreSQL.

This module holds public names only. Importing it loads no model, so it works before apps are ready.
"""

from django_mq.conf.version import VERSION
from django_mq.exceptions import (
    BroadcastBusy,
    BroadcastError,
    CannotWait,
    DuplicateMessage,
    HandlerBrokeTransaction,
    InvalidHandler,
    InvalidMessage,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    LeaseLost,
    MQError,
    NothingKept,
    NotInTransaction,
    PayloadTooLarge,
    Reject,
    RemoteError,
    ReplyTimeout,
    Retry,
    RoutingError,
    Snooze,
    TooManyHops,
    Unanswered,
    UnexpectedPayload,
    UnreadablePayload,
)
from django_mq.handlers import handler, periodic
from django_mq.messages import (
    BulkReceipt,
    Cancelled,
    CopyReceipt,
    Delivery,
    Message,
    Receipt,
)
from django_mq.messages.classes import message, upcast
from django_mq.outbox import abroadcast, broadcast, broadcast_many, cancel
from django_mq.policy.backoff import RetryPolicy, exponential, fixed, intervals
from django_mq.requests import PendingReply, aask, agather, arequest, ask, gather, request

__version__ = VERSION

__all__ = [
    "BroadcastBusy",
    "BroadcastError",
    "BulkReceipt",
    "Cancelled",
    "CannotWait",
    "CopyReceipt",
    "Delivery",
    "DuplicateMessage",
    "HandlerBrokeTransaction",
    "InvalidHandler",
    "InvalidMessage",
    "InvalidName",
    "InvalidOption",
    "InvalidPayload",
    "LeaseLost",
    "MQError",
    "Message",
    "NotInTransaction",
    "NothingKept",
    "PayloadTooLarge",
    "PendingReply",
    "Receipt",
    "Reject",
    "RemoteError",
    "ReplyTimeout",
    "Retry",
    "RetryPolicy",
    "RoutingError",
    "Snooze",
    "TooManyHops",
    "Unanswered",
    "UnexpectedPayload",
    "UnreadablePayload",
    "__version__",
    "aask",
    "abroadcast",
    "agather",
    "arequest",
    "ask",
    "broadcast",
    "broadcast_many",
    "cancel",
    "exponential",
    "fixed",
    "gather",
    "handler",
    "intervals",
    "message",
    "periodic",
    "request",
    "upcast",
]
