"""Workers in threads of the test process, on real connections; each one started is also stopped."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import DEFAULT_DB_ALIAS, connection, connections

from django_mq import handlers, signals
from django_mq.conf import get_settings
from django_mq.executor.connections import plain_connection
from django_mq.executor.ended import Ended, any_row_kept
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.outage import Outage
from django_mq.executor.retry_policies import policies
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard import Scoreboard
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.executor.slices import SliceRunner
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Task
from django_mq.messages import LONG_AGO, Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import claim
from django_mq.store.claim import Lane
from django_mq.worker import Worker
from django_mq.worker.resolver import line_of
from testproject.shop.models import Product
from tests.database import second_connection
from tests.rows import add_all
from tests.slow import slow
from tests.worker.proxy import Proxy
from tests.worker.service import Service

#: Seconds; longer than anything here takes, even on a busy machine.
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def registry() -> Iterator[handlers.Registry]:
    """Only the handlers of the test exist."""
    with handlers.isolated() as registry:
        yield registry


def effect(delivery: Delivery) -> None:
    """Write a row for a handler's message; the database would refuse a second one."""
    Product.objects.create(name=f"message {delivery.id}", price=1)


def effects() -> set[int]:
    """Return the ids of the messages whose effect is committed."""
    with second_connection() as other:
        names = other.execute("select name from shop_product").fetchall()
    return {int(name.split()[1]) for (name,) in names}


def waiting() -> set[int]:
    """Return the ids of the remaining messages, whatever their state."""
    with second_connection() as other:
        return {id for (id,) in other.execute("select id from django_mq_queuedmessage").fetchall()}


def ids(messages: Sequence[QueuedMessage]) -> set[int]:
    return {message.pk for message in messages}


def attempts_of(message: QueuedMessage) -> list[str]:
    """Return the error classes of the failed attempts of a message."""
    found = FailedAttempt.objects.filter(message_id=message.pk).order_by("attempt")
    return [each.error_class for each in found]


class Told:
    """A callback that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class Said:
    """The sent signals, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Any, dict[str, Any]]] = []
        self._changed = threading.Condition()

    def hear(self, name: str, **data: Any) -> None:
        with self._changed:
            subject = data.get("delivery") or data.get("worker")
            self.all.append((name, subject, data))
            self._changed.notify_all()

    def ids(self, name: str) -> list[int]:
        return [subject.id for each, subject, _ in list(self.all) if each == name]

    def count(self, name: str) -> int:
        return sum(each == name for each, _, _ in list(self.all))

    def wait(self, name: str, count: int = 1) -> list[Any]:
        """Wait until signal `name` was sent `count` times; return the subjects."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(name) >= count, PATIENCE):
                raise AssertionError(f"{name} was said {self.count(name)} times, not {count}")
        return [subject for each, subject, _ in self.all if each == name]


@pytest.fixture
def said() -> Iterator[Said]:
    """Record all signals."""
    said = Said()
    with ExitStack() as stack:
        for signal in vars(signals).values():
            if not isinstance(signal, signals.LoggedSignal):
                continue

            def receiver(sender: str, name: str = signal.name, **data: Any) -> None:
                data.pop("signal")
                said.hear(name, **data)

            signal.connect(receiver, weak=False)
            stack.callback(signal.disconnect, receiver)
        yield said


class ShortOutage(Outage):
    """Waits a moment on each call, and not for ever."""

    waits = 0

    def wait(self, error: BaseException) -> None:
        self.wait_quietly()

    def wait_quietly(self) -> None:
        self.waits += 1
        assert self.waits < 100, "it waits for a database that is there"
        self._stop.wait(0.01)


def run_context(
    outage: Outage, on_settled: Callable[[Sequence[Ended]], None], *, lease: float
) -> RunContext:
    """Return the context of a bench: every queue has the same lease, in seconds."""
    return RunContext(
        alias=DEFAULT_DB_ALIAS,
        outage=outage,
        policy_of=policies(get_settings(), floor=0.0),
        lease_of=lambda queue: lease,
        shortest_lease=lease,
        on_settled=on_settled,
    )


class Bench:
    """One executor's `SliceRunner`, in the thread of the test, without the rest of a worker.

    If `fresh`, the claimed messages start without a lock.
    """

    def __init__(
        self,
        *,
        slice_seconds: float = 60.0,
        port: int | None = None,
        fresh: bool = True,
    ) -> None:
        self.fresh = fresh
        self.wrapper = plain_connection(DEFAULT_DB_ALIAS)
        if port is not None:
            self.wrapper.settings_dict.update(HOST="127.0.0.1", PORT=str(port))
        self.scoreboard = Scoreboard(200)
        self.stopping = threading.Event()
        self.settled: list[int] = []
        self.back: list[bool] = []
        self.runs: list[list[int]] = []
        self.session = Session(self.wrapper)
        self.session.connect()
        context = run_context(ShortOutage(self.stopping), self._settled, lease=1000.0)
        self.settlement = Settlement(self.session, context)
        self.stopped_queues = StoppedQueues()
        self.slices = SliceRunner(
            self.session,
            context,
            entries=ExecutorEntries(self.scoreboard, 0, 200),
            settlement=self.settlement,
            slice_seconds=slice_seconds,
            stopped_queues=self.stopped_queues,
        )
        self._claims = 0

    def _settled(self, ended: Sequence[Ended]) -> None:
        self.settled.extend(each.delivery.id for each in ended)
        self.back.append(any_row_kept(ended))

    def claim(self, queue: str = "mail", *, limit: int = 1000) -> list[Task]:
        """Claim the due messages of `queue`, on a separate connection."""
        self._claims += 1
        with second_connection() as other:
            claimed = claim.claim(
                other.cursor(),
                lanes=[Lane(queue, 0)],
                claimer=f"bench:{self._claims}",
                lease=60.0,
                limit=limit,
                max_bytes=1 << 30,
            )
        return [self.task(row) for row in claimed.rows]

    def task(self, row: Any) -> Task:
        handler = handlers.get(row.handler)
        assert handler is not None
        timeout = handlers.timeout_of(handler, get_settings())
        asked_at = lease_clock() if self.fresh else LONG_AGO
        return Task(Delivery(row, asked_at), handler, timeout, line_of(row))

    def run(self, tasks: list[Task]) -> Any:
        self.runs.append([task.delivery.id for task in tasks])
        return self.slices.run(tasks)

    def run_all(self, tasks: list[Task]) -> None:
        """Run until no message is left, like an executor."""
        for _ in range(100):
            remainder = self.run(tasks)
            again = list(remainder.to_rerun)
            left = [*remainder.left, *remainder.not_locked]
            while again:
                remainder = self.run([again.pop(0)])
                again += remainder.to_rerun
                left = [*remainder.left, *remainder.not_locked, *left]
            if not left:
                return
            tasks = left
        raise AssertionError("the slices do not come to an end")

    def close(self) -> None:
        self.session.unwatch()
        self.session.close()


#: Messages are locked at the first use of the connection by a handler, or before it starts.
BENCHES = ("fresh", "locked-first")
#: The benches whose messages are not locked before they start, and those whose messages are.
fresh = pytest.mark.parametrize("make_bench", ["fresh"], indirect=True)
locked_first = pytest.mark.parametrize("make_bench", ["locked-first"], indirect=True)
#: Marks tests of which a plain run needs only one bench.
mostly_fresh = pytest.mark.parametrize(
    "make_bench", ["fresh", *slow("locked-first")], indirect=True
)


@pytest.fixture(params=BENCHES)
def make_bench(
    transactional_db: None, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Bench]]:
    """Make benches; the connection of the default alias is theirs until the test ends.

    Tests must hold for messages locked at a handler's first use of the connection, or before.
    """
    before = connections[DEFAULT_DB_ALIAS]
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        bench = Bench(**{"fresh": request.param == "fresh", **options})
        benches.append(bench)
        connections[DEFAULT_DB_ALIAS] = bench.wrapper
        return bench

    yield make
    for bench in benches:
        bench.close()
    connections[DEFAULT_DB_ALIAS] = before


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def pid_of(bench: Bench) -> int:
    """Return the bench's backend pid without using the connection in the way a handler would."""
    return int(bench.wrapper.__dict__["connection"].info.backend_pid)


