"""The options of `@handler`, checked; each error says what to pass instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_mq.conf import MAX_BATCH_SIZE
from django_mq.exceptions import InvalidHandler, InvalidName
from django_mq.handlers.callables import shown
from django_mq.policy.backoff import MAX_WAIT, RetryPolicy
from django_mq.policy.column_bounds import MAX_SPAN_SECONDS
from django_mq.policy.names import check_name, check_pattern
from django_mq.policy.routing import TASKS, plain_types
from django_mq.values import as_seconds, short_repr


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns, each once; raises InvalidHandler."""
    if not patterns:
        raise InvalidHandler('say what the handler subscribes to: @handler("shop.orders.placed")')
    if len(patterns) == 1 and callable(patterns[0]):
        raise InvalidHandler(
            f"say what {shown(patterns[0])} subscribes to, in brackets after @handler:"
            ' @handler("shop.orders.placed")'
        )
    try:
        checked = tuple(dict.fromkeys(check_pattern(each) for each in patterns))
    except InvalidName as error:
        raise InvalidHandler(str(error)) from error
    for each in checked:
        if each.startswith(TASKS):
            raise InvalidHandler(
                f"the pattern {each} would match nothing: types that begin with {TASKS} are those"
                " of Django tasks, which no handler subscribes to"
            )
    return checked


def scheduled_type(patterns: tuple[str, ...], where: object) -> str:
    """Return the type that a handler with `cron=` or `every=` broadcasts: its first plain one."""
    if where:
        raise InvalidHandler(
            "cron= and every= broadcast without metadata, which where= would not match: declare the"
            " schedule with periodic(name, type, metadata=...)"
        )
    for each in plain_types(patterns):
        return each
    raise InvalidHandler(
        f"cron= and every= need a type to broadcast, and {', '.join(patterns)} has wildcards:"
        " add a plain type, or declare the schedule with periodic(name, type, ...)"
    )


def optional_name(value: str | None, what: str) -> str | None:
    """Return `value` if it is None or a name; raises InvalidHandler."""
    try:
        return None if value is None else check_name(value, what)
    except InvalidName as error:
        raise InvalidHandler(str(error)) from error


def name_tuple(values: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names, each once; raises InvalidHandler."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidHandler(f'{what}= must be a tuple of names, as in {what}=("mail",)')
    try:
        return tuple(dict.fromkeys(check_name(each, what) for each in values))
    except InvalidName as error:
        raise InvalidHandler(str(error)) from error


def check_where(where: Mapping[str, Any] | None, match: object) -> dict[str, Any] | None:
    """Return `where` as a dict, None without values; raises InvalidHandler if nothing can match."""
    if match not in ("all", "any"):
        raise InvalidHandler(f'match= must be "all" or "any" of where, not {short_repr(match)}')
    if match == "any" and not where:
        raise InvalidHandler('match="any" needs where= with values: one that matches is enough')
    if where is None:
        return None
    if not (isinstance(where, Mapping) and all(isinstance(key, str) for key in where)):
        raise InvalidHandler('where= must be a dict of metadata, as in where={"tier": "gold"}')
    for key, value in where.items():
        if not _is_json(value):
            raise InvalidHandler(
                f"where= has {key}={short_repr(value)}, which never equals metadata: metadata is"
                " read back from JSON, so give text, a number, True, False, None, or a list or dict"
                " of these"
            )
    return dict(where) or None


def _is_json(value: object) -> bool:
    """Return whether `value` is unchanged after it is stored as JSON and read back."""
    try:
        return bool(json.loads(json.dumps(value, cls=DjangoJSONEncoder)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def check_retry(retry: RetryPolicy | None) -> RetryPolicy | None:
    """Return `retry`; raises InvalidHandler unless it is None or a RetryPolicy."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise InvalidHandler(f"retry= must be a RetryPolicy(...), not {short_repr(retry)}")
    return retry


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    """Return `timeout` in seconds; raises InvalidHandler unless it is above zero."""
    seconds = None if timeout is None else as_seconds(timeout)
    if timeout is not None and not seconds:
        raise InvalidHandler(
            f"timeout= must be seconds above zero or a timedelta, not {short_repr(timeout)}"
        )
    return seconds


def check_history(history: float | timedelta | None, payload: object) -> float | None:
    """Return `history` in seconds; raises InvalidHandler if it cannot be a retention."""
    seconds = None if history is None else as_seconds(history)
    if history is not None and (seconds is None or seconds > MAX_SPAN_SECONDS):
        raise InvalidHandler(
            "history= must be seconds or a timedelta, at most 100 years, or 0, not"
            f" {short_repr(history)}"
        )
    if payload is not None and type(payload) is not bool:
        raise InvalidHandler(f"history_payload= must be True or False, not {short_repr(payload)}")
    return seconds


def check_flags(atomic: object, batch: object) -> None:
    """Raise InvalidHandler unless both are booleans; `atomic` may be None."""
    if atomic is not None and type(atomic) is not bool:
        raise InvalidHandler(f"atomic= must be True or False, not {short_repr(atomic)}")
    if type(batch) is not bool:
        raise InvalidHandler(
            f"batch= must be True or False, not {short_repr(batch)}: max_batch= limits the length"
            " of a list"
        )


def check_list(*, batch: bool, max_batch: object, linger: float | timedelta) -> float:
    """Return `linger` in seconds; raises InvalidHandler if lists do not allow these options."""
    if max_batch is not None and (
        type(max_batch) is not int or not 1 <= max_batch <= MAX_BATCH_SIZE
    ):
        raise InvalidHandler(
            f"max_batch= must be a whole number from 1 to {MAX_BATCH_SIZE:,}, not"
            f" {short_repr(max_batch)}"
        )
    seconds = as_seconds(linger)
    if seconds is None or not 0 <= seconds <= MAX_WAIT:
        raise InvalidHandler(f"linger= must be seconds or a timedelta, not {short_repr(linger)}")
    if not batch and (max_batch is not None or seconds):
        raise InvalidHandler(
            "max_batch= and linger= are for lists of deliveries: add batch=True, or leave them out"
        )
    return seconds


def check_mode(
    function: Callable[..., Any],
    *,
    is_async: bool,
    atomic: bool | None,
    linger: float,
) -> None:
    """Raise InvalidHandler if a function of this kind cannot have these options."""
    if linger and not is_async and atomic is not False:
        raise InvalidHandler(
            f"{shown(function)}: linger= is for batch=True with atomic=False, or an async def: an"
            " atomic handler does not wait for a full list, so leave out linger="
        )
    if is_async and atomic:
        raise InvalidHandler(
            f"{shown(function)} is async and atomic=True, but Django has no async"
            " transactions: make it a plain def, or leave out atomic= and commit its last"
            " writes together with the ack by `await delivery.afinish(function, ...)`"
        )
