"""The options of a message, checked before any SQL."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar, get_args

from django_mq.exceptions import InvalidOption
from django_mq.messages import Message
from django_mq.policy.backoff import BackoffStrategy, RetryPolicy
from django_mq.policy.column_bounds import FIRST_TIME, LAST_TIME
from django_mq.policy.names import check_key
from django_mq.policy.uniqueness import OnDuplicate
from django_mq.store.rows import NewRow
from django_mq.values import When, as_seconds, checked_when, short_repr

P = ParamSpec("P")
T = TypeVar("T")

_ON_DUPLICATE = get_args(OnDuplicate)


def moments(
    message: Message, max_delay: float
) -> tuple[datetime | None, float, datetime | None, float | None]:
    """Return (due, delay, expires, lifetime): a datetime stays one, and seconds stay seconds.

    The database's clock counts the seconds. This process's clock decides only whether a moment is
    absurdly far away, and whether `expires` comes after `after` (if that is missing: after now). A
    message whose `after` and `expires` both lie in the past is stored, and dead-lettered as
    expired.
    """
    if message.after is None and message.expires is None:
        return None, 0.0, None, None
    now = datetime.now(UTC)
    due = delay = None
    start = now
    if message.after is not None:
        due, delay, start = _moment(message.after, "after", now, max_delay)
    if message.expires is None:
        return due, delay or 0.0, None, None
    expires, lifetime, end = _moment(message.expires, "expires", now, max_delay)
    if end <= start:
        later = "now" if message.after is None else f"after ({message.after})"
        raise InvalidOption(
            f"expires ({message.expires}) is not later than {later}: no attempt could ever start"
        )
    return due, delay or 0.0, expires, lifetime


def _moment(
    value: When, what: str, now: datetime, max_delay: float
) -> tuple[datetime | None, float | None, datetime]:
    """Return (moment, None) or (None, seconds), as `value` is given; and the moment it means."""
    try:
        found = checked_when(value)
    except ValueError as error:
        raise InvalidOption(f"{what}: {error}") from error
    at = _as_moment(found, now)
    if at - now > timedelta(seconds=max_delay):
        raise InvalidOption(f"{what} ({value}) is more than {max_delay:,.0f} s ahead (MAX_DELAY)")
    if not FIRST_TIME <= at <= LAST_TIME:
        raise InvalidOption(
            f"{what} ({value}) cannot be stored: give a time from {FIRST_TIME:%Y} to {LAST_TIME:%Y}"
        )
    return (at, None, at) if isinstance(found, datetime) else (None, found, at)


def starts_before_expiry(due: NewRow, content: NewRow) -> bool:
    """Return whether a message that is due like `due` could start before `content` expires.

    As in `moments()`, this process's clock decides only between seconds and a datetime.
    """
    now = datetime.now(UTC)
    end = content.expires
    if end is None:
        if content.lifetime is None:
            return True
        end = now + timedelta(seconds=content.lifetime)
    return (due.due or now + timedelta(seconds=due.delay)) < end


def _as_moment(found: float | datetime, now: datetime) -> datetime:
    """Return the moment that `checked_when()` found; if beyond Python's years, the last one."""
    if isinstance(found, datetime):
        return found
    try:
        return now + timedelta(seconds=found)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def check_integer(value: object, what: str, low: int, high: int) -> int:
    """Return `value` as an int from `low` to `high`; raise InvalidOption for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOption(
            f"{what} must be a whole number from {low} to {high}, not {short_repr(value)}"
        )
    return int(value)


def retry_json(retry: object) -> str | None:
    """Return the policy as JSON text, if any; raise InvalidOption if it cannot be stored."""
    if retry is None:
        return None
    if not isinstance(retry, RetryPolicy):
        given = type(retry).__name__
        if isinstance(retry, BackoffStrategy):
            given += f": write RetryPolicy(backoff={given.lower()}(...))"
        raise InvalidOption(f"retry must be a RetryPolicy, not {given}")
    return json.dumps(retry.to_data(), allow_nan=False)


def check_unique(message: Message, max_delay: float) -> None:
    """Raise InvalidOption, or TypeError for options that do nothing without a unique id."""
    if message.on_duplicate not in _ON_DUPLICATE:
        raise InvalidOption(
            f"on_duplicate must be one of {', '.join(_ON_DUPLICATE)},"
            f" not {short_repr(message.on_duplicate)}"
        )
    if message.unique_id is not None:
        check_key(message.unique_id, "unique id")
    elif message.unique_for is not None or message.on_duplicate != "skip":
        option = "on_duplicate" if message.unique_for is None else "unique_for"
        raise TypeError(
            f"{option} does nothing without a unique id, so every message would be stored:"
            f" give unique_id=... as well, or leave out {option}"
        )
    seconds = unique_seconds(message)
    if seconds is not None and not 0 < seconds <= max_delay:
        raise InvalidOption(
            f"unique_for ({message.unique_for}) must be more than zero and at most"
            f" {max_delay:,.0f} s (MAX_DELAY)"
        )


def unique_seconds(message: Message) -> float | None:
    """Return `unique_for` in seconds; raise InvalidOption if it is not a duration."""
    if message.unique_for is None:
        return None
    seconds = as_seconds(message.unique_for)
    if seconds is None:
        raise InvalidOption(
            "unique_for must be more than zero seconds, or a timedelta,"
            f" not {short_repr(message.unique_for)}"
        )
    return seconds


def options_of(
    function: Callable[P, T],
) -> Callable[[Callable[..., Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Give an async function the signature of `function`, for type checkers, help() and editors."""

    def give(async_function: Callable[..., Coroutine[Any, Any, T]]) -> Any:
        async_function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return async_function

    return give
