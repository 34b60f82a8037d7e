"""A thread that takes slices from the hand and runs them on a connection of its own."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from django.db import connections

from django_mq.worker.database import Outage, plain_connection
from django_mq.worker.hand import Hand
from django_mq.worker.slices import Slices
from django_mq.worker.tasks import Line, Slice, Task
from django_mq.worker.unbound import Unbound

if TYPE_CHECKING:
    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow
    from django_mq.worker.board import Places
    from django_mq.worker.ending import Ended

logger = logging.getLogger("django_mq")


class Executor(threading.Thread):
    """Runs deliveries until the hand is closed; what it has begun by then it ends."""

    def __init__(
        self,
        number: int,
        *,
        alias: str,
        hand: Hand,
        places: Places,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[Sequence[Ended]], None],
        slice_seconds: float,
        lease: Callable[[str], float],
        shortest_lease: float,
        most: int,
        easing: Collection[str],
    ) -> None:
        super().__init__(name=f"mq-executor-{number}", daemon=True)
        self._alias = alias
        self._hand = hand
        self._places = places
        self._outage = outage
        self._policy = policy
        self._settled = settled
        self._slice_seconds = slice_seconds
        self._lease = lease
        self._ours_for = shortest_lease / 4
        self._most = most
        self._easing = easing

    def run(self) -> None:
        wrapper = connections[self._alias] = plain_connection(self._alias)
        self._slices = Slices(
            wrapper,
            places=self._places,
            outage=self._outage,
            policy=self._policy,
            settled=self._settled,
            slice_seconds=self._slice_seconds,
            shut=self._hand.shut_queues,
            easing=self._easing,
            ours_for=self._ours_for,
        )
        self._unbound = Unbound(
            wrapper,
            places=self._places,
            outage=self._outage,
            policy=self._policy,
            settled=self._settled,
            lease=self._lease,
        )
        try:
            while (slice_ := self._hand.take()) is not None:
                try:
                    self._perform(slice_)
                except Exception as error:  # ours, not a handler's: the leases lapse
                    logger.exception("executor failed", extra={"event": "executor_failed"})
                    for line in slice_.lines:
                        self._hand.break_line(line)
                    self._hand.settled(task.delivery.id for task in slice_.tasks)
                    self._outage.wait(error)
                finally:
                    self._hand.done(slice_)
        finally:
            connections.close_all()

    def _perform(self, slice_: Slice) -> None:
        tasks = slice_.tasks
        if not tasks[0].handler.atomic:
            self._slices.stand_down()
            if not self._unbound.run(tasks[0]):
                self._hand.put_back(tasks)
            return
        began = monotonic()
        remainder = self._slices.run(tasks)
        unstarted = len(remainder.left) + len(remainder.locked)
        self._set_pace(tasks, unstarted, remainder.again, monotonic() - began)
        left, locked = remainder.left, remainder.locked
        again = deque(_in_order(remainder.again, tasks))
        halted: set[Line] = set()
        while again and not self._outage.stopped():
            task = again.popleft()
            if task.line in halted or self._hand.is_unwanted(task):
                left.insert(0, task)  # something before it did not end, or failed
                continue
            remainder = self._slices.run([task])
            left = remainder.left + left
            locked = locked + remainder.locked
            if task.line is None:
                again.extend(remainder.again)
                continue
            again.extendleft(remainder.again)  # nothing of its line before it
            if remainder.left or remainder.locked:
                halted.add(task.line)
        lined = [task for task in locked if task.line is not None]
        if back := [*again, *left, *lined]:
            self._hand.put_back(_in_order(back, tasks))
        if others := [task for task in locked if task.line is None]:
            self._hand.put(others)
        self._slices.get_ready()

    def _set_pace(self, tasks: list[Task], left: int, again: list[Task], seconds: float) -> None:
        for task in again:
            self._hand.pace(task.handler).conflict()
        if again:
            return
        ran = Counter(task.handler for task in tasks[: len(tasks) - left])
        for handler, count in ran.items():
            if seconds > self._slice_seconds:
                self._hand.pace(handler).overran()
            else:
                self._hand.pace(handler).kept_time(count, self._most)


def _in_order(some: Sequence[Task], tasks: Sequence[Task]) -> list[Task]:
    """Return `some` of `tasks` in the order of those."""
    if len(some) < 2:
        return list(some)
    place = {task.delivery.id: n for n, task in enumerate(tasks)}
    return sorted(some, key=lambda task: place[task.delivery.id])
