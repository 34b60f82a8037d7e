"""Unique ids under concurrent producers and workers: real threads, real connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections, transaction

from django_mq import broadcast
from django_mq.models import QueuedMessage
from tests.database import second_connection

#: Seconds; longer than anything here takes, even on a busy machine.
PATIENCE = 60.0
#: Seconds until a message expires: more than the steps of a test before that take.
EXPIRES = 2.0


@pytest.fixture
def together() -> Iterator[Callable[..., Future[Any]]]:
    """Run functions in threads with separate connections."""
    with ThreadPoolExecutor(16) as pool:

        def run(function: Callable[..., Any], *args: Any) -> Future[Any]:
            def call() -> Any:
                try:
                    return function(*args)
                finally:
                    connections.close_all()

            return pool.submit(call)

        yield run


def send(n: int, option: Any = "skip", **options: Any) -> Any:
    with transaction.atomic():
        return broadcast("a.b", n, unique_id="u", on_duplicate=option, **options)


class Holder:
    """A transaction of another producer, which stays open until it is told to end."""

    def __init__(self, together: Callable[..., Future[Any]], write: Callable[[], Any]) -> None:
        self._wrote, self._end = threading.Event(), threading.Event()
        self._rollback = False
        self._write = write
        self.future = together(self._run)
        assert self._wrote.wait(PATIENCE)

    def _run(self) -> Any:
        with transaction.atomic():
            receipt = self._write()
            self._wrote.set()
            assert self._end.wait(PATIENCE)
            transaction.set_rollback(self._rollback)
        return receipt

    def end(self, *, rollback: bool = False) -> Any:
        self._rollback = rollback
        self._end.set()
        return self.future.result(PATIENCE)


def uncommitted(n: int, option: Any = "skip", **options: Any) -> Callable[[], Any]:
    return lambda: broadcast("a.b", n, unique_id="u", on_duplicate=option, **options)


def claimed() -> QueuedMessage:
    """Claim the only message, like another worker."""
    with second_connection() as other:
        other.execute(CLAIM)
    return QueuedMessage.objects.get()


CLAIM = (
    "update django_mq_queuedmessage set attempts = attempts + 1, claimed_by = 'worker:1',"
    " leased_until = now() + interval '1 minute'"
)


def sleep_until_expired() -> None:
    """Only time makes a message expire that others have locked, or of which one has a snapshot."""
    with second_connection() as other:
        other.execute(
            "select pg_sleep_until(max(expires_at) + interval '10 ms') from django_mq_queuedmessage"
        )
