"""The metadata that django_mq adds to the messages that a handler broadcasts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from django_mq.exceptions import TooManyHops, UnreadablePayload
from django_mq.messages import Delivery, current_delivery, foreign_alias
from django_mq.policy.causes import name_in
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.metadata import MAX_ADDED, RESERVED

#: Each returns further metadata for a broadcast, such as the context of a trace. It is called once
#: per call of `broadcast()` or `broadcast_many()`.
metadata_sources: list[Callable[[], Mapping[str, str]]] = []


def origin_metadata(max_hops: int, alias: str) -> str:
    """Return the `mq.` metadata of a message that is broadcast now into `alias`, as JSON text.

    Inside a handler: the id that the whole chain shares, the id of the current message, and the
    length of the chain. Elsewhere only what `metadata_sources` add. Raises TooManyHops when the
    chain is longer than `max_hops`: handlers that broadcast to each other would go on for ever.
    """
    delivery = current_delivery.get()
    if delivery is None and not metadata_sources:
        return "{}"
    found: dict[str, Any] = {}
    for source in metadata_sources:
        found.update(source())
    if delivery is not None:
        found.update(_chain(delivery, max_hops, alias))
    return json.dumps(found) if found else "{}"


def _chain(delivery: Delivery, max_hops: int, alias: str) -> dict[str, Any]:
    """Return the `mq.` metadata of messages that the handler of `delivery` broadcasts."""
    found: Any
    try:
        found = delivery.metadata
    except UnreadablePayload:
        found = {}
    if not isinstance(found, dict):  # django_mq did not write this row
        found = {}
    before = found.get("mq.hops")
    hops = before + 1 if type(before) is int and before >= 0 else 1
    if hops > max_hops:
        error = TooManyHops(
            f"message {delivery.id} in queue {delivery.queue} ends a chain of {max_hops}"
            " broadcasts by handlers (MAX_HOPS): look for handlers that broadcast to each other"
        )
        error.message_id = delivery.id
        raise error
    chain = found.get("mq.correlation_id")
    if not (isinstance(chain, str) and 0 < len(chain) <= MAX_NAME):
        chain = str(delivery.id)
    cause = str(delivery.id)
    if (source := foreign_alias(alias)) is not None:
        chain, cause = (name_in(alias, each, source=source) for each in (chain, cause))
    return {"mq.correlation_id": chain, "mq.causation_id": cause, "mq.hops": hops}


def merged_json(metadata: str, origin: str) -> str:
    """Return one JSON object with the keys of both; jsonb keeps those of `origin`."""
    if origin == "{}":
        return metadata
    return origin if metadata == "{}" else f"{metadata[:-1]},{origin[1:]}"


def with_origin(metadata: str, origin: str, *, max_bytes: int) -> str:
    """Return the JSON of both, without the entries of `metadata_sources` that workers would refuse.

    `max_bytes` is the limit of `metadata` alone. The largest entries are left out first.
    """
    merged = merged_json(metadata, origin)
    room = max_bytes + MAX_ADDED
    if 4 * len(merged) <= room or len(merged.encode()) <= room:
        return merged
    entries = json.loads(origin)
    sourced = (name for name in entries if not name.startswith(RESERVED))
    for name in sorted(sourced, key=lambda name: len(entries[name]), reverse=True):
        del entries[name]
        merged = merged_json(metadata, json.dumps(entries))
        if len(merged.encode()) <= room:
            break
    return merged
