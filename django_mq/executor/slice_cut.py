"""Cut the next slice out of the tasks that are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from django_mq.executor.ordering import Ordering
from django_mq.executor.pace import WORTH_DIVIDING, Pace
from django_mq.executor.tasks import Slice, Task, max_in_call
from django_mq.handlers import Handler


def next_slice(
    ready: deque[Task],
    ordering: Ordering,
    pace: Callable[[Handler], Pace],
    *,
    batch: int,
    slice_size: int,
    idle: int,
) -> Slice:
    """Take the next slice from the front of `ready`, and occupy its lines in `ordering`.

    The slice has up to `slice_size` messages, with as many per handler as its pace allows; or one
    message that runs outside any transaction; or the messages of one batch handler, up to `batch`
    or its `max_batch`. While `idle` other threads wait, it leaves them their share of messages that
    take long.
    """
    head = ready.popleft()
    slice_, first = Slice([head]), head.handler
    _occupy(slice_, ordering, head)
    limits = {first: max_in_call(head, batch) if first.batch else pace(first).limit}
    if not (first.atomic or first.batch) or limits[first] == 1:
        return slice_
    may_divide = idle and not (first.batch or head.delivery._row.ordered)
    if may_divide and pace(first).seconds > WORTH_DIVIDING:
        slice_size = min(slice_size, ceil((1 + len(ready)) / (1 + idle)))
    taken = {first: 1}
    while ready and len(slice_.tasks) < slice_size:
        task = ready[0]
        line, handler = task.line, task.handler
        if line is not None:
            if line not in slice_.lines and ordering.is_busy(line):
                ordering.wait(ready.popleft(), line)
                continue
            if task.delivery._row.suspect:
                break
        if not _may_follow(first, task, batch=batch, limit=limits[first]):
            break
        if handler not in limits:
            limits[handler] = pace(handler).limit
        count = taken.get(handler, 0)
        if count >= limits[handler] or limits[handler] == 1:
            break  # a handler that may be slow, as far as is known, runs alone
        taken[handler] = count + 1
        slice_.tasks.append(ready.popleft())
        _occupy(slice_, ordering, task)
    return slice_


def _may_follow(first: Handler, task: Task, *, batch: int, limit: int) -> bool:
    """Return whether `task` may be in a slice that begins with `first`, which has up to `limit`."""
    if first.batch:
        return task.handler is first and max_in_call(task, batch) >= limit
    return task.handler.atomic and not task.handler.batch


def _occupy(slice_: Slice, ordering: Ordering, task: Task) -> None:
    if task.line is not None:
        ordering.occupy(task.line)
        slice_.lines.add(task.line)
