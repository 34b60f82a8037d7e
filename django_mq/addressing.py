"""A message in, the rows to store out: checked, encoded and routed, one for each subscriber.

Nothing here asks the database, so whatever is wrong leaves the caller's transaction usable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django_mq import handlers
from django_mq.backoff import RetryPolicy, as_seconds
from django_mq.encoding import encode
from django_mq.exceptions import (
    InvalidOption,
    RoutingError,
    TooManyHops,
    UnreadablePayload,
    When,
    moment,
)
from django_mq.messages import Message, current_delivery
from django_mq.routing import MAX_NAME, check_name
from django_mq.store.rows import Kind, NewRow, Rows

if TYPE_CHECKING:
    from json import JSONEncoder

    from django_mq.conf import Settings

#: Keys of metadata that only django_mq writes begin so.
RESERVED = "mq."
LOWEST, HIGHEST = -100, 100
_ON_DUPLICATE = ("skip", "raise", "update", "debounce", "requeue")
_LARGEST = 2**31 - 1
#: So many addresses are remembered.
MOST_ADDRESSES = 1024


#: Type and queue.
Address = tuple[str, str | None]
#: By the address: the row of each subscriber, without its payload.
Routes = dict[Address | None, list[Kind]]


class _Learnt(NamedTuple):
    """What calls with the same settings and handlers need not find out again."""

    settings: Settings
    table: object
    encoder: type[JSONEncoder]
    routes: Routes


_learnt: _Learnt | None = None


def _learnt_with(settings: Settings, table: object) -> _Learnt:
    global _learnt
    found = _learnt
    if found is None or found.settings is not settings or found.table is not table:
        found = _learnt = _Learnt(settings, table, settings.encoder_class, {})
    return found


class Addresser:
    """Makes rows of messages; settings, routes and the delivery that runs are looked up once."""

    def __init__(self, settings: Settings, *, wants_result: bool = False) -> None:
        self._settings = settings
        self._table = handlers.table()
        learnt = _learnt_with(settings, self._table)
        self._encoder = learnt.encoder
        self._trace = trace(settings.max_hops)
        self._wants_result = wants_result
        #: What plain messages have in common, from earlier calls too where nothing is special.
        own = wants_result or self._trace != "{}"
        self._plain = {} if own else learnt.routes
        #: Of the queues met so far, those with `max_backlog`, and those with
        #: `key_order="commit"`: is their whole queue one line? Most calls meet none.
        self.limits: dict[str, int] = {}
        self.in_commit_order: dict[str, bool] = {}

    def rows(self, message: Message) -> list[NewRow]:
        """Return a row for each subscriber, or one without a handler if there is none.

        Raises a BroadcastError that says what is wrong with the message.
        """
        address = _plain_address(message)
        kinds = self._plain.get(address)
        if kinds is None:
            return self._learn(message, address)
        payload = (self._encode_payload(message.payload),)
        return [NewRow._make(before + payload + after) for before, after in kinds]

    def add(self, rows: Rows, message: Message) -> int:
        """Add these rows to those of other messages; return how many. Raises as `rows()`."""
        address = _plain_address(message)
        kinds = self._plain.get(address)
        if kinds is None:
            found = self._learn(message, address)
            rows.extend(found)
            return len(found)
        payload = self._encode_payload(message.payload)
        for kind in kinds:
            rows.add(kind, payload)
        return len(kinds)

    def _learn(self, message: Message, address: Address | None) -> list[NewRow]:
        rows = self._checked_rows(message)
        # Of many messages most differ in the payload alone: the rest is checked and routed once.
        # What is special each call has to learn anew.
        if address is not None and not (self.limits or self.in_commit_order):
            if len(self._plain) >= MOST_ADDRESSES:
                self._plain.clear()
            self._plain[address] = [row.kind for row in rows]
        return rows

    def _checked_rows(self, message: Message) -> list[NewRow]:
        settings = self._settings
        type = check_name(message.type, "type")
        queue = None if message.queue is None else check_name(message.queue, "queue")
        key = None if message.key is None else check_name(message.key, "key")
        _check_unique(message, settings.max_delay)
        priority = check_whole(message.priority, "priority", LOWEST, HIGHEST)
        version = check_whole(message.schema_version, "schema_version", 1, _LARGEST)
        due, delay, expires, lifetime = _moments(message, settings.max_delay)
        policy = _check_retry(message.retry)
        payload = self._encode_payload(message.payload)
        metadata = self._encode_metadata(message.metadata)
        # `where` is asked of what a worker will read, not of the objects it was made from.
        found = self._table.match(type, {} if metadata == "{}" else json.loads(metadata))
        if self._wants_result and len(found) > 1:
            raise RoutingError(
                f"{type} has several handlers, and one alone can answer:"
                f" {', '.join(sorted(each.name for each in found))}; ask with a type that one"
                " handler has, or broadcast it"
            )
        metadata = _joined(metadata, self._trace)
        rows = []
        for handler in found or (None,):
            target = _queue_for(handler, type, queue, settings)
            options = settings.queue(target)
            if options.max_backlog is not None:
                self.limits[target] = options.max_backlog
            if options.key_order is not None:
                self.in_commit_order[target] = options.ordered
            effective = message.retry or handlers.retry_of(handler, target, settings)
            rows.append(
                NewRow(
                    queue=target,
                    type=type,
                    payload=payload,
                    max_attempts=effective.max_attempts,
                    handler="" if handler is None else handler.name,
                    schema_version=version,
                    metadata=metadata,
                    priority=priority,
                    key=key,
                    retry=policy,
                    wants_result=self._wants_result,
                    ordered=options.ordered,
                    due=due,
                    delay=delay,
                    expires=expires,
                    lifetime=lifetime,
                )
            )
        return rows

    def _encode_payload(self, payload: object) -> str:
        return encode(
            {} if payload is None else payload,
            what="payload",
            max_bytes=self._settings.max_payload_bytes,
            max_depth=self._settings.max_depth,
            encoder=self._encoder,
        )

    def _encode_metadata(self, metadata: object) -> str:
        if metadata is None:
            return "{}"
        if not isinstance(metadata, Mapping):
            raise InvalidOption(f"metadata must be a dict, not {type(metadata).__name__}")
        for key in metadata:
            if not isinstance(key, str):
                raise InvalidOption(f"metadata has the key {key!r}: its keys are texts")
            if key.startswith(RESERVED):
                raise InvalidOption(
                    f"metadata has the key {key[:MAX_NAME]!r}: what begins with {RESERVED} is"
                    " reserved; leave it out when you pass on a delivery's metadata"
                )
        return encode(
            dict(metadata),
            what="metadata",
            max_bytes=self._settings.max_metadata_bytes,
            max_depth=self._settings.max_depth,
            encoder=self._encoder,
        )


def _plain_address(message: Message) -> Address | None:
    """Return the address of what has a type, a payload and perhaps a queue, and nothing else."""
    plain = (
        message.metadata is None
        and message.after is None
        and message.expires is None
        and message.retry is None
        and message.key is None
        and message.unique_id is None
        and message.unique_for is None
        and message.on_duplicate == "skip"
        and type(message.priority) is int
        and message.priority == 0
        and type(message.schema_version) is int
        and message.schema_version == 1
        and type(message.type) is str
        and (message.queue is None or type(message.queue) is str)
    )
    return (message.type, message.queue) if plain else None


def trace(max_hops: int) -> str:
    """Return, as JSON text, the metadata that says where a message came from.

    Inside a handler: the id that the whole chain shares, the id of the message being handled, and
    how long the chain is. Elsewhere nothing. Raises TooManyHops when it grows beyond `max_hops`:
    handlers that broadcast to each other would go round for ever.
    """
    delivery = current_delivery.get()
    if delivery is None:
        return "{}"
    found: Any
    try:
        found = delivery.metadata
    except UnreadablePayload:
        found = {}
    if not isinstance(found, dict):  # a row that others wrote
        found = {}
    before = found.get("mq.hops")
    hops = before + 1 if type(before) is int and before >= 0 else 1
    if hops > max_hops:
        raise TooManyHops(
            f"message {delivery.id} in queue {delivery.queue} ends a chain of {max_hops} handlers"
            " that broadcast (MAX_HOPS): look for handlers that broadcast to each other"
        )
    chain = found.get("mq.correlation_id")
    if not (isinstance(chain, str) and 0 < len(chain) <= MAX_NAME):
        chain = str(delivery.id)
    return json.dumps(
        {"mq.correlation_id": chain, "mq.causation_id": str(delivery.id), "mq.hops": hops}
    )


def _joined(metadata: str, trace: str) -> str:
    """Return two JSON objects as one; they share no key."""
    if trace == "{}":
        return metadata
    return trace if metadata == "{}" else f"{metadata[:-1]},{trace[1:]}"


def _queue_for(
    handler: handlers.Handler | None, type: str, queue: str | None, settings: Settings
) -> str:
    if handler is None:
        return settings.default_queue if queue is None else queue
    if queue is None:
        return handlers.queue_of(handler, settings)
    allowed = handlers.allowed_queues(handler, settings)
    if queue not in allowed:
        raise RoutingError(
            f"{type} cannot go to queue {queue}: its handler {handler.name} runs in"
            f" {', '.join(allowed)}; allow it with @handler(..., queues=({queue!r},))"
        )
    return queue


def _moments(
    message: Message, max_delay: float
) -> tuple[datetime | None, float, datetime | None, float | None]:
    """Return (due, delay, expires, lifetime), of each pair the form that was given.

    Seconds are left to the database's clock. This process's clock decides only whether a moment
    is absurdly far away, and whether a moment or a number of seconds is later.
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
    """Return (moment, None) or (None, seconds), whichever was given, and the moment it means."""
    try:
        found = moment(value)
        if isinstance(found, datetime):
            found = at = found.astimezone(UTC)
        else:
            at = now + timedelta(seconds=found)
    except (ValueError, OverflowError) as error:
        raise InvalidOption(f"{what}: {error}") from error
    if at - now > timedelta(seconds=max_delay):
        raise InvalidOption(f"{what} ({value}) is more than {max_delay:,.0f} s ahead (MAX_DELAY)")
    return (found, None, at) if isinstance(found, datetime) else (None, found, at)


