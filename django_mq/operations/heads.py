"""Heads: the first messages of lines, behind which the others of their line wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db.backends.utils import CursorWrapper

from django_mq.conf import get_settings
from django_mq.store import operations, waiting_behind
from django_mq.store.waiting_behind import LinePosition


def dead_heads(cursor: CursorWrapper, ids: Sequence[int], operation: int) -> list[int]:
    """Return the dead heads of the lines of messages; a message in no line is its own head.

    Only heads that were dead when the operation was requested: a head that was requeued in an
    earlier step, and has died again since, is left alone.
    """
    return operations.dead_before(cursor, operation, heads_of(cursor, ids))


def heads_of(cursor: CursorWrapper, ids: Iterable[int]) -> list[int]:
    """Return the heads of the lines of messages; a message in no line is its own head."""
    found = line_positions(cursor, ids, maximum=1)
    return sorted({found[id].head or id if id in found else id for id in ids})


def line_positions(
    cursor: CursorWrapper, ids: Iterable[int], *, maximum: int
) -> dict[int, LinePosition]:
    """Return, by id, the positions of those of `ids` that are in a line; counts stop at `maximum`.

    The settings say which queues are ordered.
    """
    return waiting_behind.line_positions(
        cursor,
        ids=list(ids),
        ordered=ordered_queues(),
        skipping=skipping_queues(),
        maximum=maximum,
    )


def ordered_queues() -> list[str]:
    """Return the names of the ordered queues."""
    return [name for name, options in get_settings().queues.items() if options.ordered]


def skipping_queues() -> list[str]:
    """Return the names of the queues in which a dead head does not block its line."""
    listed = get_settings().queues.items()
    return [name for name, options in listed if options.on_dead_head == "skip"]
