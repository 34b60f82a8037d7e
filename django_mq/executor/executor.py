"""A thread that takes slices from the local queue and runs them on its own connection."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextvars import copy_context
from operator import attrgetter
from time import monotonic

from django.db import connections

from django_mq.conf.error_logs import log_failure
from django_mq.executor.connections import plain_connection
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.nonatomic import NonAtomic
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.executor.slices import SliceRunner
from django_mq.executor.tasks import Line, Slice, Task
from django_mq.executor.watchdog import Link


class Executor(threading.Thread):
    """Runs deliveries until the local queue is closed; ends a slice that it has begun."""

    def __init__(
        self,
        number: int,
        context: RunContext,
        *,
        local_queue: LocalQueue,
        entries: ExecutorEntries,
        slice_seconds: float,
        slice_size: int,
        backoff_queues: Collection[str],
        link: Link,
    ) -> None:
        super().__init__(name=f"mq-executor-{number}", daemon=True)
        self._context = context
        self._outage = context.outage
        self._link = link
        self._local_queue = local_queue
        self._entries = entries
        self._slice_seconds = slice_seconds
        self._slice_size = slice_size
        self._backoff_queues = backoff_queues

    def _connect(self) -> None:
        context, alias = self._context, self._context.alias
        wrapper = connections[alias] = plain_connection(alias, self._link)
        self._session = session = Session(wrapper, link=self._link)
        settlement = Settlement(session, context)
        self._slice_runner = SliceRunner(
            session,
            context,
            entries=self._entries,
            settlement=settlement,
            slice_seconds=self._slice_seconds,
            stopped_queues=self._local_queue.stopped_queues,
            backoff_queues=self._backoff_queues,
        )
        self._nonatomic = NonAtomic(session, context, entries=self._entries, settlement=settlement)

    def run(self) -> None:
        self._entries.bind_thread()
        self._connect()
        try:
            while (slice_ := self._local_queue.take()) is not None:
                try:
                    # Nothing that a receiver of a signal activates, such as a language, stays.
                    copy_context().run(self._perform, slice_)
                except Exception as error:  # a bug of ours, not of a handler: the leases lapse
                    log_failure("executor_failed", error, "executor failed")
                    for line in slice_.lines:
                        self._local_queue.halt_line(line)
                    self._local_queue.unsettled.remove(task.delivery.fence for task in slice_.tasks)
                    self._outage.wait(error, logged=True)
                finally:
                    self._local_queue.done(slice_)
        finally:
            connections.close_all()

    def _perform(self, slice_: Slice) -> None:
        tasks = slice_.tasks
        if not tasks[0].handler.atomic:
            self._session.leave_block()
            self._run_nonatomic(slice_)
            return
        remainder = self._slice_runner.run(tasks)
        unstarted = len(remainder.left) + len(remainder.not_locked)
        self._set_pace(tasks, unstarted, remainder.to_rerun, remainder.seconds)
        left, not_locked = remainder.left, remainder.not_locked
        to_rerun = deque(_in_order(remainder.to_rerun, tasks))
        halted_lines: set[Line] = set()
        while to_rerun and not self._outage.stopped():
            task = to_rerun.popleft()
            if task.line in halted_lines or self._local_queue.is_unwanted(task):
                left.insert(0, task)  # a message before it in its line failed, or has not ended
                continue
            remainder = self._slice_runner.run([task])
            left = remainder.left + left
            not_locked = not_locked + remainder.not_locked
            if task.line is None:
                to_rerun.extend(remainder.to_rerun)
                continue
            to_rerun.extendleft(remainder.to_rerun)  # before the others of its line
            if remainder.left or remainder.not_locked:
                halted_lines.add(task.line)
        lined = [task for task in not_locked if task.line is not None]
        if back := [*to_rerun, *left, *lined]:
            self._local_queue.put_first(_in_order(back, tasks))
        if others := [task for task in not_locked if task.line is None]:
            self._local_queue.put(others)
        self._slice_runner.prepare()

    def _run_nonatomic(self, slice_: Slice) -> None:
        began = monotonic()
        if self._nonatomic.run(slice_.tasks):
            pace = self._local_queue.paces.of(slice_.tasks[0].handler)
            pace.seconds = (monotonic() - began) / len(slice_.tasks)
        else:
            self._put_back(slice_)

    def _put_back(self, slice_: Slice) -> None:
        """Put tasks that could not start behind the others; in their lines they stay the first."""
        slice_.put_back = True
        if lined := [task for task in slice_.tasks if task.line is not None]:
            self._local_queue.put_first(lined)
        if others := [task for task in slice_.tasks if task.line is None]:
            self._local_queue.put(others)

    def _set_pace(
        self, tasks: list[Task], unstarted: int, reruns: list[Task], seconds: float
    ) -> None:
        """Learn from a slice; `seconds` is without its commit, which is as long for one message."""
        for task in reruns:
            self._local_queue.paces.of(task.handler).conflict()
        if reruns:
            return
        ran = Counter(map(attrgetter("handler"), tasks[: len(tasks) - unstarted]))
        for handler, count in ran.items():
            pace = self._local_queue.paces.of(handler)
            pace.seconds = seconds / ran.total()
            if seconds > self._slice_seconds:
                pace.overran()
            else:
                pace.ended_in_time(count, self._slice_size)


def _in_order(some: Sequence[Task], tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks `some`, which are among `tasks`, in the order of `tasks`."""
    if len(some) < 2:
        return list(some)
    index = {task.delivery.id: n for n, task in enumerate(tasks)}
    return sorted(some, key=lambda task: index[task.delivery.id])