def stacks() -> str:
    """Return the stack of every thread."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident], limit=-8))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )


class Running:
    """A worker that runs in a thread."""

    def __init__(self, worker: Worker, until_empty: bool) -> None:
        self.worker = worker
        self.drained: bool | None = None
        self.error: BaseException | None = None
        self._until_empty = until_empty
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.drained = self.worker.run(until_empty=self._until_empty)
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()

    def join(self) -> bool:
        """Wait for the end of the run; return its result, or raise its error."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"the worker does not end:\n{stacks()}"
        if self.error is not None:
            raise self.error
        assert self.drained is not None
        return self.drained

    def stop(self) -> bool:
        """Stop it, even if it has only just started."""
        deadline = monotonic() + PATIENCE
        while self._thread.is_alive() and monotonic() < deadline:
            if self.worker.stop(timeout=1.0):
                break
            self._thread.join(0.05)
        return self.join()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate for handlers to wait at; opened at the end in any case."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def service() -> Iterator[Service]:
    """A service that answers again when the test ends, so that no handler waits for it."""
    service = Service()
    yield service
    service.error = None
    service.pause = 0.0
    service.gate.set()


@pytest.fixture
def never_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that wait behind long handlers are not released for it."""
    monkeypatch.setattr("django_mq.executor.local_queue.STUCK_AFTER", 600.0)


Start = Callable[..., Running]


@pytest.fixture
def start(transactional_db: None) -> Iterator[Start]:
    """Start workers in threads: `start(until_empty=True, threads=2)`."""
    running: list[Running] = []

    def start(until_empty: bool = False, **options: Any) -> Running:
        each = Running(Worker(**options), until_empty)
        running.append(each)
        return each

    yield start
    for each in running:
        if each._thread.is_alive():
            each.stop()


@pytest.fixture
def other() -> Iterator[psycopg.Connection[Any]]:
    with second_connection() as other:
        yield other


@pytest.fixture
def proxy(transactional_db: None) -> Iterator[Proxy]:
    proxy = Proxy(connection.get_connection_params())
    yield proxy
    proxy.close()


@contextmanager
def proxied(proxy: Any) -> Iterator[None]:
    """Within the block, new connections of the default alias go through `proxy`."""
    settings = connections[DEFAULT_DB_ALIAS].settings_dict
    before = {name: settings[name] for name in ("HOST", "PORT")}
    settings.update(HOST="127.0.0.1", PORT=str(proxy.port))
    try:
        yield
    finally:
        settings.update(before)


def add_many(count: int, **given: Any) -> list[QueuedMessage]:
    """Insert `count` messages, due one after another."""
    return add_all({"after": -60 + number / 1000, **given} for number in range(count))
