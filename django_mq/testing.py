"""For your own tests: run what was broadcast, look at it, move time. All in a plain TestCase.

class CheckoutTest(TestCase):
    def test_confirmation(self):
        with capture_broadcasts() as broadcasts:
            self.client.post("/orders/", {...})
        self.assertEqual([each.type for each in broadcasts], ["shop.orders.placed"])
        drain()
        self.assertEqual(len(mail.outbox), 1)
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import time
from typing import Any, overload

from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import capturing, handlers
from django_mq.conf import get_settings
from django_mq.encoding import encode
from django_mq.handlers import Handler, queue_of
from django_mq.messages import ClaimedRow, Delivery, current_delivery
from django_mq.requests.pending import test_runners
from django_mq.routing import check_name
from django_mq.sending import queue_connection
from django_mq.store import Cursor
from django_mq.store import testing as store
from django_mq.store.rows import NewRow
from django_mq.worker.drainer import Drainer
from django_mq.worker.leased import LeasedDelivery

__all__ = [
    "Broadcast",
    "answering",
    "assert_broadcast",
    "capture_broadcasts",
    "deliver",
    "drain",
    "due",
]

_ANY = object()
_delivered = count(1)


def drain(queue: str | None = None, *, using: str | None = None) -> int:
    """Run everything that is due, in `queue` or in all, and what that broadcasts in turn.

    It runs here, on this connection, through the worker's own code: handlers that fail are
    retried or die as they would, `FailedAttempt` rows are written, errors do not reach you.
    What is delayed or backs off stays: see `due()`. Returns how many deliveries there were.
    """
    if queue is not None:
        check_name(queue, "queue")
    return Drainer(queue_connection(get_settings(), using), queue=queue).run()


@contextmanager
def answering(*, using: str | None = None) -> Iterator[None]:
    """Run everything that is due whenever the block looks for a reply, so that `ask()` gets one.

    with answering():
        response = self.client.get("/friends/")  # a view that asks
    """

    def run() -> None:
        drain(using=using)

    test_runners.append(run)
    try:
        yield
    finally:
        test_runners.remove(run)


def due(queue: str | None = None, *, using: str | None = None) -> int:
    """Move time: delayed, retrying and held messages are due now. Returns how many."""
    with queue_connection(get_settings(), using).cursor() as cursor:
        return store.make_due(cursor, queue=queue)


def deliver(
    handler: Callable[..., Any] | str,
    payload: Any = None,
    *,
    type: str = "test.message",
    metadata: Mapping[str, Any] | None = None,
    queue: str | None = None,
    schema_version: int = 1,
    key: str | None = None,
    attempt: int = 1,
    max_attempts: int = 20,
    using: str | None = None,
) -> Any:
    """Call one handler with `payload`, as it would arrive: through JSON, an atomic one in a block.

    `handler` is the function or its name; a batch handler gets a list of one. No row is written.
    Returns what the handler returns and raises what it raises, its writes undone; raises
    InvalidPayload when `payload` could not be broadcast.
    """
    settings = get_settings()
    connection = queue_connection(settings, using)
    found = _handler(handler)
    now = time()
    row = ClaimedRow(
        id=next(_delivered),
        queue=queue or queue_of(found, settings),
        type=type,
        handler=found.name,
        schema_version=schema_version,
        payload=_encoded(payload),
        metadata=_encoded(dict(metadata or {})),
        priority=0,
        key=key,
        attempts=attempt,
        max_attempts=max_attempts,
        retry=None,
        claimed_by="test:0",
        wants_result=False,
        suspect=False,
        held_for=None,
        created=now,
        claimed=now,
    )
    delivery = Delivery(row) if found.atomic else _Unstored(row, alias=connection.alias)
    argument = [delivery] if found.batch else delivery
    token = current_delivery.set(delivery)
    try:
        if found.is_async:
            return async_to_sync(found.function)(argument)
        if not found.atomic:
            return found.function(argument)
        with transaction.atomic(using=connection.alias):
            return found.function(argument)
    finally:
        current_delivery.reset(token)


class _Unstored(LeasedDelivery):
    """A leased delivery without a row: there is nothing to renew and nothing to remove."""

    def __init__(self, row: ClaimedRow, *, alias: str) -> None:
        super().__init__(row, alias=alias, lease=0.0, clock=self)

    def extend(self, seconds: float) -> None:
        """Nobody is waiting."""

    def _ack(self, cursor: Cursor) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One message that was broadcast, as its handlers will read it."""

    type: str
    payload: Any
    metadata: dict[str, Any]
    schema_version: int
    handlers: tuple[str, ...]
    queues: tuple[str, ...]
    key: str | None = None
    unique_id: str | None = None


