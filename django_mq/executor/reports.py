"""Report each delivery: a count, a signal and a log line."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from django_mq import signals
from django_mq.conf import get_settings
from django_mq.conf.error_logs import error_name, log_failure
from django_mq.conf.local_time import local_text
from django_mq.exceptions import TooManyHops
from django_mq.executor import worker_totals
from django_mq.executor.ended import ACKED, DONE, Ended, Settled
from django_mq.executor.run_context import RunContext
from django_mq.executor.worker_totals import queued_for
from django_mq.messages import Delivery
from django_mq.policy.durations import precise_span
from django_mq.policy.error_text import Failure
from django_mq.policy.outcomes import EXHAUSTED, DeadLettered, Retried, Snoozed
from django_mq.policy.plain_text import one_line
from django_mq.policy.redacted_error import loggable_text
from django_mq.policy.stack import Frame

logger = logging.getLogger("django_mq")

#: The most coroutines that a log line names.
MAX_NAMES = 3
#: Called with each end of a Django task's delivery, after the commit that settled it.
django_task_observers: list[Callable[[Ended], None]] = []


def started(delivery: Delivery) -> None:
    """Report that the handler of `delivery` is about to start."""
    signals.announce(signals.message_started, delivery, "started", queued_for=queued_for(delivery))


async def started_on_loop(delivery: Delivery) -> None:
    """Like `started()`, on a thread that runs an event loop."""
    await signals.announce_on_loop(
        signals.message_started, delivery, "started", queued_for=queued_for(delivery)
    )


def settled(ended: Sequence[Ended], context: RunContext) -> None:
    """Tell the worker of deliveries whose end is committed, then report them.

    In this order, since a receiver may block: renewals end, and a failing queue backs off.
    """
    context.on_settled(ended)
    all_ended(ended)


def all_ended(ended: Iterable[Ended]) -> None:
    """Report deliveries after the commit that settled them; lost ones are reported elsewhere."""
    ended = [each for each in ended if each.settled is not Settled.LOST]
    worker_totals.count(ended)
    if django_task_observers:
        for each in ended:
            if each.delivery._row.wants_result and each.delivery._row.is_django_task:
                for tell in django_task_observers:
                    tell(each)
    announced = ended
    if not signals.is_observed(signals.message_acked):
        announced = [each for each in ended if each.settled is not ACKED]
    for each in announced:
        _say(each)
    _say_held([each for each in announced if each.settled is Settled.HELD])


def _say(ended: Ended) -> None:
    delivery, outcome = ended.delivery, ended.outcome
    if ended.settled in DONE:
        _announce(signals.message_acked, ended, f"acked after {ended.seconds:.3f} s")
    elif isinstance(outcome, DeadLettered):
        # A reason other than EXHAUSTED is the text of the error.
        exhausted, failure = outcome.reason == EXHAUSTED, outcome.failure
        error = _loggable_failure(failure) if exhausted else failure.error_class
        text = f"is dead: {_reason(outcome, ended.error)} ({error})"
        _announce(signals.message_dead, ended, text, reason=outcome.reason)
    elif ended.settled is Settled.DEAD_UNSTARTED:
        text = f"is dead: {ended.reason}"
        _announce(signals.message_dead, ended, text, reason=ended.reason, started=False)
    elif isinstance(outcome, Snoozed):
        _warn_of_wait(delivery, outcome)
    elif isinstance(outcome, Retried):
        _warn_of_wait(delivery, outcome)
        text = f"failed ({_loggable_failure(outcome.failure)}); again {_when(outcome.after)}"
        _announce(signals.message_retried, ended, text, after=outcome.after)


def _say_held(ended: Sequence[Ended]) -> None:
    """Log one line for those alike: a worker may have no handler for a whole backlog."""
    alike = defaultdict[tuple[str, str, str], list[int]](list)
    for each in ended:
        alike[each.delivery.type, each.delivery.queue, each.reason].append(each.delivery.id)
    for (type, queue, reason), (first, *others) in alike.items():
        logger.warning(
            "message %s%s (%s, queue %s) %s held: %s",
            first,
            f" and {len(others):,} like it" if others else "",
            type,
            queue,
            "are" if others else "is",
            reason,
            extra={
                "event": "message_held",
                "message_id": first,
                "queue": queue,
                "type": type,
                "messages": 1 + len(others),
            },
        )


def _warn_of_wait(delivery: Delivery, outcome: Retried | Snoozed) -> None:
    if outcome.warning:
        logger.warning(
            "message %s: %s",
            delivery.id,
            outcome.warning,
            extra={"event": "bad_backoff", "message_id": delivery.id, "queue": delivery.queue},
        )


def _reason(outcome: DeadLettered, error: BaseException | None) -> str:
    """Return the reason as logged; the reason of a Reject is the handler's own text."""
    if outcome.reason == EXHAUSTED or _texts():
        return outcome.reason
    if issubclass(type(error), TooManyHops):
        return TooManyHops.__name__
    plain = loggable_text(error)
    return one_line(f"InvalidPayload: {plain}") if plain else "rejected"


