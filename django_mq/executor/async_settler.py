"""The thread that writes for async handlers: starts and settles what came together at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django_mq.executor import reports as reporting
from django_mq.executor.connections import LOST, Outage
from django_mq.executor.settlement import Settlement
from django_mq.executor.statements import Statements
from django_mq.signals import named, traced
from django_mq.store import leases

if TYPE_CHECKING:
    from django_mq.executor.ended import Ended
    from django_mq.executor.tasks import Task
    from django_mq.executor.watchdog import Link
    from django_mq.messages import ClaimedRow, Fence
    from django_mq.policy.backoff import RetryPolicy

logger = logging.getLogger("django_mq")


class AsyncSettler(threading.Thread):
    """Starts leases and settles deliveries for the event loop, many per statement."""

    def __init__(
        self,
        *,
        alias: str,
        lease: Callable[[str], float],
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        shortest_lease: float,
        settled: Callable[[Sequence[Ended]], None],
        link: Link | None = None,
    ) -> None:
        super().__init__(name="mq-settler", daemon=True)
        self._statements = Statements(alias, link=link)
        self._settlement = Settlement(
            self._statements, outage=outage, policy=policy, lease=shortest_lease
        )
        self._lease = lease
        self._outage = outage
        self.settled = settled
        self._asked: queue.SimpleQueue[tuple[str, Any, Any, Any] | None] = queue.SimpleQueue()

    def put(self, what: str, subject: Any, loop: asyncio.AbstractEventLoop, answer: Any) -> None:
        """Request `start` of a task or `settle` of an Ended; `answer` is resolved on `loop`."""
        self._asked.put((what, subject, loop, answer))

    def end(self) -> None:
        """End the thread after all earlier requests."""
        self._asked.put(None)

    def run(self) -> None:
        ending = False
        try:
            while not ending:
                asked = [self._asked.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        asked.append(self._asked.get_nowait())
                ending = None in asked
                self._serve([each for each in asked if each is not None])
        finally:
            self._statements.close()

    def _serve(self, asked: list[tuple[str, Any, Any, Any]]) -> None:
        starts = [task for what, task, _, _ in asked if what == "start"]
        ends = [ended for what, ended, _, _ in asked if what == "settle"]
        if ends:
            settled = self._settlement.settle(ends)
            reporting.all_ended(settled)
            self.settled(settled)
        started = self._start(starts)
        for what, subject, loop, answer in asked:
            value = started.get(subject.delivery.id) if what == "start" else None
            loop.call_soon_threadsafe(_resolve, answer, value)

    def _start(self, starts: list[Task]) -> dict[int, bool]:
        """Give each task a whole lease; return, by id, whether those still ours have expired."""
        fences: dict[float, list[Fence]] = {}
        for task in starts:
            fences.setdefault(self._lease(task.delivery.queue), []).append(task.delivery.fence)
        started: dict[int, bool] = {}
        for lease, together in fences.items():
            started.update(self._start_leases(together, lease))
        return started

    def _start_leases(self, fences: list[Fence], lease: float) -> dict[int, bool]:
        while True:
            try:
                started = leases.start(self._statements.cursor(), fences, lease=lease)
            except Exception as error:  # coroutines wait for the answers: always return some
                self._statements.close()
                if not isinstance(error, LOST) and len(fences) == 1:
                    logger.error(
                        "message %s cannot start: %s",
                        fences[0].id,
                        named(error),
                        exc_info=traced(error),
                    )
                    return {}
                if not isinstance(error, LOST):  # one row is bad; the others may start
                    return {
                        id: expired
                        for fence in fences
                        for id, expired in self._start_leases([fence], lease).items()
                    }
                self._outage.wait(error)
                if self._outage.stopped():
                    return {}
            else:
                self._outage.over()
                return started


def _resolve(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
