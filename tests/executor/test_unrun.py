"""A handler whose code nobody runs, because something wraps it, fails: its message is not lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from django_mq import handler
from django_mq.models import FailedAttempt
from django_mq.testing import deliver
from tests.rows import add
from tests.slow import mostly_slow
from tests.worker.conftest import Running

pytestmark = pytest.mark.django_db(transaction=True)


def generator(delivery: Any) -> Any:
    yield


async def async_generator(delivery: Any) -> Any:
    yield


async def coroutine(delivery: Any) -> None: ...


def wrapped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(function)
    def wrapper(delivery: Any) -> Any:
        return function(delivery)

    return wrapper


def awaited(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(function)
    async def wrapper(delivery: Any) -> Any:
        return function(delivery)

    return wrapper


@pytest.mark.parametrize(
    ("function", "wrap"), mostly_slow([generator, async_generator, coroutine], [wrapped, awaited])
)
def test_handler_that_did_not_run_has_failed(
    start: Callable[..., Running], wrap: Callable[..., Any], function: Any
) -> None:
    what = "a coroutine" if function is coroutine else "a generator"
    handler("#", queue="mail", name="h")(wrap(function))
    message = add(handler="h", max_attempts=1)
    assert start(until_empty=True).join()
    [failed] = FailedAttempt.objects.filter(message_id=message.pk)
    assert (failed.error_class, what in failed.error_text) == ("TypeError", True)
    with pytest.raises(TypeError, match=f"returned {what}"):
        deliver("h")
