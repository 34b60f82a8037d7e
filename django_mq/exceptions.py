"""One tree of errors, and what a handler may raise to say how its attempt ends."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta

#: A wait or a moment: seconds, a timedelta, or an aware datetime.
When = float | timedelta | datetime


class MQError(Exception):
    """Above everything that django_mq raises."""


class BroadcastError(MQError):
    """`broadcast()` stored nothing; the caller's transaction is still usable."""


class NotInTransaction(BroadcastError):
    """`broadcast()` was called with no `atomic()` block open on the queue's database."""


class InvalidName(BroadcastError, ValueError):
    """A type, queue, key, unique id or handler name breaks the one rule for names."""


class InvalidOption(BroadcastError, ValueError):
    """An option of `broadcast()` has a value that cannot be."""


class InvalidPayload(BroadcastError, ValueError):
    """Payload or metadata cannot be stored as JSON and read back the same."""


class PayloadTooLarge(InvalidPayload):
    """Payload or metadata is larger, as JSON text, than the settings allow."""


class RoutingError(BroadcastError):
    """The message cannot go to the queue, or to the handlers, that were asked for."""


class DuplicateMessage(BroadcastError):
    """The unique id is taken and `on_duplicate="raise"` was asked for."""


class TooManyHops(BroadcastError):
    """A chain of handlers that broadcast grew longer than `MAX_HOPS`."""


class BroadcastBusy(BroadcastError):
    """The queue is full, or somebody else holds the unique id for too long."""


class InvalidHandler(MQError, TypeError):
    """What `@handler` was put on, or its options, cannot become a handler."""


class LeaseLost(MQError):
    """The delivery is no longer this worker's: its settle changed nothing."""


class UnreadablePayload(MQError):
    """A stored payload cannot be decoded here; the message is held, not burned."""


class HandlerBrokeTransaction(MQError):
    """A handler ended or spoiled the transaction it ran in; its attempt failed."""


class RemoteError(MQError):
    """What was asked failed for good where it ran: no attempt follows.

    `id` is the message; `error_class` and `error_text` say what its handler raised last, the
    class with its module.
    """

    def __init__(self, id: int, error_class: str, error_text: str) -> None:
        super().__init__(id, error_class, error_text)
        self.id = id
        self.error_class = error_class
        self.error_text = error_text

    def __str__(self) -> str:
        return f"message {self.id} failed: {self.error_class}: {self.error_text}".rstrip(": ")


class Unanswered(RemoteError):
    """Nobody will answer: the message expired, was held too long, cancelled, discarded or purged.

    `error_text` says which.
    """

    def __str__(self) -> str:
        return f"message {self.id} will not be answered: {self.error_text}"


class ReplyTimeout(MQError, TimeoutError):
    """There is no reply within the time given; it may still come. `id` is the message."""

    def __init__(self, text: str, id: int | None = None) -> None:
        super().__init__(text)
        self.id = id


class CannotWait(MQError, RuntimeError):
    """No reply could come while this waits; the text says why, and what to do."""


class _Settle(Exception):
    """What a handler raises to say how its attempt ends; no failure of the code."""


class Retry(_Settle):
    """Raise it to have this message again: `after` then, else by the retry policy.

    `after` is seconds, a timedelta or an aware datetime. It uses an attempt.
    `backoff=True` also signals queue backoff. Raises ValueError on a bad `after`.
    """

    def __init__(self, after: When | None = None, *, backoff: bool = False) -> None:
        self.after = None if after is None else moment(after)
        self.backoff = bool(backoff)
        super().__init__("retry" if after is None else f"retry after {after}")


class Snooze(_Settle):
    """Raise it to have this message again at `after`; no attempt is used."""

    def __init__(self, after: When) -> None:
        self.after = moment(after)
        super().__init__(f"snooze until {after}")


class Reject(_Settle):
    """Raise it to dead-letter this message at once: `reason` is shown to people."""

    def __init__(self, reason: str = "rejected") -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


def moment(after: When) -> float | datetime:
    """Return `after` as seconds from now, or as the aware datetime that it is.

    Raises ValueError for what is negative, not finite, naive, or of another type.

    >>> moment(timedelta(minutes=2))
    120.0
    """
    if isinstance(after, datetime):
        if after.tzinfo is None or after.utcoffset() is None:
            raise ValueError(f"{after!r} is naive; give an aware datetime or seconds")
        return after
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"{after!r} is neither seconds, a timedelta nor an aware datetime")
    if not 0 <= seconds <= sys.float_info.max:  # nor NaN, nor 10**400
        raise ValueError(f"{after!r} is not a wait; give seconds of zero or more")
    return float(seconds)
