"""The thread that writes to the database for async handlers.

It settles deliveries that ended together in one statement, and gives a full lease to messages that
need one before they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from django_mq.executor import reports
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.outage import LOST
from django_mq.executor.run_context import RunContext
from django_mq.executor.settlement import Settlement
from django_mq.executor.statements import Statements
from django_mq.executor.tasks import Task
from django_mq.executor.watchdog import Link
from django_mq.messages import Fence
from django_mq.signals import log_failure
from django_mq.store import leases

logger = logging.getLogger("django_mq")


class AsyncSettler(threading.Thread):
    """Starts leases and settles deliveries for the event loop, many per statement."""

    def __init__(
        self,
        context: RunContext,
        *,
        on_calls_ended: Callable[[Sequence[Task]], None],
        give_up: Callable[[Sequence[Ended], Sequence[Task]], None],
        link: Link,
    ) -> None:
        super().__init__(name="mq-settler", daemon=True)
        self._context = context
        self._outage = context.outage
        self._statements = Statements(context.alias, link=link)
        self._settlement = Settlement(self._statements, context)
        self._on_calls_ended = on_calls_ended
        self._give_up = give_up
        self._requests: queue.SimpleQueue[_StartRequest | _SettleRequest | None] = (
            queue.SimpleQueue()
        )

    def start_leases(self, tasks: list[Task], answer: asyncio.Future[dict[int, bool]]) -> None:
        """Request full leases for `tasks`.

        The result of `answer` maps the ids of the messages that are still ours to whether they have
        expired; it may contain other ids.
        """
        self._requests.put(_StartRequest(tasks, answer))

    def settle(
        self, ended: Sequence[Ended], tasks: Sequence[Task], *, call_ended: bool = True
    ) -> None:
        """Request to settle `ended`, of the call of `tasks`, except lost ones.

        With `call_ended`, `on_calls_ended` is then called with `tasks`. If a bug of ours prevents
        the settle, `give_up` is called first: the leases lapse.
        """
        self._requests.put(_SettleRequest(ended, tasks, call_ended))

    def end(self) -> None:
        """End the thread after all earlier requests."""
        self._requests.put(None)

    def run(self) -> None:
        ending = False
        try:
            while not ending:
                requests = [self._requests.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        requests.append(self._requests.get_nowait())
                ending = None in requests
                self._settle([each for each in requests if isinstance(each, _SettleRequest)])
                self._start([each for each in requests if isinstance(each, _StartRequest)])
        finally:
            self._statements.close()

    def _settle(self, requests: list[_SettleRequest]) -> None:
        ended = [each for request in requests for each in request.ended]
        failure: Exception | None = None
        try:
            self._settle_all(ended)
        except Exception as error:  # a bug of ours: the other handlers must not wait for ever
            log_failure("executor_failed", failure := error, "async settler failed")
            self._statements.close()
            self._give_up(ended, [task for request in requests for task in request.tasks])
        if finished := [
            task for request in requests if request.call_ended for task in request.tasks
        ]:
            self._on_calls_ended(finished)
        if failure:
            self._outage.wait(failure, logged=True)

    def _settle_all(self, ended: list[Ended]) -> None:
        lost = [each for each in ended if each.settled is Settled.LOST]
        if lost:
            self._context.on_settled(lost)
            ended = [each for each in ended if each.settled is not Settled.LOST]
        if ended:
            settled = self._settlement.settle(ended)
            reports.all_ended(settled)
            self._context.on_settled(settled)

    def _start(self, requests: list[_StartRequest]) -> None:
        if not requests:
            return
        started: dict[int, bool] = {}
        try:
            started = self._start_all([task for request in requests for task in request.tasks])
        except Exception as error:  # a bug of ours: the coroutines wait for the answers
            log_failure("executor_failed", error, "async settler failed")
            self._statements.close()
        answers = [request.answer for request in requests]
        answers[0].get_loop().call_soon_threadsafe(_resolve, answers, started)

    def _start_all(self, starts: list[Task]) -> dict[int, bool]:
        """Give each task a full lease; map the ids that are still ours to whether they expired."""
        fences: dict[float, list[Fence]] = {}
        for task in starts:
            fences.setdefault(self._context.lease_of(task.delivery.queue), []).append(
                task.delivery.fence
            )
        started: dict[int, bool] = {}
        for lease, together in fences.items():
            started.update(self._start_leases(together, lease))
        return started

    def _start_leases(self, fences: list[Fence], lease: float) -> dict[int, bool]:
        while True:
            try:
                started = leases.start(self._statements.cursor(), fences, lease=lease)
            except LOST as error:
                self._statements.close()
                self._outage.wait(error)
                if self._outage.stopped():
                    return {}
            except Exception as error:  # coroutines wait for the answers: always return some
                self._statements.close()
                if len(fences) > 1:  # one row is bad; the others may still start
                    parts = (self._start_leases([fence], lease) for fence in fences)
                    return {id: expired for part in parts for id, expired in part.items()}
                log_failure("start_refused", error, "message %s cannot start", fences[0].id)
                return {}
            else:
                self._outage.end()
                return started


def _resolve(answers: list[asyncio.Future[dict[int, bool]]], started: dict[int, bool]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(started)


class _StartRequest(NamedTuple):
    tasks: list[Task]
    answer: asyncio.Future[dict[int, bool]]


class _SettleRequest(NamedTuple):
    ended: Sequence[Ended]
    tasks: Sequence[Task]
    call_ended: bool
