"""`@handler` subscribes a function to messages, `periodic()` declares a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from django_mq.exceptions import BroadcastError, InvalidHandler
from django_mq.handlers.callables import check_function, name_of, source_of
from django_mq.handlers.options import (
    check_flags,
    check_history,
    check_list,
    check_mode,
    check_patterns,
    check_retry,
    check_where,
    name_tuple,
    optional_name,
    scheduled_type,
    timeout_seconds,
)
from django_mq.handlers.periodic import declaration, periodic
from django_mq.handlers.registry import (
    REPLAY,
    Declaration,
    Handler,
    Match,
    Registry,
    add,
    add_schedule,
    all_handlers,
    all_schedules,
    allowed_queues,
    disallowed,
    find_with,
    get,
    is_subscribed,
    isolated,
    queue_of,
    registered,
    retry_of,
    table,
    timeout_of,
    unsubscribed,
)
from django_mq.handlers.typed import refusal, typed
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.column_bounds import check_version
from django_mq.values import Seconds

__all__ = [
    "REPLAY",
    "Handler",
    "Match",
    "Registry",
    "add",
    "all_handlers",
    "all_schedules",
    "allowed_queues",
    "disallowed",
    "find_with",
    "get",
    "handler",
    "is_subscribed",
    "isolated",
    "periodic",
    "queue_of",
    "refusal",
    "registered",
    "retry_of",
    "table",
    "timeout_of",
    "unsubscribed",
]

F = TypeVar("F", bound=Callable[..., Any])


def handler(
    *patterns: str,
    queue: str | None = None,
    queues: Iterable[str] = (),
    where: Mapping[str, Any] | None = None,
    match: Match = "all",
    name: str | None = None,
    aliases: Iterable[str] = (),
    schema_version: int = 1,
    retry: RetryPolicy | None = None,
    atomic: bool | None = None,
    batch: bool = False,
    max_batch: int | None = None,
    linger: float | timedelta = 0,
    timeout: float | timedelta | None = None,
    history: float | timedelta | None = None,
    history_payload: bool | None = None,
    cron: str | None = None,
    every: Seconds | None = None,
    tz: str = "UTC",
) -> Callable[[F], F]:
    """Subscribe a function to the messages whose type matches one of `patterns`.

    A pattern is a dotted type; `*` stands for one word, `#` for any number of words. Each
    subscriber gets a copy of the message in its own `queue` (default: DEFAULT_QUEUE); that copy
    fails, retries and dies on its own. The function gets one `Delivery`. The decorator returns the
    function unchanged, so you can also call it directly.

    By default a plain function is atomic: its writes to the message's database and the removal of
    the message commit together, once. Effects that this transaction cannot undo - a mail, a
    payment, a call to another service - belong in a handler with `atomic=False`, which may run more
    than once for one message. An `async def` is never atomic: Django has no async transactions.

    - `queues`: further queues that `broadcast(queue=...)` may choose for its messages.
    - `where`: JSON values that the metadata must have, `match="all"` of them or `"any"`.
    - `name`: stored in rows; default `module.qualname`. A function may be several handlers, each
      with a name of its own. `aliases`: the handler's former names.
    - `schema_version`: the newest version that the handler understands; newer messages are held. A
      message class as annotation has its own version, and the handler gets an instance.
    - `retry`: default the queue's. `timeout`: seconds or a timedelta; default the TIMEOUT setting.
    - `batch`: the function gets a list of deliveries. In an atomic handler, what it writes for them
      is committed or undone together. Otherwise each is acked when the function returns, unless it
      called `delivery.fail(error)`, `.retry()`, `.snooze(after)` or `.reject(reason)`; an
      exception, a timeout or a crash fails those without a verdict. Later attempts come in lists of
      one.
    - `max_batch`: the maximum number of deliveries in a list; default the queue's batch size.
      `linger`: how long a list that is not full waits for more deliveries, in seconds or as a
      timedelta, at most a quarter of the lease; not for atomic handlers.
    - `history`: seconds or a timedelta for which its handled messages are kept, 0 for none;
      `history_payload`: with payload and metadata. Default: as the queue says.
    - `cron` or `every`, `tz`: also broadcast the first plain type of `patterns` on a schedule, to
      all its subscribers: short for `periodic()` with the handler's name. Not together with
      `where`: the message has none of your metadata, so it would not match. Use `periodic()`.

    Raises InvalidHandler if the decorated object, or an option, cannot make a handler.
    """
    checked_patterns = check_patterns(patterns)
    check_flags(atomic, batch)
    lingers = check_list(batch=batch, max_batch=max_batch, linger=linger)
    make = partial(
        Handler,
        patterns=checked_patterns,
        queue=optional_name(queue, "queue"),
        queues=name_tuple(queues, "queues"),
        where=check_where(where, match),
        match=match,
        schema_version=check_version(schema_version, "schema_version", InvalidHandler),
        retry=check_retry(retry),
        batch=batch,
        timeout=timeout_seconds(timeout),
        max_batch=max_batch,
        linger=lingers,
        history=check_history(history, history_payload),
        history_payload=history_payload,
    )
    own_name = optional_name(name, "handler name")
    former_names = name_tuple(aliases, "aliases")
    schedule = None
    if cron is not None or every is not None:
        type = scheduled_type(checked_patterns, where)
        schedule = partial(declaration, type=type, cron=cron, every=every, tz=tz)
    elif tz != "UTC":
        raise InvalidHandler("tz= is the time zone of a schedule: add cron= or every=")

    def register(function: F) -> F:
        is_async = check_function(function)
        check_mode(function, is_async=is_async, atomic=atomic, linger=lingers)
        is_atomic = not is_async if atomic is None else atomic
        call = typed(function, batch=batch, is_async=is_async, atomic=is_atomic)
        new = partial(make, function=function, call=call, is_async=is_async, atomic=is_atomic)
        _register(new, own_name or name_of(function), former_names, schedule)
        return function

    return register


def _register(
    make: Callable[..., Handler],
    name: str,
    aliases: Iterable[str],
    schedule: Callable[[str], Declaration] | None,
) -> None:
    """Add the handler that `make` returns, and its `schedule`, if it has one."""
    try:
        declared = schedule(name) if schedule else None
    except BroadcastError as error:
        raise InvalidHandler(f"{name}: {error}") from error
    new = make(name=name, aliases=tuple(each for each in aliases if each != name))
    add(new)
    if declared:
        add_schedule(replace(declared, call_site=source_of(new.function)))
