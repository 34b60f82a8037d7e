"""Runs of a worker, and waits for replies, leave no descriptors open."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from django_mq import ask, handler, queues, request
from django_mq.exceptions import ReplyTimeout
from django_mq.messages import Delivery
from django_mq.requests import connection as link
from django_mq.worker import Worker
from tests.rows import add
from tests.slow import slow
from tests.worker import conftest
from tests.worker.conftest import PATIENCE, Running

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks in /proc"),
]

Start = Callable[..., Running]

RUNS = 5


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Descriptors must not wait for the garbage collector, which may run hours later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def handlers(transactional_db: None) -> None:
    """Subscribe a handler of each kind."""

    @handler("a.atomic", queue="mail", name="atomic")
    def atomic(delivery: Delivery) -> None:
        conftest.effect(delivery)

    @handler("a.unbound", queue="mail", name="unbound", atomic=False)
    def unbound(delivery: Delivery) -> None: ...

    @handler("a.coroutine", queue="mail", name="coroutine")
    async def coroutine(delivery: Delivery) -> None: ...


@pytest.mark.parametrize(
    "kinds", [("atomic", "unbound"), *slow(pytest.param(()), pytest.param(("coroutine",)))], ids=str
)
def test_runs_in_one_process_leave_none(start: Start, handlers: None, kinds: Any) -> None:
    def run() -> int:
        for kind in kinds:
            add(handler=kind, type=f"a.{kind}")
        assert start(until_empty=True).join()
        assert queues.state("mail").kind == "empty"
        return descriptors()

    run()
    before = run()
    assert [run() for _ in range(RUNS)] == [before] * RUNS


def test_a_run_that_cannot_begin_leaves_none(handlers: None, monkeypatch: Any) -> None:
    def refuse(cursor: Any) -> None:
        raise psycopg.errors.UndefinedTable("no tables")

    monkeypatch.setattr("django_mq.worker.run.poll.check_tables", refuse)

    def run() -> int:
        with pytest.raises(psycopg.errors.UndefinedTable):
            Worker().run()
        return descriptors()

    before = run()
    assert [run() for _ in range(RUNS)] == [before] * RUNS


def test_a_wait_for_a_reply_opens_no_sockets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one pair per database, however often it waits."""

    @handler("test.square", name="square")
    def square(delivery: Delivery) -> int:
        return int(delivery.payload) ** 2

    opened: list[link.SleepBreaker] = []
    init = link.SleepBreaker.__init__

    def count(self: link.SleepBreaker) -> None:
        opened.append(self)
        init(self)

    monkeypatch.setattr(link.SleepBreaker, "__init__", count)
    start()
    assert [ask("test.square", n, timeout=PATIENCE) for n in range(RUNS)] == [0, 1, 4, 9, 16]
    for _ in range(RUNS):
        with pytest.raises(ReplyTimeout):
            request("test.square", 2, after=3600).result(timeout=0.01)
    assert len(opened) <= 1
