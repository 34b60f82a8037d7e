"""Transactional-outbox queueing for Django on PostgreSQL.

Only public names stand here; importing them touches no model, so it works before apps are ready.
"""

from django_mq.backoff import RetryPolicy, exponential, fixed, intervals
from django_mq.exceptions import (
    BroadcastBusy,
    BroadcastError,
    DuplicateMessage,
    HandlerBrokeTransaction,
    InvalidHandler,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    LeaseLost,
    MQError,
    NotInTransaction,
    PayloadTooLarge,
    Reject,
    Retry,
    RoutingError,
    Snooze,
    TooManyHops,
    UnreadablePayload,
)
from django_mq.handlers import handler
from django_mq.messages import (
    BulkReceipt,
    Cancelled,
    CopyReceipt,
    Delivery,
    Message,
    Receipt,
)
from django_mq.outbox import abroadcast, broadcast, broadcast_many, cancel

__version__ = "0.1.0"

__all__ = [
    "BroadcastBusy",
    "BroadcastError",
    "BulkReceipt",
    "Cancelled",
    "CopyReceipt",
    "Delivery",
    "DuplicateMessage",
    "HandlerBrokeTransaction",
    "InvalidHandler",
    "InvalidName",
    "InvalidOption",
    "InvalidPayload",
    "LeaseLost",
    "MQError",
    "Message",
    "NotInTransaction",
    "PayloadTooLarge",
    "Receipt",
    "Reject",
    "Retry",
    "RetryPolicy",
    "RoutingError",
    "Snooze",
    "TooManyHops",
    "UnreadablePayload",
    "__version__",
    "abroadcast",
    "broadcast",
    "broadcast_many",
    "cancel",
    "exponential",
    "fixed",
    "handler",
    "intervals",
]
