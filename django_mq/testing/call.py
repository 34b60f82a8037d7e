"""Call one handler as a worker does, without a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from itertools import count
from time import time
from typing import Any

from django.db import transaction

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.exceptions import InvalidOption
from django_mq.executor.calls import check_result
from django_mq.executor.leased_call import BatchDelivery
from django_mq.executor.leased_delivery import LeasedDelivery
from django_mq.executor.other_threads import as_function
from django_mq.handlers import Handler, queue_of, refusal
from django_mq.handlers.callables import is_django_task, shown
from django_mq.messages import ClaimedRow, Delivery, Message, set_current
from django_mq.messages.classes import class_of
from django_mq.outbox.options import check_integer
from django_mq.outbox.send import queue_connection
from django_mq.policy.backoff import MAX_ATTEMPTS
from django_mq.policy.chosen_end import chosen_end
from django_mq.policy.column_bounds import MAX_INTEGER
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_key, check_name
from django_mq.policy.routing import plain_types
from django_mq.store import Cursor
from django_mq.testing.on_loop import refuse_on_loop
from django_mq.worker.inline_run import NoTimeout

_delivered = count(1)


def deliver(
    handler: Callable[..., Any] | str,
    payload: Any = None,
    *,
    type: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    queue: str | None = None,
    schema_version: int = 1,
    key: str | None = None,
    attempt: int = 1,
    max_attempts: int = 20,
    using: str | None = None,
) -> Any:
    """Call one handler as a worker does.

    The payload goes through JSON, and an atomic handler runs in an `atomic()` block. If the payload
    is an instance of a `@message` class, it brings its type and version along. Otherwise the
    default `type` is the handler's only type without wildcards, if it has one, else `test.message`.
    `handler` is the function or its name; a batch handler gets a list of one delivery. No message
    is stored. Returns the handler's return value, or raises its error, undoing an atomic handler's
    writes; a verdict, such as `delivery.reject()` in a batch, is raised as the exception that it
    stands for. `metadata` may have entries of django_mq, such as the `mq.replay_of` of a replay.

    Raises InvalidPayload if `payload` could not be broadcast, InvalidName for a bad `type`, `queue`
    or `key`, InvalidOption for metadata or numbers that no stored message has, an `attempt` above
    `max_attempts`, or a `schema_version` that the handler does not understand, and LookupError if
    there is no such handler, or if a function is several handlers: pass the name of one.
    """
    refuse_on_loop("deliver")
    settings = get_settings()
    connection = queue_connection(using)
    found = _handler(handler)
    if class_of(payload) is not None:
        message = Message(payload)
        type, payload, schema_version = message.type, message.payload, message.schema_version
    elif type is None:
        type = _type_of(found)
    attempt, max_attempts = _checked_attempts(attempt, max_attempts)
    type = check_name(type, "type")
    schema_version = check_integer(schema_version, "schema_version", 1, MAX_INTEGER)
    if refused := refusal(found, type, schema_version):
        raise InvalidOption(f"a worker would hold the message: {refused}")
    now = time()
    row = ClaimedRow(
        id=next(_delivered),
        queue=queue_of(found, settings) if queue is None else check_name(queue, "queue"),
        type=type,
        handler=found.name,
        schema_version=schema_version,
        payload=encoded(payload),
        metadata=settings.encode_metadata(check_metadata(metadata, stored=True)),
        priority=0,
        key=None if key is None else check_key(key, "key"),
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
    return _call(found, row, connection.alias)


def _checked_attempts(attempt: int, maximum: int) -> tuple[int, int]:
    attempt = check_integer(attempt, "attempt", 1, MAX_ATTEMPTS)
    maximum = check_integer(maximum, "max_attempts", 1, MAX_ATTEMPTS)
    if attempt > maximum:
        raise InvalidOption(
            f"attempt is {attempt}, above max_attempts, which is {maximum}: pass both"
        )
    return attempt, maximum


def _call(handler: Handler, row: ClaimedRow, alias: str) -> Any:
    if handler.atomic:
        delivery = Delivery(row)
    else:
        delivery = _UnstoredOfBatch(row, alias) if handler.batch else _Unstored(row, alias)
    argument = [delivery] if handler.batch else delivery
    try:
        return copy_context().run(_run, handler, delivery, argument, alias)
    except BaseExceptionGroup as group:
        if (end := chosen_end(group)) is group:
            raise
        raise end from end.__cause__


def _run(handler: Handler, delivery: Delivery, argument: Any, alias: str) -> Any:
    set_current(delivery, alias)
    if not handler.atomic:
        call = as_function(handler.call) if handler.is_async else handler.call
        result = _checked(call(argument), argument)
        if (verdict := getattr(delivery, "verdict", None)) is not None:
            raise verdict
        return result
    with transaction.atomic(using=alias):
        return _checked(handler.call(argument), argument)


def _checked(result: Any, argument: Any) -> Any:
    """Return the result of a handler; raise TypeError, as a worker does, if it shows a mistake."""
    check_result(result, argument)
    return result


class _Unstored(LeasedDelivery):
    """A leased delivery without a row to renew or remove."""

    def __init__(self, row: ClaimedRow, alias: str) -> None:
        super().__init__(Delivery(row), alias=alias, lease=0.0, timeout=NoTimeout())

    def _extend_lease(self, lease: float) -> None:
        """Do nothing: there is no lease."""

    def _ack(self, cursor: Cursor) -> bool:
        return True


class _UnstoredOfBatch(BatchDelivery):
    """A delivery in a list; its last `verdict` is kept."""

    verdict: BaseException | None = None

    def __init__(self, row: ClaimedRow, alias: str) -> None:
        super().__init__(
            Delivery(row),
            alias=alias,
            lease=0.0,
            timeout=NoTimeout(),
            on_verdict=self._keep,
            fences=(),
        )

    def _extend_lease(self, lease: float) -> None:
        """Do nothing: there is no lease."""

    def _keep(self, delivery: BatchDelivery, error: BaseException) -> None:
        self.verdict = error


def _handler(handler: Callable[..., Any] | str) -> Handler:
    found = [
        each
        for each in handlers.all_handlers()
        # Each access to a method makes another bound method, which is only equal.
        if each.function == handler or handler in (each.name, *each.aliases)
    ]
    if len(found) > 1:
        raise LookupError(
            f"{shown(handler)} is the function of several handlers: give one of the names"
            f" {', '.join(each.name for each in found)}"
        )
    if found:
        return found[0]
    if is_django_task(handler):
        raise LookupError(
            f"{handler.module_path} is a Django task: call it with .call(...), or enqueue() it"  # type: ignore[union-attr]
            " and run it with drain()"
        )
    raise LookupError(
        f"{handler!r} is not a handler: decorate it with @handler, and import its module"
    )


def _type_of(handler: Handler) -> str:
    """Return the only plain type of a handler; with several, or none, `test.message`."""
    plain = plain_types(handler.patterns)
    return plain[0] if len(plain) == 1 else "test.message"


def encoded(payload: Any) -> str:
    return get_settings().encode_payload({} if payload is None else payload)
