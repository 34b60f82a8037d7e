"""Who wants to know what is broadcast: test helpers, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.store.rows import NewRow

#: Called with the connection and the rows of each message that is stored, and its unique id.
observers: list[Callable[[BaseDatabaseWrapper, Sequence[NewRow], str | None], None]] = []


def tell(
    connection: BaseDatabaseWrapper, rows: Sequence[NewRow], unique_id: str | None = None
) -> None:
    """Tell the observers, if there are any, of one message."""
    for observer in observers:
        observer(connection, rows, unique_id)
