"""Message (what is broadcast), its receipts, and Delivery (one message claimed for an attempt)."""

from django_mq.messages.adapters import MessageInstance
from django_mq.messages.claimed_row import ClaimedRow, Fence, PlainFence, fence_of, worker_of
from django_mq.messages.current import current_delivery, foreign_alias, is_on_loop, set_current
from django_mq.messages.delivery import LONG_AGO, Delivery
from django_mq.messages.message import Message
from django_mq.messages.receipts import BulkReceipt, Cancelled, CopyReceipt, Receipt
from django_mq.policy.uniqueness import CopyOutcome, OnDuplicate

__all__ = [
    "LONG_AGO",
    "BulkReceipt",
    "Cancelled",
    "ClaimedRow",
    "CopyOutcome",
    "CopyReceipt",
    "Delivery",
    "Fence",
    "Message",
    "MessageInstance",
    "OnDuplicate",
    "PlainFence",
    "Receipt",
    "current_delivery",
    "fence_of",
    "foreign_alias",
    "is_on_loop",
    "set_current",
    "worker_of",
]
