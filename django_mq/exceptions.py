"""The errors of django_mq, and the exceptions that handlers raise to end an attempt."""

from __future__ import annotations

from django_mq.values import When, checked_when


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
    """A chain of handlers that broadcast is longer than `MAX_HOPS`.

    If it ends the handler of message `message_id`, the last of the chain, that one is dead at once.
    """

    message_id: int | None = None


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
    """This interpreter cannot decode a stored payload; the message is held, without an attempt."""


class HandlerBrokeTransaction(MQError):
    """A handler ended or broke the transaction in which it ran; its attempt failed."""


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
        super().__init__(*(() if after is None else (after,)))  # a copy is made from these

    def __str__(self) -> str:
        return f"retry after {self.args[0]}" if self.args else "retry"


class Snooze(Exception):
    """Raise this in a handler to run the message again at `after`; the attempt does not count.

    `after` is seconds, a timedelta or an aware datetime; anything else raises ValueError. The wait
    is at least 0.1 s. `backoff=True` also signals queue backoff: a service that the handler needs
    is unavailable. Operators see `reason` as the last error of the message.
    """

    reason = ""

    def __init__(self, after: When, backoff: bool = False, reason: str = "") -> None:
        self.after = checked_when(after)
        self.backoff = bool(backoff)
        if reason:  # a subclass may have a property instead
            self.reason = str(reason)
        super().__init__(after)

    def __str__(self) -> str:
        return self.reason or f"snooze until {self.args[0]}"


class Reject(Exception):
    """Raise this in a handler to dead-letter the message at once; operators see `reason`."""

    def __init__(self, reason: str = "rejected") -> None:
        self.reason = str(reason)
        super().__init__(self.reason)