@dataclass(slots=True)
class _Captured:
    broadcast: Broadcast
    connection: BaseDatabaseWrapper
    committed: bool = False

    def commit(self) -> None:
        self.committed = True

    def holds(self) -> bool:
        """Whether it is committed, or will be if nobody rolls back."""
        hooks = [entry[1] for entry in self.connection.run_on_commit]
        return self.committed or any(getattr(hook, "__self__", None) is self for hook in hooks)


@dataclass(slots=True)
class Broadcasts(Sequence[Broadcast]):
    """What was broadcast in a block and not rolled back, in order."""

    _captured: list[_Captured] = field(default_factory=list)

    def _held(self) -> list[Broadcast]:
        return [each.broadcast for each in self._captured if each.holds()]

    @overload
    def __getitem__(self, index: int) -> Broadcast: ...
    @overload
    def __getitem__(self, index: slice) -> list[Broadcast]: ...
    def __getitem__(self, index: int | slice) -> Broadcast | list[Broadcast]:
        return self._held()[index]

    def __len__(self) -> int:
        return len(self._held())

    def __iter__(self) -> Iterator[Broadcast]:
        return iter(self._held())

    def __repr__(self) -> str:
        return repr(self._held())

    def _see(
        self, connection: BaseDatabaseWrapper, rows: Sequence[NewRow], unique_id: str | None
    ) -> None:
        if not rows:
            return
        captured = _Captured(
            Broadcast(
                type=rows[0].type,
                payload=json.loads(rows[0].payload),
                metadata=json.loads(rows[0].metadata),
                schema_version=rows[0].schema_version,
                handlers=tuple(row.handler for row in rows if row.handler),
                queues=tuple(row.queue for row in rows),
                key=rows[0].key,
                unique_id=unique_id,
            ),
            connection,
        )
        self._captured.append(captured)
        if connection.in_atomic_block or connection.get_autocommit():
            transaction.on_commit(captured.commit, using=connection.alias)
        else:  # the caller commits by hand, and Django knows no hooks then
            captured.commit()


_open_blocks: list[Broadcasts] = []
_lock = threading.Lock()


@contextmanager
def capture_broadcasts() -> Iterator[Broadcasts]:
    """Yield the list of what is broadcast in the block; what is rolled back is not in it.

    Where autocommit is off and no `atomic()` is open, all of it is: Django does not tell then.
    """
    broadcasts = Broadcasts()
    with _lock:
        capturing.observers.append(broadcasts._see)
        _open_blocks.append(broadcasts)
    try:
        yield broadcasts
    finally:
        with _lock:
            capturing.observers.remove(broadcasts._see)
            _open_blocks.remove(broadcasts)


def assert_broadcast(
    type: str, payload: Any = _ANY, *, times: int | None = None, using: str | None = None
) -> None:
    """Assert that a message of `type`, with this `payload` if given, was broadcast.

    At least once, or exactly `times`; a message with several handlers counts once. Inside
    `capture_broadcasts()` it looks at what was captured; elsewhere at the messages that are in
    the table now, so call it before `drain()`. Raises AssertionError with what there is.
    """
    wanted = payload if payload is _ANY else json.loads(_encoded(payload))
    seen = _seen(using)
    found = sum(n for (t, text), n in seen.items() if t == type and _equal(wanted, text))
    if found != times if times is not None else not found:
        expected = "at least once" if times is None else f"{times} time(s)"
        what = type if wanted is _ANY else f"{type} with payload {wanted!r}"
        raise AssertionError(
            f"{what} was broadcast {found} time(s), expected {expected}; there is: "
            + ("; ".join(f"{t} {text} ({n})" for (t, text), n in seen.items()) or "nothing")
        )


def _seen(using: str | None) -> Counter[tuple[str, str]]:
    """Count messages by type and payload (as JSON text)."""
    if _open_blocks:
        return Counter((each.type, _text(each.payload)) for each in _open_blocks[-1])
    from django_mq.models import QueuedMessage

    alias = queue_connection(get_settings(), using).alias
    rows = QueuedMessage.objects.using(alias).only("type", "payload", "handler")
    copies = Counter((row.type, _text(row.payload), row.handler) for row in rows)
    messages: Counter[tuple[str, str]] = Counter()
    for (type, payload, _), copies_of_one in copies.items():
        messages[type, payload] = max(messages[type, payload], copies_of_one)
    return messages


def _handler(handler: Callable[..., Any] | str) -> Handler:
    for each in handlers.all_handlers():
        if each.function is handler or handler in (each.name, *each.aliases):
            return each
    raise LookupError(f"{handler!r} is no handler: is @handler on it, and its module imported?")


def _encoded(payload: Any) -> str:
    settings = get_settings()
    return encode(
        {} if payload is None else payload,
        what="payload",
        max_bytes=settings.max_payload_bytes,
        max_depth=settings.max_depth,
        encoder=settings.encoder_class,
    )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _equal(wanted: Any, text: str) -> bool:
    return wanted is _ANY or _text(wanted) == text
