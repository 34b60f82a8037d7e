"""Turn a message into the rows to store, one per handler: checked, encoded and routed.

Nothing here queries the database, so an error leaves the caller's transaction usable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.exceptions import InvalidName, RoutingError
from django_mq.handlers.nearest import warn_of_typo
from django_mq.messages import Message
from django_mq.outbox.options import check_integer, check_unique, moments, retry_json
from django_mq.outbox.origin import merged_json, origin_metadata, with_origin
from django_mq.outbox.write import CallQueues
from django_mq.policy.column_bounds import MAX_INTEGER, MAX_PRIORITY, MIN_PRIORITY
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_key, check_name
from django_mq.policy.routing import TASKS
from django_mq.store.rows import NewRow, Rows

if TYPE_CHECKING:
    from json import JSONEncoder

    from django_mq.conf import Settings

MAX_CACHED = 1024

#: The type, the queue and the metadata of a message that has no other options.
CacheKey = tuple[str, str | None, str]


class _Cache(NamedTuple):
    """Shared by all calls with the same settings and handlers."""

    settings: Settings
    table: object
    encoder: type[JSONEncoder]
    #: By cache key: the row for each handler without its payload.
    templates: dict[CacheKey | None, list[NewRow]]


_cache: _Cache | None = None


def _cache_for(settings: Settings, table: object) -> _Cache:
    global _cache
    found = _cache
    if found is None or found.settings is not settings or found.table is not table:
        found = _cache = _Cache(settings, table, settings.encoder_class, {})
    return found


class RowBuilder:
    """Build the rows of one call; settings, routes and the current delivery are looked up once.

    The rows are for the database `alias`. They go to `handler`, if given, and carry `reserved`:
    metadata of the package itself, as JSON text.
    """

    def __init__(
        self,
        alias: str,
        *,
        wants_result: bool = False,
        handler: handlers.Handler | None = None,
        reserved: str = "{}",
    ) -> None:
        self.settings = settings = get_settings()
        self._table = handlers.table()
        cache = _cache_for(settings, self._table)
        self._encoder = cache.encoder
        self._origin = merged_json(reserved, origin_metadata(settings.max_hops, alias))
        self._wants_result = wants_result
        self._handler = handler
        # Rows that depend on this call must stay out of the cache that all calls share.
        private = wants_result or handler is not None or self._origin != "{}"
        self._cached_templates = {} if private else cache.templates
        self.queues = CallQueues(settings)

    def add(self, rows: Rows, message: Message) -> int:
        """Append a row for each matching handler, or one without a handler; return how many.

        Raises a BroadcastError that says what is wrong with the message.
        """
        metadata = self._encode_metadata(message.metadata)
        cache_key = _cache_key(message, metadata)
        templates = self._cached_templates.get(cache_key)
        if templates is None:
            templates = self._templates(message, metadata, cache_key)
        value = {} if message.payload is None else message.payload
        payload = self.settings.encode_payload(value, encoder=self._encoder)
        for template in templates:
            rows.add(template, payload)
        return len(templates)

    def _templates(
        self, message: Message, metadata: str, cache_key: CacheKey | None
    ) -> list[NewRow]:
        templates = self._checked_templates(message, metadata)
        # Most messages of a bulk call differ only in their payload, so the rest is checked and
        # routed once. But each call must note again a queue that has a limit or is in commit order.
        if cache_key is not None and not (self.queues.max_backlogs or self.queues.in_commit_order):
            if len(self._cached_templates) >= MAX_CACHED:
                self._cached_templates.clear()
            self._cached_templates[cache_key] = templates
        return templates

    def _checked_templates(self, message: Message, metadata: str) -> list[NewRow]:
        """Check the other options; return the row for each handler, without its payload."""
        max_delay = self.settings.max_delay
        type = check_name(message.type, "type")
        queue = None if message.queue is None else check_name(message.queue, "queue")
        key = None if message.key is None else check_key(message.key, "key")
        check_unique(message, max_delay)
        priority = check_integer(message.priority, "priority", MIN_PRIORITY, MAX_PRIORITY)
        version = check_integer(message.schema_version, "schema_version", 1, MAX_INTEGER)
        due, delay, expires, lifetime = moments(message, max_delay)
        policy = retry_json(message.retry)
        found = self._match(type, metadata) if self._handler is None else (self._handler,)
        shared = {
            "type": type,
            "payload": "",
            "schema_version": version,
            "metadata": with_origin(
                metadata, self._origin, max_bytes=self.settings.max_metadata_bytes
            ),
            "priority": priority,
            "key": key,
            "retry": policy,
            "wants_result": self._wants_result,
            "due": due,
            "delay": delay,
            "expires": expires,
            "lifetime": lifetime,
        }
        return [
            self._row(handler, _queue_for(handler, type, queue, self.settings), message, shared)
            for handler in found or (None,)
        ]

    def _match(self, type: str, metadata: str) -> tuple[handlers.Handler, ...]:
        if type.startswith(TASKS):
            raise InvalidName(
                f"the type {type} cannot be broadcast: types that begin with {TASKS} are those of"
                " Django tasks, so call the task's enqueue()"
            )
        # `where` matches the metadata that a worker will read, not the objects before encoding.
        found = self._table.match(type, {} if metadata == "{}" else json.loads(metadata))
        if not found:
            warn_of_typo(type)
        if self._wants_result and len(found) > 1:
            raise RoutingError(
                f"{type} has several handlers, but only one can answer:"
                f" {', '.join(sorted(each.name for each in found))}; ask with a type that has one"
                " handler, or broadcast the message"
            )
        return found

    def _row(
        self,
        handler: handlers.Handler | None,
        queue: str,
        message: Message,
        shared: Mapping[str, Any],
    ) -> NewRow:
        options = self.queues.add(queue)
        policy = message.retry or handlers.retry_of(handler, queue, self.settings)
        return NewRow(
            queue=queue,
            max_attempts=policy.max_attempts,
            handler="" if handler is None else handler.name,
            ordered=options.ordered,
            **shared,
        )

    def _encode_metadata(self, metadata: object) -> str:
        if metadata is None:
            return "{}"
        return self.settings.encode_metadata(check_metadata(metadata), encoder=self._encoder)


def _cache_key(message: Message, metadata: str) -> CacheKey | None:
    """Return the cache key of a message if it has no options beyond those in the key, else None."""
    plain = (
        message.after is None
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
    return (message.type, message.queue, metadata) if plain else None


def _queue_for(
    handler: handlers.Handler | None, type: str, queue: str | None, settings: Settings
) -> str:
    if handler is None:
        return settings.default_queue if queue is None else queue
    if queue is None:
        return handlers.queue_of(handler, settings)
    if not handler.patterns:
        return queue  # the task backend has checked the queue
    if refused := handlers.disallowed(handler, type, queue, settings):
        raise RoutingError(refused)
    return queue
