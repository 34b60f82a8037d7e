"""A handler's TaskGroup wraps what its tasks raise, also Retry, Snooze and Reject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from django_mq import Reject, Retry, RetryPolicy, Snooze, fixed, handler
from django_mq.models import FailedAttempt
from django_mq.testing import deliver, drain
from tests.rows import add, stored
from tests.worker.conftest import Bench, Running, Said, attempts_of

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


async def group(*errors: BaseException) -> None:
    """Raise `errors` in tasks of a group, which is within another group."""

    async def fail(error: BaseException) -> None:
        raise error

    async def inner() -> None:
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(fail(error))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(inner())


@pytest.fixture
def raised() -> list[BaseException]:
    """The exceptions that the tasks of the handler raise."""
    return []


@pytest.fixture(autouse=True)
def h(registry: object, raised: list[BaseException]) -> Any:
    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=3, backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        await group(*raised)

    return h


def test_a_rejected_message_is_dead(start: Start, said: Said, raised: list[BaseException]) -> None:
    raised.append(Reject("no such mailbox"))
    message = add(handler="h")
    assert start(until_empty=True).join()
    assert stored(message).dead_reason == "no such mailbox"
    assert attempts_of(message) == ["django_mq.exceptions.Reject"]
    [error] = [data["error"] for name, _, data in said.all if name == "message_dead"]
    assert error is raised[0]


def test_a_snoozed_message_keeps_its_attempt(start: Start, raised: list[BaseException]) -> None:
    raised.append(Snooze(600, reason="the service is busy"))
    message = add(handler="h")
    assert start(until_empty=True).join()
    assert stored(message).attempts == 0
    assert message.last_error == "Snooze: the service is busy"


def test_two_errors_are_a_failure(start: Start, raised: list[BaseException]) -> None:
    """Which of them would decide?"""
    raised += [Reject("a"), Snooze(600)]
    message = add(handler="h")
    assert start(until_empty=True).join()
    assert stored(message).dead_at is None
    assert attempts_of(message) == ["ExceptionGroup"]


def test_a_plain_function_that_runs_a_loop(bench: Bench) -> None:
    @handler("b", queue="mail", name="plain")
    def plain(delivery: Any) -> None:
        asyncio.run(group(Retry(60)))

    message = add(handler="plain")
    bench.run_all(bench.claim())
    assert FailedAttempt.objects.get().error_class == "django_mq.exceptions.Retry"
    assert stored(message).attempts == 1


def test_the_helpers_for_tests(raised: list[BaseException], h: Any) -> None:
    cause = ValueError("why")
    reject = Reject("no")
    reject.__cause__ = cause
    raised.append(reject)
    with pytest.raises(Reject) as caught:
        deliver(h)
    assert caught.value.__cause__ is cause
    add(handler="h")
    assert drain() == 1  # a message that its handler rejects has not failed
    raised.append(ValueError())
    with pytest.raises(ExceptionGroup):
        deliver(h)
