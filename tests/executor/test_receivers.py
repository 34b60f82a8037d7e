"""Receivers of signals: also `async def`, and objects without a name; none harms a message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.utils import translation

from django_mq import Delivery, handler
from django_mq.models import FailedAttempt
from django_mq.signals import (
    LoggedSignal,
    message_acked,
    message_started,
    worker_started,
    worker_stopped,
)
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]

SIGNALS = [message_started, message_acked, worker_started, worker_stopped]


@contextmanager
def connected(receiver: Callable[..., Any]) -> Iterator[None]:
    for signal in SIGNALS:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal in SIGNALS:
            signal.disconnect(receiver)


def handlers() -> None:
    @handler("#", queue="mail", name="plain")
    def plain(delivery: Delivery) -> None: ...

    @handler("#", queue="mail", name="unbound", atomic=False)
    def unbound(delivery: Delivery) -> None: ...

    @handler("#", queue="mail", name="coroutine")
    async def coroutine(delivery: Delivery) -> None: ...


def run_all(start: Start) -> None:
    handlers()
    for name in ("plain", "unbound", "coroutine"):
        add(handler=name)
    assert start(until_empty=True).join()


def test_receivers_may_be_coroutines(start: Start) -> None:
    told = []

    async def receiver(signal: LoggedSignal, sender: str, **data: Any) -> None:
        await asyncio.sleep(0)
        told.append((signal.name, sender))

    with connected(receiver):
        run_all(start)
    assert waiting() == set()
    for name in ("plain", "unbound", "coroutine"):
        assert told.count(("message_started", name)) == 1
        assert told.count(("message_acked", name)) == 1


def raises(error: type[BaseException], **data: Any) -> None:
    raise error


async def araises(**data: Any) -> None:
    await asyncio.sleep(0)
    raise SystemExit


class Nameless:
    def __call__(self, **data: Any) -> None:
        raise ValueError


@pytest.mark.parametrize(
    "receiver",
    [Nameless(), partial(raises, ValueError), partial(raises, SystemExit), araises],
    ids=["object", "partial", "partial that exits", "coroutine that exits"],
)
def test_a_receiver_that_fails_harms_no_message(
    start: Start, receiver: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with connected(receiver):
        run_all(start)
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events.count("receiver_failed") == 3 + 3 + 2
    assert not [each for each in caplog.records if each.name == "django.dispatch"]


def test_the_other_receivers_of_a_signal_are_called(start: Start) -> None:
    nameless, told = Nameless(), []

    def receiver(sender: str, **data: Any) -> None:
        told.append(sender)

    with connected(nameless), connected(receiver):
        run_all(start)
    assert told.count("plain") == told.count("unbound") == told.count("coroutine") == 2


def test_a_receiver_that_blocks_keeps_no_message_unsettled(start: Start) -> None:
    """Its lease is renewed no longer, and a failing queue backs off at once."""
    held: list[int] = []
    seen: list[int] = []
    started = threading.Event()

    def receiver(delivery: Delivery, **data: Any) -> None:
        assert started.wait(PATIENCE)
        unsettled = running.worker._run.parts.local_queue.unsettled.all()
        held.extend(each.id for each in unsettled if each.id == delivery.id)
        seen.append(delivery.id)

    message_acked.connect(receiver)
    try:
        handlers()
        for name in ("plain", "unbound", "coroutine"):
            add(handler=name)
        running = start(until_empty=True)
        started.set()
        assert running.join()
    finally:
        message_acked.disconnect(receiver)
    assert len(seen) == 3
    assert held == []


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "not atomic"])
def test_language_activated_by_a_receiver_ends_with_the_slice(start: Start, atomic: bool) -> None:
    """A receiver that mails in the language of a user does not change that of later handlers."""
    seen: list[str | None] = []

    @handler("#", queue="mail", name="h", atomic=atomic)
    def h(delivery: Delivery) -> None:
        seen.append(translation.get_language())

    def receiver(sender: str, **data: Any) -> None:
        translation.activate("fr")

    message_acked.connect(receiver)
    try:
        for _ in range(2):  # the first slice of a handler is one message
            add(handler="h")
        assert start(until_empty=True).join()
    finally:
        message_acked.disconnect(receiver)
    assert seen == [translation.get_language()] * 2
