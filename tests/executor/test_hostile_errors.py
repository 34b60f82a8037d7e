"""Exceptions of handlers whose attributes raise: each fails its own message, as any error does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_mq import RetryPolicy, fixed, handler
from django_mq.models import QueuedMessage
from tests.rows import add, stored
from tests.slow import mostly_slow
from tests.worker.conftest import Running, attempts_of, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


class Delegates(Exception):
    """A usual mistake: before `response` is set, this calls itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response, name)


class NoState(Exception):
    @property
    def sqlstate(self) -> str:
        raise RuntimeError


class NotAState(Exception):
    sqlstate: Any = []  # cannot be hashed


class NoClass(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError


KINDS = [Delegates, NoState, NotAState, NoClass, NoAttributes]


def caused_by(error: Exception) -> Exception:
    found = ValueError()
    found.__cause__ = error
    return found


def subscribe(way: str, function: Callable[[Any], None], **options: Any) -> None:
    """Subscribe a handler of one of the four ways to run."""
    options = {"queue": "mail", "name": "h", **options}
    if way == "async":

        async def h(delivery: Any) -> None:
            function(delivery)

        handler("#", **options)(h)
    elif way == "list":
        handler("#", batch=True, max_batch=1, atomic=False, **options)(lambda got: function(got[0]))
    else:
        handler("#", atomic=way == "atomic", **options)(function)


@pytest.mark.parametrize(
    ("way", "max_attempts"), mostly_slow(["atomic", "non-atomic", "async", "list"], [2, 1])
)
def test_it_fails_its_own_message(start: Start, settings: Any, way: str, max_attempts: int) -> None:
    """Otherwise the executor would fail, and leave its claimed messages to their leases."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": {"maximum": 0}}}}
    errors = [kind() for kind in KINDS] + [caused_by(kind()) for kind in KINDS]
    left = iter(errors)

    def run(delivery: Any) -> None:
        if error := next(left, None):
            raise error

    subscribe(way, run, retry=RetryPolicy(max_attempts, backoff=fixed(60)))
    failing: list[QueuedMessage] = [
        add(handler="h", max_attempts=max_attempts) for _ in range(len(errors))
    ]
    behind = add(handler="h")
    assert start(until_empty=True, threads=1).join()
    assert behind.pk not in waiting()
    for message in failing:
        after = stored(message)
        assert (after.attempts, after.leased_until) == (1, None)
        assert (after.dead_at is not None) == (max_attempts == 1)
        assert len(attempts_of(message)) == 1
