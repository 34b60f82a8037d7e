"""Capture broadcasts, and assert on them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.conf import alias_of
from django_mq.exceptions import InvalidName
from django_mq.handlers.callables import is_django_task
from django_mq.messages import Message, MessageInstance
from django_mq.outbox.blocks import commits_by_hand
from django_mq.outbox.chunk import observers
from django_mq.outbox.send import queue_connection
from django_mq.policy.routing import TASKS
from django_mq.store.rows import NewRow
from django_mq.testing.call import encoded
from django_mq.testing.on_loop import refuse_on_loop

_ANY = object()
DRAINED = """. Messages that drain() has run do not count: assert before it, or use \
capture_broadcasts(), which counts them"""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One broadcast message, as its handlers will read it."""

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


@dataclass(slots=True)
class CapturedBroadcasts(Sequence[Broadcast]):
    """The messages broadcast in a block and not rolled back, in order."""

    _captured: list[_Captured] = field(default_factory=list)

    def _kept(self, alias: str | None = None) -> list[Broadcast]:
        """Return the broadcasts that are kept, on this alias if one is given.

        They are committed, or will be unless a block rolls back.
        """
        chosen = [each for each in self._captured if alias in (None, each.connection.alias)]
        open_ones = [each for each in chosen if not each.committed]
        connections = {id(each.connection): each.connection for each in open_ones}
        hooks = (entry[1] for each in connections.values() for entry in each.run_on_commit)
        waiting = {id(getattr(hook, "__self__", None)) for hook in hooks}
        return [each.broadcast for each in chosen if each.committed or id(each) in waiting]

    @overload
    def __getitem__(self, index: int) -> Broadcast: ...
    @overload
    def __getitem__(self, index: slice) -> list[Broadcast]: ...
    def __getitem__(self, index: int | slice) -> Broadcast | list[Broadcast]:
        return self._kept()[index]

    def __len__(self) -> int:
        return len(self._kept())

    def __iter__(self) -> Iterator[Broadcast]:
        return iter(self._kept())

    def __repr__(self) -> str:
        return repr(self._kept())

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
        if commits_by_hand(connection):
            captured.commit()
        else:
            transaction.on_commit(captured.commit, using=connection.alias)


_open_blocks: list[CapturedBroadcasts] = []
_lock = threading.Lock()


@contextmanager
def capture_broadcasts() -> Iterator[CapturedBroadcasts]:
    """Yield a list of the messages broadcast in the block, without those rolled back.

    If autocommit is off and no `atomic()` block is open, the list also keeps rolled-back messages:
    Django does not report such a rollback.
    """
    broadcasts = CapturedBroadcasts()
    with _lock:
        observers.append(broadcasts._see)
        _open_blocks.append(broadcasts)
    try:
        yield broadcasts
    finally:
        with _lock:
            observers.remove(broadcasts._see)
            _open_blocks.remove(broadcasts)


def assert_broadcast(
    type: str | MessageInstance,
    payload: Any = _ANY,
    *,
    times: int | None = None,
    using: str | None = None,
) -> None:
    """Assert that a message was broadcast at least once, or exactly `times`.

    The message has this `type`, and this `payload` if one is given; `type` may also be an instance
    of a `@message` class. A message with several handlers counts once. Inside
    `capture_broadcasts()`, captured messages of all aliases or of `using` count, whether drained or
    not; elsewhere, the messages now in the table count, from which `drain()` removes them. The
    AssertionError lists the messages found.
    """
    if is_django_task(type):
        path = type.module_path  # type: ignore[union-attr]
        raise InvalidName(f"{path} is a Django task: its messages have the type {TASKS + path!r}")
    if not isinstance(type, str):
        expected_message = Message(type, None if payload is _ANY else payload)
        type, payload = expected_message.type, expected_message.payload
    wanted = payload if payload is _ANY else json.loads(encoded(payload))
    seen = _seen(using)
    found = sum(n for (t, text), n in seen.items() if t == type and _equal(wanted, text))
    if found != times if times is not None else not found:
        expected = "at least once" if times is None else f"{times} time(s)"
        what = type if wanted is _ANY else f"{type} with payload {wanted!r}"
        raise AssertionError(
            f"{what} was broadcast {found} time(s), expected {expected}; there is: "
            + ("; ".join(f"{t} {text} ({n})" for (t, text), n in seen.items()) or "nothing")
            + (DRAINED if not _open_blocks and found < (times or 1) else "")
        )


def _seen(using: str | None) -> Counter[tuple[str, str]]:
    """Count messages by type and payload (as JSON text)."""
    if _open_blocks:
        captured = _open_blocks[-1]._kept(None if using is None else alias_of(using))
        return Counter((each.type, _text(each.payload)) for each in captured)
    from django_mq.models import QueuedMessage

    refuse_on_loop("assert_broadcast")
    alias = queue_connection(using).alias
    rows = QueuedMessage.objects.using(alias).only("type", "payload", "handler")
    copies = Counter((row.type, _text(row.payload), row.handler) for row in rows)
    messages: Counter[tuple[str, str]] = Counter()
    for (type, payload, _), copies_of_one in copies.items():
        messages[type, payload] = max(messages[type, payload], copies_of_one)
    return messages


def _text(value: Any) -> str:
    # As jsonb stores it: jsonb returns 1e16 as an integer.
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _equal(wanted: Any, text: str) -> bool:
    return wanted is _ANY or _text(wanted) == text
