"""Find the handler of each claimed row; split rows for several handlers, and hold the rest."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import cache, partial
from operator import attrgetter

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.conf.error_logs import log_failure
from django_mq.executor import reports
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.settle_rows import settle_all
from django_mq.executor.statements import skip_refused_rows, within_transaction
from django_mq.executor.tasks import Line, Task
from django_mq.handlers import Handler, refusal
from django_mq.handlers.holding import other_queue, unknown_handler, unknown_type
from django_mq.handlers.nearest import nearest_handlers, nearest_types
from django_mq.messages import ClaimedRow, Delivery
from django_mq.policy.metadata import MAX_ADDED
from django_mq.policy.stored_json import excess, max_brackets
from django_mq.store import Cursor, keys, settle
from django_mq.store import routing as routing_store

#: Returns the fields on which the handler of a row depends.
_kind_of = attrgetter("handler", "queue", "type", "schema_version")


class Resolver:
    """Turns claimed rows into tasks; holds rows that cannot run here, until `HOLD_FOR`."""

    def __init__(self, settings: Settings, *, batch_size_of: Callable[[str], int]) -> None:
        self._settings = settings
        self._batch_size_of = batch_size_of
        self._queues = cache(partial(handlers.allowed_queues, settings=settings))
        self._timeout = cache(partial(handlers.timeout_of, settings=settings))
        # JSON of up to this many characters is within all limits.
        self._short = min(
            2 * settings.max_depth,
            settings.max_payload_bytes // 4,
            settings.max_metadata_bytes // 4,
        )

    def take_ready(self, deliveries: deque[Delivery], *, check_limits: bool) -> list[Task]:
        """Take from the left the rows that can run as they are, up to the first that cannot.

        `check_limits`: one of the rows may exceed a limit, see `may_exceed()`.
        """
        tasks: list[Task] = []
        last: object = None
        handler: Handler | None = None
        for delivery in deliveries:
            row = delivery._row
            kind = _kind_of(row)
            if kind != last:  # neighbours mostly have the same kind
                last, handler = kind, self._ready_handler(row)
                timeout = 0.0 if handler is None else self._timeout(handler)
                batch_size = self._batch_size_of(row.queue)
            if (
                handler is None
                or row.metadata[0] != "{"  # not an object: other code wrote the row
                or (check_limits and self._excess(row))
            ):
                break
            if handler.of_row is not None:
                handler, last = handler.of_row(row), None
                timeout = self._timeout(handler)
            line = None if row.key is None and not row.ordered else line_of(row)
            tasks.append(Task(delivery, handler, timeout, line, batch_size))
        for _ in tasks:
            deliveries.popleft()
        return tasks

    def may_exceed(self, deliveries: Collection[Delivery]) -> bool:
        """Return whether a row may exceed a limit, without a look at every single row."""
        settings, payloads = self._settings, [each._row.payload for each in deliveries]
        metadata = [each._row.metadata for each in deliveries]
        return (
            4 * max(map(len, payloads), default=0) > settings.max_payload_bytes
            or 4 * max(map(len, metadata), default=0) > settings.max_metadata_bytes
            or max(max_brackets(payloads), max_brackets(metadata)) > settings.max_depth
        )

    def resolve(self, cursor: Cursor, delivery: Delivery) -> Task | Ended | None:
        """Return the task of `delivery`, or, if it cannot run here, its end for `settle_held()`.

        None if nothing is left to do: the lease is lost, or the row went back to its queue.
        """
        row = delivery._row
        if excess := self._excess(row):
            return self._hold(delivery, excess)
        if row.metadata[0] != "{":
            return self._hold(delivery, "its metadata is not a JSON object")
        handler = self._ready_handler(row)
        if handler is not None:
            return self._task(delivery, handler if handler.of_row is None else handler.of_row(row))
        if not row.handler:
            return self._route(cursor, delivery)
        handler = handlers.get(row.handler)
        if handler is None:
            near = nearest_handlers(row.handler, row.type)
            return self._hold(delivery, f"{unknown_handler(row.handler)}{near}")
        if row.queue not in self._queues(handler):
            return self._hold(delivery, other_queue(handler.name, row.queue))
        if refused := refusal(handler, row.type, row.schema_version):
            return self._hold(delivery, refused)
        if _is_replay(row):  # an operator chose the handler
            return self._task(delivery, handler)
        return self._hold(delivery, handlers.unsubscribed(handler, row.type))

    def _ready_handler(self, row: ClaimedRow) -> Handler | None:
        """Return the handler that `row` names, if it can run rows of this kind here."""
        handler = handlers.get(row.handler) if row.handler else None
        if (
            handler is None
            or row.queue not in self._queues(handler)
            or refusal(handler, row.type, row.schema_version)
            or not handlers.is_subscribed(handler, row.type)
        ):
            return None
        return handler

    def _excess(self, row: ClaimedRow) -> str:
        """Return how the stored row exceeds a limit of a broadcast; empty if it exceeds none."""
        settings = self._settings
        for what, text, max_bytes in (
            ("payload", row.payload, settings.max_payload_bytes),
            ("metadata", row.metadata, settings.max_metadata_bytes + MAX_ADDED),
        ):
            if len(text) > self._short and (
                found := excess(text, what=what, max_bytes=max_bytes, max_depth=settings.max_depth)
            ):
                return found
        return ""

    def _task(self, delivery: Delivery, handler: Handler) -> Task:
        row = delivery._row
        batch_size = self._batch_size_of(row.queue)
        return Task(delivery, handler, self._timeout(handler), line_of(row), batch_size)

    def _route(self, cursor: Cursor, delivery: Delivery) -> Task | Ended | None:
        """Give a row without a handler to all that its type and metadata reach in its queue."""
        row = delivery._row
        try:
            metadata = json.loads(row.metadata)
        except (ValueError, RecursionError) as error:
            return self._hold(delivery, f"its metadata cannot be decoded: {error}")
        matching = [
            each
            for each in handlers.table().match(row.type, metadata)
            if row.queue in self._queues(each)
        ]
        if not matching:
            near = nearest_types(row.type)
            return self._hold(delivery, f"{unknown_type(row.type, row.queue)}{near}")
        for each in matching:
            if refused := refusal(each, row.type, row.schema_version):
                return self._hold(delivery, refused)
        return self._split(cursor, delivery, matching)

    def _split(self, cursor: Cursor, delivery: Delivery, ready: list[Handler]) -> Task | None:
        row, fence = delivery._row, delivery.fence
        attempts = [
            # A policy that the message carries overrides the handler's.
            row.max_attempts
            if row.retry is not None
            else handlers.retry_of(each, row.queue, self._settings).max_attempts
            for each in ready
        ]
        names = [each.name for each in ready]
        if not routing_store.split(cursor, fence, handlers=names, max_attempts=attempts):
            reports.lease_lost(delivery)
            return None
        if row.key is not None:  # now in the line of a handler, which has an order of its own
            settle.release(cursor, [fence])
            keys.free_next(cursor, [keys.KeyLine(row.queue, "", row.key)])
            return None
        # Not a new delivery: renewals of the lease know only the one that was claimed.
        delivery._row = row._replace(handler=names[0], max_attempts=attempts[0])
        return self._task(delivery, ready[0])

    def _hold(self, delivery: Delivery, reason: str) -> Ended:
        """Return the end of a row that is held, or is dead: expired, or held for `HOLD_FOR`."""
        row = delivery._row
        if row.expires_in is not None and row.expires_in <= 0:
            return Ended(delivery, Settled.DEAD_UNSTARTED, reason="expired")
        if row.held_for is not None and row.held_for >= self._settings.hold_for:
            return Ended(delivery, Settled.DEAD_UNSTARTED, reason=f"held for too long: {reason}")
        return Ended(delivery, Settled.HELD, reason=reason)


def settle_held(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Hold or dead-letter what `Resolver.resolve()` returned; announce newly held messages.

    They are settled together: a deploy that adds a type may leave an old worker thousands of its
    messages.
    """

    settled: list[Ended] = []

    def settle_together(some: Sequence[Ended]) -> list[Ended]:
        # Each kind is one statement. If the statement of one kind is refused, nothing is settled.
        mixed = len({each.settled for each in some}) > 1
        with within_transaction(cursor) if mixed else nullcontext():
            lost = settle_all(cursor, some)
        settled.extend(each for each in some if each.delivery.id not in lost)
        return [each for each in some if each.delivery.id in lost]

    def refused(each: Ended, error: Exception) -> None:  # the lease lapses, the attempt counts
        log_failure("dispatch_failed", error, "message %s cannot be held", each.delivery.id)

    try:
        # Errors of any kind: a row that cannot be held stops no other.
        for each in skip_refused_rows(settle_together, ended, refused, errors=Exception):
            reports.lease_lost(each.delivery)
    finally:  # also if the database is lost on the way
        reports.all_ended(
            each
            for each in settled
            if each.settled is Settled.DEAD_UNSTARTED or each.delivery._row.held_for is None
        )


def _is_replay(row: ClaimedRow) -> bool:
    """Return whether `row` is a copy of a message that was handled before."""
    if f'"{handlers.REPLAY}"' not in row.metadata:
        return False
    try:
        metadata = json.loads(row.metadata)
    except (ValueError, RecursionError):
        return False
    return handlers.REPLAY in metadata


def line_of(row: ClaimedRow) -> Line | None:
    """Return the line of `row`: that of its ordered queue, that of its key, or None."""
    if row.ordered:
        return (row.queue,)
    return None if row.key is None else (row.queue, row.handler, row.key)
