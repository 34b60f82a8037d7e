"""Run due messages in the current thread, on the current connection; make more messages due."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Literal, overload

from django.conf import settings as django_settings
from django.core import mail
from django.db import transaction

from django_mq.conf import get_settings
from django_mq.executor.watched_connection import is_watched
from django_mq.handlers import all_handlers, allowed_queues
from django_mq.outbox import backlog
from django_mq.outbox.blocks import in_own_atomic
from django_mq.outbox.schedules.declaring import declare_all
from django_mq.outbox.schedules.firing import fire_until
from django_mq.outbox.send import queue_connection
from django_mq.policy.column_bounds import MAX_SPAN_SECONDS
from django_mq.policy.names import check_name
from django_mq.policy.similar_names import similar
from django_mq.queues.scheduling import no_schedule
from django_mq.requests.reply_query import test_runners
from django_mq.store import Cursor, schedules, testing
from django_mq.testing.on_loop import refuse_on_loop
from django_mq.values import When, checked_when, short_repr
from django_mq.worker.inline_failures import InlineFailure, add_note
from django_mq.worker.inline_run import InlineRun

#: How to treat the errors that handlers raise.
Errors = Literal["raise", "keep"]


IN_ATOMIC = """\
an atomic() block is open on the database {alias!r}, in which no worker would see your messages: \
call drain() after the block, where they are committed. The block that TestCase opens does not \
count"""


OUTSIDE_TESTS = """\
{what} is for tests, and DEBUG is off without a test runner, so these may be real messages. Run \
them with `manage.py mq_worker --until-empty`; queues.run_now() makes them due"""


class HandlerErrors(list[BaseException]):
    """The errors that handlers raised, in order; `deliveries` is the number of deliveries."""

    deliveries: int = 0


@overload
def drain(
    queue: str | None = None, *, errors: Literal["raise"] = "raise", using: str | None = None
) -> int: ...
@overload
def drain(
    queue: str | None = None, *, errors: Literal["keep"], using: str | None = None
) -> HandlerErrors: ...
def drain(
    queue: str | None = None, *, errors: Errors = "raise", using: str | None = None
) -> int | HandlerErrors:
    """Run every due message, in `queue` or in all queues, and the messages broadcast by these.

    Handlers run here, on this connection, through the worker's own code: failed messages are
    retried or dead-lettered, and `FailedAttempt` rows are written. Delayed and retrying messages
    stay: see `due()`. A queue with `backoff` stops when a handler fails, until `due()` ends its
    wait. Timeouts are not enforced. Open operations (`queues.operate()`) are carried out first.

    Returns the number of deliveries. If handlers failed, it raises the first error once nothing
    more is due, with a note that names the message, handler and attempt. With `errors="keep"` it
    returns all errors instead, as a list whose `deliveries` is the number of deliveries. If nothing
    ran, and no handler uses `queue` but others use one of a similar name, it warns.

    A handler that raises Retry, Snooze or Reject has not failed, except by a Retry on the last
    attempt, which leaves the message dead.

    KeyboardInterrupt, and HandlerBrokeTransaction if a handler ended the transaction of a TestCase,
    are raised at once, whatever `errors` says. Raises RuntimeError inside an `atomic()` block of
    your own, and where DEBUG is off and no test runner runs.
    """
    refuse_on_loop("drain")
    _refuse_outside_tests("drain()")
    _check_errors(errors)
    if queue is not None:
        check_name(queue, "queue")
    inline = _inline_run(using, queue)
    deliveries = inline.run()
    backlog.clear()
    if queue is not None and not deliveries:
        _warn_of_typo(queue)
    if errors == "keep":
        kept = HandlerErrors(each.error for each in inline.failed)
        kept.deliveries = deliveries
        return kept
    _raise_first(inline.failed, 'drain(errors="keep") returns all errors')
    return deliveries


@contextmanager
def answering(*, errors: Errors = "raise", using: str | None = None) -> Iterator[HandlerErrors]:
    """Run everything that is due whenever the block waits for a reply, so that `ask()` gets one.

    with answering():
        response = self.client.get("/friends/")  # a view that asks

    The requesting code sees a handler's error as its RemoteError. Other errors, because the message
    is retried or its result was not requested, are collected: the first is raised at the end of the
    block, as in `drain()`. If the block itself raises, its exception gets a note for each collected
    error. With `errors="keep"` they are only in the list that `as` binds.
    """
    _refuse_outside_tests("answering()")
    _check_errors(errors)
    seen = HandlerErrors()
    failed: list[InlineFailure] = []

    def run() -> None:
        inline = _inline_run(using, None)
        try:
            seen.deliveries += inline.run()
        finally:
            backlog.clear()
            unheard = [each for each in inline.failed if not each.answered]
            failed.extend(unheard)
            seen.extend(each.error for each in unheard)

    test_runners.append(run)
    try:
        yield seen
    except BaseException as error:
        for each in seen:
            if each is not error:
                notes = "; ".join(getattr(each, "__notes__", ()))
                add_note(error, f"while answering: {type(each).__name__}: {each}; {notes}")
        raise
    finally:
        test_runners.remove(run)
    if errors == "raise":
        _raise_first(failed, 'answering(errors="keep") gives the block all errors')


def _warn_of_typo(queue: str) -> None:
    """Warn that no handler here uses `queue`, if it is probably misspelt."""
    settings, found = get_settings(), all_handlers()
    known = {name for each in found for name in allowed_queues(each, settings)}
    known |= {settings.default_queue, *settings.queues}
    if queue in known or any(each.any_queue for each in found):
        return  # any name may be that of a queue that only tasks use
    if near := similar(queue, known):
        warnings.warn(
            f"no handler uses the queue {queue!r}: did you mean {' or '.join(map(repr, near))}?",
            stacklevel=3,
        )


def _inline_run(using: str | None, queue: str | None) -> InlineRun:
    connection = queue_connection(using)
    # If a handler is running in a drain, another drain raises an error of its own.
    if in_own_atomic(connection) and not is_watched(connection):
        raise RuntimeError(IN_ATOMIC.format(alias=connection.alias))
    return InlineRun(connection, queue=queue)


def _refuse_outside_tests(what: str) -> None:
    # Django's test runners, and pytest-django, leave an `outbox` in every process. The variable is
    # that of pytest without pytest-django; processes that its tests start inherit it.
    is_test = hasattr(mail, "outbox") or "PYTEST_CURRENT_TEST" in os.environ
    if not django_settings.DEBUG and not is_test:
        raise RuntimeError(OUTSIDE_TESTS.format(what=what))


def _check_errors(errors: object) -> None:
    if errors not in ("raise", "keep"):
        raise ValueError(f'errors must be "raise" or "keep", not {short_repr(errors)}')


def _raise_first(failed: Sequence[InlineFailure], all_of_them: str) -> None:
    if not failed:
        return
    if more := len(failed) - 1:
        attempts = "1 more attempt" if more == 1 else f"{more} more attempts"
        add_note(failed[0].error, f"{attempts} failed meanwhile; {all_of_them}")
    raise failed[0].error


def due(
    queue: str | None = None,
    *,
    until: When | None = None,
    schedule: str | None = None,
    using: str | None = None,
) -> int:
    """Make delayed, retrying and held messages due now, as if time had passed; return how many.

    Also ends the waits of queues that back off. With `until` (seconds or a timedelta from now, or
    an aware datetime), only messages due by then, and waits that are over by then.
    Schedules move, too: declarations of `periodic()` are stored as a worker stores them, and each
    time up to `until` is broadcast, regardless of `queue`; those messages count. With `schedule`,
    the name of one, the others stay. Then call `drain()`.

    Raises the errors of such a broadcast, InvalidName for a bad `queue`, ValueError for a bad
    `until` or an unknown `schedule`, and RuntimeError where DEBUG is off and no test runner runs.

        due(until=timedelta(days=1))
    """
    refuse_on_loop("due")
    _refuse_outside_tests("due()")
    if queue is not None:
        check_name(queue, "queue")
    settings = get_settings()
    connection = queue_connection(using)
    if until is None:
        if schedule is not None:
            raise ValueError("schedule= moves a schedule to a time: give until=, too")
        with connection.cursor() as cursor:
            return testing.make_due(cursor, queue=queue)
    when = checked_when(until)
    if not isinstance(when, datetime) and when > MAX_SPAN_SECONDS:
        raise ValueError(
            f"{short_repr(until)} is not a valid wait: give at most a century, in seconds"
        )

    @contextmanager
    def block() -> Iterator[Cursor]:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            yield cursor

    declare_all(block, settings)
    with block() as own:
        if not isinstance(when, datetime):
            when = schedules.now(own) + timedelta(seconds=when)
        if schedule is not None and schedule not in (known := schedules.names(own)):
            raise ValueError(no_schedule(schedule, known))
        broadcast = fire_until(own, connection.alias, when, schedule=schedule)
        return broadcast + testing.make_due(own, queue=queue, until=when)
