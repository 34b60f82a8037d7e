"""What executors are given: a delivery with its handler, and several of them as a slice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.handlers import Handler
    from django_mq.messages import Delivery

Line = tuple[str, ...]


class Task(NamedTuple):
    """A delivery and the handler that it is for; `line`: what is handled one after another."""

    delivery: Delivery
    handler: Handler
    timeout: float
    line: Line | None = None


@dataclass(slots=True)
class Slice:
    """Tasks that run in one transaction, or one that runs outside any; their `lines`."""

    tasks: list[Task] = field(default_factory=list)
    alone: bool = False
    lines: set[Line] = field(default_factory=set)


def is_coroutine(task: Task) -> bool:
    """Say whether `task` runs on the loop: a suspect runs alone, in a thread."""
    return task.handler.is_async and not task.delivery._row.suspect
