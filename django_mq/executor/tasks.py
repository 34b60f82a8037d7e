"""The work of executors: a task is a delivery with its handler, a slice is several tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mq.executor.lease_clock import lease_clock
from django_mq.handlers import Handler
from django_mq.messages import LONG_AGO, Delivery, Fence

#: Identifies deliveries that are handled one after another: an order key of a handler, or an
#: ordered queue.
Line = tuple[str, ...]


class Task(NamedTuple):
    """A delivery and its handler; it has a `line` if it must wait for the delivery before it.

    `batch_size` is that of its queue; None: that of the worker.
    """

    delivery: Delivery
    handler: Handler
    timeout: float
    line: Line | None = None
    batch_size: int | None = None


@dataclass(slots=True)
class Slice:
    """Tasks that run in one transaction, or in one call outside any; their `lines`.

    Nothing else runs beside a slice that is `alone`. One that was `put_back` could not start: when
    it is done, its lines come behind the other tasks.
    """

    tasks: list[Task] = field(default_factory=list)
    alone: bool = False
    put_back: bool = False
    lines: set[Line] = field(default_factory=set)

    @property
    def calls(self) -> int:
        """How often a handler is called: once for a list of deliveries."""
        return 1 if self.tasks[0].handler.batch else len(self.tasks)


def fences(tasks: Sequence[Task]) -> list[Fence]:
    """Return the fences of `tasks`, in order."""
    return [task.delivery.fence for task in tasks]


def is_coroutine(task: Task) -> bool:
    """Return whether `task` runs on the event loop beside others: a suspect runs there alone."""
    return task.handler.is_async and not task.delivery._row.suspect


def is_listed(task: Task) -> bool:
    """Return whether an executor runs `task` with others, in a list outside any transaction."""
    handler = task.handler
    if not handler.batch or handler.atomic or handler.is_async:
        return False
    return task.delivery._row.attempts == 1


def may_start_unlocked(task: Task, since: float) -> bool:
    """Return whether `task` may start unlocked: it was claimed or renewed after `since`.

    `since` is a time of the lease clock: no lease given after it can have lapsed. Suspects and
    messages of a line are always locked first.
    """
    delivery = task.delivery
    return task.line is None and not delivery._row.suspect and delivery._leased_at >= since


def decode_again(task: Task) -> None:
    """Forget the decoded content of `task`: its handler may have changed it, and runs again."""
    for name in ("_payload", "_metadata"):
        with suppress(AttributeError):
            delattr(task.delivery, name)


def has_expired(delivery: Delivery) -> bool:
    """Return whether `delivery` has expired, judged by its claim.

    The answer may be true one round trip too early, but never too late.
    """
    asked_at, expires_in = delivery._asked_at, delivery._row.expires_in
    return expires_in is not None and LONG_AGO < asked_at <= lease_clock() - expires_in


def max_in_call(task: Task, batch: int) -> int:
    """Return how many messages a batch handler may get together with `task`.

    Attempts after the first run singly: the message that made a call fail must not fail its
    neighbours again. Inside a transaction that is a message that hangs, or that kills its process;
    outside, any, since nothing of a failed call is undone. So do suspects.
    """
    handler, row = task.handler, task.delivery._row
    if not handler.batch or row.attempts > 1 or row.suspect:
        return 1
    return min(batch, task.batch_size or batch, handler.max_batch or batch)
