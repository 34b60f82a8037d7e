"""The errors of django_mq, and the exceptions that handlers raise to end an attempt."""

from __future__ import annotations

import math
import numbers
import reprlib
from datetime import MINYEAR, UTC, datetime, timedelta
from decimal import Decimal

#: A duration.
Seconds = float | timedelta
#: A wait or a moment: seconds, a timedelta, or an aware datetime.
When = float | timedelta | datetime

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


class MQError(Exception):
    """The base class of all errors that django_mq raises."""


class BroadcastError(MQError):
    """`broadcast()` stored nothing; the caller's transaction is still usable."""


class NotInTransaction(BroadcastError):
    """`broadcast()` was called with no `atomic()` block open on the queue's database."""


class InvalidName(BroadcastError, ValueError):
    """A type, queue, key, unique id or handler name breaks the rule for names."""


class InvalidOption(BroadcastError, ValueError):
    """An option of `broadcast()` or `periodic()` has an impossible value."""


class InvalidPayload(BroadcastError, ValueError):
    """The payload or metadata cannot be stored as JSON and read back unchanged."""

    #: The text for a log, without any part of the payload; empty if there is none.
    _redacted_text = ""


class UnexpectedPayload(InvalidPayload):
    """A stored payload does not fit the message class that its handler takes: dead at once."""


class PayloadTooLarge(InvalidPayload):
    """The payload or metadata, as JSON text, is larger than the settings allow."""


class RoutingError(BroadcastError):
    """A handler does not allow the requested queue, or several handlers would answer a request."""


class DuplicateMessage(BroadcastError):
    """The unique id is taken, and the message has `on_duplicate="raise"`."""


class TooManyHops(BroadcastError):
    """A chain of handlers that broadcast is longer than `MAX_HOPS`."""


class BroadcastBusy(BroadcastError):
    """The queue is full, or another transaction holds the unique id or the key for too long."""


class NothingKept(MQError):
    """A handled message cannot be replayed: its payload was not kept."""


class NotWaiting(MQError):
    """A message cannot be edited: it is in flight, dead or gone, or its payload has changed."""


class InvalidHandler(MQError, TypeError):
    """The object decorated with `@handler`, or an option of it, cannot make a handler."""


class InvalidMessage(MQError, TypeError):
    """The object decorated with `@message` or `@upcast`, or an option of it, is unusable."""


class LeaseLost(MQError):
    """The lease of the delivery is lost, so settling it changed nothing."""


class UnreadablePayload(MQError):
    """This interpreter cannot decode a stored payload; the message is held, and uses no attempt."""


class HandlerBrokeTransaction(MQError):
    """A handler ended or broke the transaction it ran in; its attempt failed."""


class RemoteError(MQError):
    """The handler of a request failed permanently: no attempt follows.

    `id` is the message's id; `error_class` (with its module) and `error_text` describe the error of
    the last attempt.
    """

    def __init__(self, id: int, error_class: str, error_text: str) -> None:
        super().__init__(id, error_class, error_text)
        self.id = id
        self.error_class = error_class
        self.error_text = error_text

    def __str__(self) -> str:
        return f"message {self.id} failed: {self.error_class}: {self.error_text}".rstrip(": ")


class Unanswered(RemoteError):
    """No handler will answer the request; `error_text` says why.

    The message expired, was held for too long, cancelled, discarded or purged.
    """

    def __str__(self) -> str:
        return f"message {self.id} will not be answered: {self.error_text}"


class ReplyTimeout(MQError, TimeoutError):
    """No reply came within the timeout; it may still come. `id` is the message's id."""

    def __init__(self, text: str, id: int | None = None) -> None:
        super().__init__(text)
        self.id = id


class CannotWait(MQError, RuntimeError):
    """No reply could come while the caller waits; the text says why, and what to do."""


class Retry(Exception):
    """Raise this in a handler to retry the message: at `after`, else by the retry policy.

    The attempt counts. `after` is seconds, a timedelta or an aware datetime; anything else raises
    ValueError. `backoff=True` also signals queue backoff.
    """

    def __init__(self, after: When | None = None, backoff: bool = False) -> None:
        self.after = None if after is None else checked_when(after)
        self.backoff = bool(backoff)
        super().__init__(*(() if after is None else (after,)))  # what a copy is made from

    def __str__(self) -> str:
        return f"retry after {self.args[0]}" if self.args else "retry"


class Snooze(Exception):
    """Raise this in a handler to run the message again at `after`; the attempt does not count.

    `after` is seconds, a timedelta or an aware datetime; anything else raises ValueError. The wait
    is at least 0.1 s. `backoff=True` also signals queue backoff: a service that the handler needs
    is unavailable.
    """

    def __init__(self, after: When, backoff: bool = False) -> None:
        self.after = checked_when(after)
        self.backoff = bool(backoff)
        super().__init__(after)

    def __str__(self) -> str:
        return f"snooze until {self.args[0]}"


class Reject(Exception):
    """Raise this in a handler to dead-letter the message at once; operators see `reason`."""

    def __init__(self, reason: str = "rejected") -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


def short_repr(value: object) -> str:
    """Return a value as text for an error: a few hundred characters at most, whatever it is.

    >>> short_repr("5"), short_repr(10**5000)
    ("'5'", 'a value of type int')
    """
    try:
        return _SHORT.repr(value)
    except Exception:  # an integer of more digits than Python prints; a hostile subclass
        return f"a value of type {type(value).__name__}"


def as_seconds(value: object) -> float | None:
    """Return a number or a timedelta as seconds; None unless it is finite and >= 0.

    >>> as_seconds(timedelta(minutes=1)), as_seconds(2), as_seconds(-1), as_seconds("2")
    (60.0, 2.0, None, None)
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    else:
        try:
            seconds = float(value)
        except (OverflowError, ValueError):  # 10**400; Decimal("sNaN")
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def checked_when(after: When) -> float | datetime:
    """Return `after` as seconds from now, or in UTC if it is an aware datetime.

    Raises ValueError if it is naive, or neither a datetime nor a duration as of `as_seconds()`.

    >>> checked_when(timedelta(minutes=2))
    120.0
    """
    if isinstance(after, datetime):
        if after.tzinfo is None or after.utcoffset() is None:
            raise ValueError(f"{short_repr(after)} is naive; give an aware datetime or seconds")
        return in_utc(after)
    seconds = as_seconds(after)
    if seconds is None:
        raise ValueError(
            f"{short_repr(after)} is not a valid wait; give seconds of zero or more, a timedelta or"
            " an aware datetime"
        )
    return seconds


def in_utc(at: datetime) -> datetime:
    """Return an aware datetime in UTC; where Python has no such year, its first or last moment.

    PostgreSQL refuses text with an offset of 16 hours or more, or with a fraction of a second in
    the offset; Python's datetimes may have both.
    """
    try:
        return at.astimezone(UTC)
    except OverflowError:
        return (datetime.min if at.year == MINYEAR else datetime.max).replace(tzinfo=UTC)
