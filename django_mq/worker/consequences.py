"""What else the end of a delivery changes, in the transaction that settles it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow
    from django_mq.store import Cursor
    from django_mq.worker.ending import Ended


def has_any(row: ClaimedRow) -> bool:
    """Say whether the end of this message changes anything but its own row."""
    return row.key is not None or row.ordered or row.unique_id is not None or row.wants_result


def follow(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Do what follows from deliveries that were settled just now, in the same transaction.

    Each has `has_any()` of its row, and was still ours.
    """