def check_whole(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOption(f"{what} must be a whole number from {low} to {high}, not {value!r}")
    return int(value)


def _check_retry(retry: object) -> str | None:
    """Return the policy as JSON text; one with a callable raises InvalidOption."""
    if retry is None:
        return None
    if not isinstance(retry, RetryPolicy):
        raise InvalidOption(f"retry must be a RetryPolicy, not {type(retry).__name__}")
    return json.dumps(retry.to_data(), allow_nan=False)


def _check_unique(message: Message, longest: float) -> None:
    if message.on_duplicate not in _ON_DUPLICATE:
        raise InvalidOption(
            f"on_duplicate must be one of {', '.join(_ON_DUPLICATE)}, not {message.on_duplicate!r}"
        )
    if message.unique_id is not None:
        check_name(message.unique_id, "unique id")
    elif message.unique_for is not None or message.on_duplicate != "skip":
        option = "on_duplicate" if message.unique_for is None else "unique_for"
        raise InvalidOption(f"{option} says nothing without a unique id: give unique_id as well")
    seconds = unique_seconds(message)
    if seconds is not None and not 0 < seconds <= longest:
        raise InvalidOption(
            f"unique_for ({message.unique_for}) must be more than zero and at most"
            f" {longest:,.0f} s (MAX_DELAY)"
        )


def unique_seconds(message: Message) -> float | None:
    """Return `unique_for` as seconds; raises InvalidOption for what is no duration."""
    if message.unique_for is None:
        return None
    seconds = as_seconds(message.unique_for)
    if seconds is None:
        raise InvalidOption(f"unique_for is seconds or a timedelta, not {message.unique_for!r}")
    return seconds
