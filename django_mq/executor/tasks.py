"""The work of executors: a task is a delivery with its handler, a slice is several tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.handlers import Handler
    from django_mq.messages import Delivery

#: Identifies deliveries that are handled one after another: those of an order key of a handler,
#: or of an ordered queue.
Line = tuple[str, ...]


class Task(NamedTuple):
    """A delivery and its handler; `line` if it must wait for the delivery before it."""

    delivery: Delivery
    handler: Handler
    timeout: float
    line: Line | None = None


@dataclass(slots=True)
class Slice:
    """Tasks that run in one transaction, or one that runs outside any; their `lines`.

    Nothing else runs beside a slice that is `alone`.
    """

    tasks: list[Task] = field(default_factory=list)
    alone: bool = False
    lines: set[Line] = field(default_factory=set)


def is_coroutine(task: Task) -> bool:
    """Say whether `task` runs on the event loop: a suspect runs alone, in a thread."""
    return task.handler.is_async and not task.delivery._row.suspect
