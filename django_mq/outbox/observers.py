"""Callbacks for each message that is broadcast; only the test helpers register one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.store.rows import NewRow

#: Called for each stored message with the connection, its rows and its unique id.
observers: list[Callable[[BaseDatabaseWrapper, Sequence[NewRow], str | None], None]] = []


def notify(
    connection: BaseDatabaseWrapper, rows: Sequence[NewRow], unique_id: str | None = None
) -> None:
    """Call the observers for one message."""
    for observer in observers:
        observer(connection, rows, unique_id)
