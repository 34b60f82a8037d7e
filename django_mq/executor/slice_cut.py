"""Cut the next slice out of the tasks that are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from django_mq.executor.ordering import Ordering
from django_mq.executor.pace import WORTH_DIVIDING, Pace
from django_mq.executor.tasks import Line, Slice, Task, max_in_call
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
    or its `max_batch`, wherever they are in `ready`. While `idle` other threads wait, it leaves
    them their share of messages that take long.
    """
    head = ready.popleft()
    slice_, first = Slice([head]), head.handler
    _occupy(slice_, ordering, head)
    if first.batch:
        _fill_list(slice_, ready, ordering, batch=batch, limit=max_in_call(head, batch))
        return slice_
    limits = {first: pace(first).limit}
    if not first.atomic or limits[first] == 1:
        return slice_
    may_divide = idle and not head.delivery._row.ordered
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
        if handler.batch or not handler.atomic:
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


def _fill_list(
    slice_: Slice, ready: deque[Task], ordering: Ordering, *, batch: int, limit: int
) -> None:
    """Add up to `limit` messages of its handler to the list `slice_`, from all of `ready`.

    Of a line, none follows without the one before it.
    """
    first = slice_.tasks[0].handler
    passed: list[Task] = []
    passed_lines: set[Line] = set()
    while ready and len(slice_.tasks) < limit:
        task = ready.popleft()
        line = task.line
        if line is not None and line not in slice_.lines and ordering.is_busy(line):
            ordering.wait(task, line)
        elif (
            task.handler is first
            and max_in_call(task, batch) >= limit
            and line not in passed_lines
            and (line is None or not task.delivery._row.suspect)
        ):
            slice_.tasks.append(task)
            _occupy(slice_, ordering, task)
        else:
            passed.append(task)
            passed_lines |= set() if line is None else {line}
    ready.extendleft(reversed(passed))


def _occupy(slice_: Slice, ordering: Ordering, task: Task) -> None:
    if task.line is not None:
        ordering.occupy(task.line)
        slice_.lines.add(task.line)
