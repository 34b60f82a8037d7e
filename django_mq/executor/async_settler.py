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
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import NamedTuple

from django_mq.conf.error_logs import log_failure
from django_mq.executor import reports
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.run_context import RunContext
from django_mq.executor.settlement import Settlement
from django_mq.executor.statements import Statements
from django_mq.executor.tasks import Task
from django_mq.executor.watchdog import Link
from django_mq.messages import Fence
from django_mq.store import leases, settle
from django_mq.store.server_errors import LOST

logger = logging.getLogger("django_mq")

#: The future result of `AsyncSettler.start_leases()`.
StartAnswer = asyncio.Future[dict[int, bool | None]]
#: Seconds until a lease is given to a message whose row another session had locked.
LOCKED_PAUSE = 0.1
#: Seconds from one settle to the next while several deliveries end in this time: far fewer commits,
#: and slots are free already.
SETTLE_INTERVAL = 0.004


class AsyncSettler(threading.Thread):
    """Starts leases and settles deliveries for the event loop, many per statement."""

    def __init__(
        self,
        context: RunContext,
        *,
        on_calls_settled: Callable[[Sequence[Task]], None],
        give_up: Callable[[Sequence[Ended], Sequence[Task]], None],
        link: Link,
    ) -> None:
        super().__init__(name="mq-settler", daemon=True)
        self._context = context
        self._outage = context.outage
        self._statements = Statements(context.alias, link=link)
        self._settlement = Settlement(self._statements, context)
        self._on_calls_settled = on_calls_settled
        self._give_up = give_up
        self._requests: queue.SimpleQueue[_StartRequest | _SettleRequest | None] = (
            queue.SimpleQueue()
        )
        # Another session has locked a row of each: they must not hold up the other requests.
        self._delayed: list[_StartRequest] = []
        self._retry_at = float("inf")
        self._settled_at = 0.0
        self._got_several = False
        self._hurry = threading.Event()

    def start_leases(self, tasks: list[Task], answer: StartAnswer) -> None:
        """Request full leases for `tasks`.

        The result of `answer` maps the ids of the messages that are still ours to whether they have
        expired; it may contain other ids. It comes once no other session has one of their rows
        locked.
        """
        self._requests.put(_StartRequest(tasks, answer))
        self._hurry.set()

    def settle(
        self, ended: Sequence[Ended], tasks: Sequence[Task], *, call_ended: bool = True
    ) -> None:
        """Request to settle `ended`, of the call of `tasks`, except lost ones.

        With `call_ended`, `on_calls_settled` is then called with `tasks`. If a bug of ours prevents
        the settle, `give_up` is called first: the leases lapse.
        """
        self._requests.put(_SettleRequest(ended, tasks, call_ended))

    def end(self) -> None:
        """End the thread after all earlier requests."""
        self._requests.put(None)
        self._hurry.set()

    def run(self) -> None:
        ending = False
        try:
            while not ending:
                requests = self._wait_for_requests()
                ending = None in requests
                self._settle([each for each in requests if isinstance(each, _SettleRequest)])
                starting = [each for each in requests if isinstance(each, _StartRequest)]
                if monotonic() >= self._retry_at:
                    starting, self._delayed = self._delayed + starting, []
                    self._retry_at = float("inf")
                self._start(starting)
        finally:
            self._statements.close()

    def _wait_for_requests(self) -> list[_StartRequest | _SettleRequest | None]:
        """Return the next requests; none if delayed ones are due before any comes."""
        requests = []
        with contextlib.suppress(queue.Empty):
            wait = max(0.0, self._retry_at - monotonic()) if self._delayed else None
            requests.append(self._requests.get(timeout=wait))
            self._let_more_come()
            while True:
                requests.append(self._requests.get_nowait())
        self._got_several = len(requests) > 1
        return requests

    def _let_more_come(self) -> None:
        """Keep SETTLE_INTERVAL if the last requests were several, but not while a call waits."""
        if self._got_several:
            self._hurry.wait(self._settled_at + SETTLE_INTERVAL - monotonic())
        self._hurry.clear()
        self._settled_at = monotonic()

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
            self._on_calls_settled(finished)
        if failure:
            self._outage.wait(failure, logged=True)

    def _settle_all(self, ended: list[Ended]) -> None:
        lost = [each for each in ended if each.settled is Settled.LOST]
        if lost:
            self._context.on_settled(lost)
            ended = [each for each in ended if each.settled is not Settled.LOST]
        # A settle tells messages apart by id, and a message may have been claimed here twice.
        claimed_twice = len({each.delivery.id for each in ended}) < len(ended)
        parts = [[each] for each in ended] if claimed_twice else [ended]
        for part in filter(None, parts):
            reports.settled(self._settlement.settle(part), self._context)

    def _start(self, requests: list[_StartRequest]) -> None:
        # A start tells messages apart by id, too: two claims of one get an answer each.
        claims = {task.delivery.fence for request in requests for task in request.tasks}
        claimed_twice = len({fence.id for fence in claims}) < len(claims)
        for part in [[each] for each in requests] if claimed_twice else [requests]:
            if part:
                self._start_together(part)

    def _start_together(self, requests: list[_StartRequest]) -> None:
        started: dict[int, bool | None] = {}
        try:
            started = self._start_all([task for request in requests for task in request.tasks])
        except Exception as error:  # a bug of ours: the coroutines wait for the answers
            log_failure("executor_failed", error, "async settler failed")
            self._statements.close()
        if locked := {id for id, expired in started.items() if expired is None}:
            self._delayed += [each for each in requests if each.has_any(locked)]
            self._retry_at = min(self._retry_at, monotonic() + LOCKED_PAUSE)
            requests = [each for each in requests if not each.has_any(locked)]
        if answers := [request.answer for request in requests]:
            answers[0].get_loop().call_soon_threadsafe(_resolve, answers, started)

    def _start_all(self, starts: list[Task]) -> dict[int, bool | None]:
        """Give each task a full lease; map the ids that are still ours to whether they expired.

        None for those that another session has locked.
        """
        fences: dict[float, list[Fence]] = {}
        for task in starts:
            fences.setdefault(self._context.lease_of(task.delivery.queue), []).append(
                task.delivery.fence
            )
        started: dict[int, bool | None] = {}
        for lease, together in fences.items():
            started.update(self._start_leases(together, lease))
        return started

    def _start_leases(self, fences: list[Fence], lease: float) -> dict[int, bool | None]:
        while True:
            try:
                cursor = self._statements.cursor()
                started = leases.start(cursor, fences, lease=lease, waits=False)
                missing = [fence for fence in fences if fence.id not in started]
                locked = settle.still_ours(cursor, missing) if missing else ()
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
                id = fences[0].id
                log_failure("start_refused", error, "message %s cannot start", id, message_id=id)
                return {}
            else:
                self._outage.record_answer()
                return {**started, **dict.fromkeys(locked)}


def _resolve(answers: list[StartAnswer], started: dict[int, bool | None]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(started)


class _StartRequest(NamedTuple):
    tasks: list[Task]
    answer: StartAnswer

    def has_any(self, ids: Collection[int]) -> bool:
        return any(task.delivery.id in ids for task in self.tasks)


class _SettleRequest(NamedTuple):
    ended: Sequence[Ended]
    tasks: Sequence[Task]
    call_ended: bool
