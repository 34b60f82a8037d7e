"""One call of a handler outside any transaction: its argument, and how its messages ended.

A batch handler may give each message of its list a verdict: fail, retry, snooze or reject. Those
without one are acked when it returns, and fail when it raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

from django_mq.exceptions import Reject, Retry, Snooze, UnreadablePayload
from django_mq.executor import forks, replies, reports
from django_mq.executor.call_timeout import CallTimeout, Timeout
from django_mq.executor.calls import check_result, surrounded, surroundings
from django_mq.executor.ended import ACKED, Ended, FailureEnd, Settled
from django_mq.executor.leased_delivery import LeasedDelivery
from django_mq.executor.tasks import Line, Task
from django_mq.messages import Delivery, Fence
from django_mq.values import When

P = ParamSpec("P")
T = TypeVar("T")


def leased_call(
    tasks: Sequence[Task], *, alias: str, lease: float, timeout: CallTimeout
) -> LeasedCall:
    """Return the call of the handler of `tasks`; only a batch handler has several."""
    if tasks[0].handler.batch:
        return BatchCall(tasks, alias=alias, lease=lease, timeout=timeout)
    claimed = tasks[0].delivery
    return SingleCall(LeasedDelivery(claimed, alias=alias, lease=lease, timeout=timeout))


async def result_of(function: Callable[[Any], Any], call: LeasedCall) -> Any:
    """Return the result of a coroutine function, encoded if a result was requested."""
    if not call.argument:
        return None  # no message of the list can be read
    with forks.ForkBarrier(), surrounded(call.argument) if surroundings else nullcontext():
        result = await function(call.argument)
    if result is not None:
        check_result(result, call.argument)
    if any(each._row.wants_result for each in call.deliveries):
        result = replies.encoded(result, call.argument)
    return result


class SingleCall:
    """The call of a handler that gets one delivery."""

    def __init__(self, delivery: LeasedDelivery) -> None:
        self.argument = delivery
        self.deliveries = [delivery]

    def end(
        self, failure_end: FailureEnd, result: Any, error: BaseException | None, seconds: float
    ) -> list[Ended]:
        """Return how the delivery ended; its handler may have called `finish()`."""
        delivery = self.argument
        if delivery.finished:
            if error is not None:
                reports.failed_after_finish(delivery, error)
            return [Ended(delivery, Settled.FINISHED, result, seconds, error=error)]
        if error is None:
            return [Ended(delivery, ACKED, result, seconds)]
        return [failure_end(delivery, error, seconds)]


class BatchCall:
    """The call of a batch handler; its `argument` is empty if no message can be read."""

    def __init__(
        self, tasks: Sequence[Task], *, alias: str, lease: float, timeout: CallTimeout
    ) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._ended = False
        self._lines: list[Line | None] = [task.line for task in tasks]
        self._verdicts: dict[int, BaseException] = {}
        fences = [task.delivery.fence for task in tasks]
        self.deliveries = [
            BatchDelivery(
                task.delivery,
                alias=alias,
                lease=lease,
                timeout=timeout,
                on_verdict=self.record_verdict,
                fences=fences,
            )
            for task in tasks
        ]
        self.argument: list[Delivery] = [
            each for each in self.deliveries if self._is_readable(each)
        ]

    def _is_readable(self, delivery: BatchDelivery) -> bool:
        """Return whether `delivery` can be decoded; if not, the others run without it."""
        try:
            _ = delivery.payload, delivery.metadata
        except UnreadablePayload as error:
            delivery.fail(error)
            return False
        return True

    def record_verdict(self, delivery: BatchDelivery, error: BaseException) -> None:
        """End `delivery` with `error` when the call ends. Raises LeaseLost if it has ended."""
        with self._lock:
            if self._ended:
                raise delivery._lost()
            self._verdicts[delivery.id] = error
        self._timeout.judged(delivery.id)

    def end(
        self, failure_end: FailureEnd, result: Any, error: BaseException | None, seconds: float
    ) -> list[Ended]:
        with self._lock:
            self._ended = True
        ended: list[Ended] = []
        halted_lines: set[Line] = set()
        for delivery, line in zip(self.deliveries, self._lines, strict=True):
            verdict = self._verdicts.get(delivery.id, error)
            if line in halted_lines:  # done or not, it comes after the message that failed
                ended.append(Ended(delivery, Settled.RELEASED))
            elif verdict is None:
                ended.append(Ended(delivery, ACKED, result, seconds))
            else:
                ended.append(failure_end(delivery, verdict, seconds))
                halted_lines.update([] if line is None else [line])
        return ended


LeasedCall = SingleCall | BatchCall


class BatchDelivery(LeasedDelivery):
    """A delivery in the list of a batch handler outside transactions: judged individually."""

    __slots__ = ("_fences", "_on_verdict")

    _can_finish: ClassVar[bool] = False

    def __init__(
        self,
        claimed: Delivery,
        *,
        alias: str,
        lease: float,
        timeout: Timeout,
        on_verdict: Callable[[BatchDelivery, BaseException], None],
        fences: Sequence[Fence],
    ) -> None:
        super().__init__(claimed, alias=alias, lease=lease, timeout=timeout)
        self._on_verdict = on_verdict
        self._fences = fences

    def fail(self, error: Exception | str) -> None:
        if isinstance(error, str):
            error = Exception(error)
        if not isinstance(error, Exception):
            raise TypeError(f"fail({error!r}): give an exception or a text, which operators see")
        self._on_verdict(self, error)

    def retry(self, after: When | None = None) -> None:
        self._on_verdict(self, Retry(after))

    def snooze(self, after: When, backoff: bool = False, reason: str = "") -> None:
        self._on_verdict(self, Snooze(after, backoff=backoff, reason=reason))

    def reject(self, reason: str = "rejected") -> None:
        self._on_verdict(self, Reject(reason))

    def finish(self, result: Any = None) -> AbstractContextManager[None]:
        self._refuse("finish()")

    async def afinish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._refuse("afinish()")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what} is for handlers that get one delivery: the messages of a batch are acked"
            f" together when {self.handler} returns"
        )

    def _call_fences(self) -> list[Fence]:
        return list(self._fences)


def split_started(
    tasks: Sequence[Task], started: Mapping[int, bool | None], *, asked_at: float
) -> tuple[list[Ended], list[Task]]:
    """Split `tasks` into the ends of tasks that must not run, and the tasks to run.

    `started` maps the id of each message that is still ours to whether it has expired. Their leases
    were renewed; `asked_at` is when, by the lease clock. If a message does not run, no later
    message of its line runs.
    """
    barred: list[Ended] = []
    ready: list[Task] = []
    halted_lines: set[Line] = set()
    for task in tasks:
        expired = started.get(task.delivery.id)
        if task.line in halted_lines:
            settled, reason = Settled.RELEASED, ""
        elif expired is None:
            settled, reason = Settled.LOST, ""
        elif expired:
            settled, reason = Settled.DEAD_UNSTARTED, "expired"
        else:
            task.delivery._leased_at = max(task.delivery._leased_at, asked_at)
            ready.append(task)
            continue
        barred.append(Ended(task.delivery, settled, reason=reason))
        if task.line is not None:
            halted_lines.add(task.line)
    return barred, ready