def _texts() -> bool:
    return get_settings().log_error_texts


def _loggable_failure(failure: Failure) -> str:
    """Return a failure as logged, without its text, which is in the row."""
    return failure.summary if _texts() else failure.error_class


def _announce(signal: signals.LoggedSignal, ended: Ended, text: str, **more: Any) -> None:
    if signal is not signals.message_acked or signals.is_observed(signal):
        signals.announce(
            signal,
            ended.delivery,
            text,
            duration=ended.seconds,
            queued_for=queued_for(ended.delivery),
            error=ended.error,
            **more,
        )


def failed_after_finish(delivery: Delivery, error: BaseException) -> None:
    """Report a handler that raised after `finish()`: the message is done, the error is a bug."""
    log_failure(
        "failed_after_finish",
        error,
        "message %s (queue %s, handler %s) is finished, but its handler raised afterwards",
        delivery.id,
        delivery.queue,
        delivery.handler,
        message_id=delivery.id,
        queue=delivery.queue,
    )


def lease_lost(delivery: Delivery) -> None:
    """Report a delivery whose lease was lost: its end is not recorded."""
    logger.warning(
        "message %s (queue %s, attempt %s): LeaseLost, it was taken over or removed;"
        " its end was not recorded. The writes of an atomic handler are undone; what a"
        " non-atomic one has committed stays",
        delivery.id,
        delivery.queue,
        delivery.attempt,
        extra={"event": "lease_lost", "message_id": delivery.id, "queue": delivery.queue},
    )


def loop_blocked(delivery: Delivery | None, frames: Sequence[Frame], seconds: float) -> None:
    """Report that the event loop has not moved for `seconds`, while `delivery` runs on it.

    `frames` are the calls of the handler; `delivery` is None if a task that a handler created runs.
    """
    runs = "a task of an async handler"
    if delivery is not None:
        runs = f"message {delivery.id} (queue {delivery.queue}, handler {delivery.handler})"
    # The handler's own line and, if that calls a library, the one that waits.
    outer_and_inner = dict.fromkeys([*frames[:1], *frames[-1:]])
    places = [f"{file}:{line} in {name}" for file, line, name in outer_and_inner]
    logger.warning(
        "an async handler blocks the event loop: it has not moved for %.0f s, and %s runs on it%s;"
        " make blocking calls with sync_to_async() or asyncio.to_thread()",
        seconds,
        runs,
        f" ({', '.join(places)})" if places else "",
        extra={
            "event": "loop_blocked",
            "message_id": delivery.id if delivery else None,
            "queue": delivery.queue if delivery else None,
        },
    )


def tasks_left(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Report that `tasks` still run on the event loop after the handlers, and are cancelled."""
    coroutines = (task.get_coro() for task in tasks)
    names = sorted({getattr(each, "__qualname__", type(each).__name__) for each in coroutines})
    logger.warning(
        "%s that async handlers left running %s cancelled at the end of the drain (%s%s); a message"
        " is done when its handler returns, so handlers should await their tasks",
        "1 task" if len(tasks) == 1 else f"{len(tasks):,} tasks",
        "was" if len(tasks) == 1 else "were",
        ", ".join(names[:MAX_NAMES]),
        ", ..." if names[MAX_NAMES:] else "",
        extra={"event": "tasks_left", "tasks": len(tasks)},
    )


def refused(delivery: Delivery, error: BaseException, *, fails: bool) -> None:
    """Report a delivery that the database refuses to settle; `fails`: its attempt fails instead."""
    logger.error(
        "message %s (queue %s, attempt %s): the database refuses to settle it (%s); %s",
        delivery.id,
        delivery.queue,
        delivery.attempt,
        error_name(error),
        "the attempt fails" if fails else "its lease lapses, and the attempt counts",
        extra={"event": "settle_refused", "message_id": delivery.id, "queue": delivery.queue},
    )


def _when(after: float | datetime) -> str:
    """Return when a message runs again, as text.

    >>> _when(0.0), _when(7200.0)
    ('at once', 'in 2 h')
    """
    if isinstance(after, datetime):
        return f"at {local_text(after)}"
    return f"in {precise_span(after)}" if after else "at once"
