"""A message that a broker delivers, and the message that an inbox makes of it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from django_mq.conf.inboxes import Inbox
from django_mq.contrib.relays.envelope import OWN
from django_mq.exceptions import InvalidName, InvalidOption
from django_mq.messages import Message
from django_mq.policy.column_bounds import MAX_INTEGER, MAX_NAME
from django_mq.policy.names import check_key

#: How the bindings of CloudEvents begin the names of headers.
PREFIXES = ("ce-", "ce_", "cloudEvents_", "cloudEvents:")
#: The member of a structured event whose data is not JSON.
BINARY = "data_base64"


class Undecodable(Exception):
    """An incoming message cannot be broadcast.

    `reason` says why, without any content. The text is for users who may see payloads.
    """

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message of a broker, as the callables of an inbox get it.

    `id`: the broker's own id, None if it has none. `key`: of Kafka's record. `attributes` and
    `payload`: of the CloudEvent; a message that is none has no attributes, and JSON as its payload.
    `token`: what the source needs to ack it. `flaw`: why the source could not make a body of it.
    """

    body: bytes
    headers: Mapping[str, str]
    content_type: str
    id: str | None
    key: str | None = None
    token: Any = None
    flaw: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    payload: Any = None


def decoded(raw: Incoming) -> Incoming:
    """Return the message with its attributes and payload. Raises Undecodable."""
    if raw.flaw:
        raise Undecodable(raw.flaw)
    attributes = {
        name: value
        for prefix in PREFIXES
        for name, value in _attributes(raw.headers, prefix).items()
    }
    document = _json(raw.body)
    if raw.content_type.lower().startswith("application/cloudevents"):
        if not isinstance(document, dict):
            raise Undecodable("it is not a JSON object, so not a CloudEvent")
        attributes = {k: v for k, v in document.items() if k not in ("data", BINARY)}
        binary = {BINARY: document[BINARY]} if BINARY in document else None
        document = document.get("data", binary)
    return replace(raw, attributes=attributes, payload=document)


def message_of(raw: Incoming, name: str, inbox: Inbox) -> Message:
    """Return the message to broadcast for one that came in through the inbox `name`.

    Raises Undecodable.
    """
    try:
        return _message_of(decoded(raw), name, inbox)
    except Undecodable:
        raise
    except Exception as error:  # of our own code: it must not stop the inbox
        raise Undecodable(type(error).__name__, f"{type(error).__name__}: {error}") from error


def _message_of(found: Incoming, name: str, inbox: Inbox) -> Message:
    version = found.attributes.get("schemaversion", 1)
    return Message(
        _type(found, name, inbox),
        found.payload,
        queue=inbox.queue,
        metadata=_metadata(found),
        schema_version=_version(version),
        key=_key(found),
        unique_id=_unique_id(found, name, inbox),
        unique_for=inbox.unique_for,
    )


def default_type(name: str) -> str:
    """Return the type of the messages of an inbox whose settings name none."""
    return f"inbox.{name}"


def undecodable_payload(raw: Incoming) -> dict[str, Any]:
    """Return the payload of a dead letter for a message that could not be decoded."""
    return {
        "raw": base64.b64encode(raw.body).decode(),
        "content_type": _storable(raw.content_type),
        "headers": {_storable(k): _storable(v) for k, v in raw.headers.items()},
        "id": None if raw.id is None else _storable(raw.id),
        "key": None if raw.key is None else _storable(raw.key),
        "flaw": raw.flaw,
    }


def incoming_of(payload: Mapping[str, Any]) -> Incoming:
    """Return the message whose dead letter has `payload`, the opposite of `undecodable_payload()`.

    Raises KeyError, TypeError or ValueError if it is no such payload.
    """
    return Incoming(
        base64.b64decode(payload["raw"]),
        dict(payload["headers"]),
        payload["content_type"],
        payload["id"],
        key=payload.get("key"),
        flaw=payload.get("flaw", ""),
    )


def _storable(text: str) -> str:
    """Replace the characters that PostgreSQL refuses in JSON: nulls and lone surrogates.

    >>> _storable("a\\0b"), _storable("\\udcff")
    ('a\ufffdb', '?')
    """
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _attributes(headers: Mapping[str, str], prefix: str) -> dict[str, Any]:
    found = {
        name[len(prefix) :].lower(): value
        for name, value in headers.items()
        if name.lower().startswith(prefix.lower())
    }
    if prefix != "ce-":
        return found
    try:
        return {name: unquote(value, errors="strict") for name, value in found.items()}
    except UnicodeDecodeError as error:
        raise Undecodable("an attribute is not percent-encoded UTF-8") from error


def _json(body: bytes) -> Any:
    try:
        return json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Undecodable("its body is not JSON", f"its body is not JSON: {error}") from error


def _type(found: Incoming, name: str, inbox: Inbox) -> str:
    if inbox.type is None:
        return default_type(name)
    return inbox.type if isinstance(inbox.type, str) else _asked(inbox.type, found, "type")


def _unique_id(found: Incoming, name: str, inbox: Inbox) -> str:
    """Return the unique id: the inbox and the message's id, hashed if it is too long."""
    if inbox.id == "hash":
        id: str | None = hashlib.sha256(found.body).hexdigest()
    elif callable(inbox.id):
        id = _asked(inbox.id, found, "id")
    else:
        id = _event_id(found.attributes) or found.id
    if not id:
        raise Undecodable("it has no message_id: set the inbox's 'id' to 'hash' or a callable")
    try:
        return check_key(f"{name}:{id}", "unique id")
    except (InvalidName, InvalidOption):
        digest = hashlib.sha256(f"{name}:{id}".encode("utf-8", "surrogatepass")).hexdigest()
        hashed = f"{name}:{digest}"
        return hashed if len(hashed) <= MAX_NAME else digest


def _event_id(attributes: Mapping[str, Any]) -> str | None:
    """Return what makes a CloudEvent unique: its source and id. Returns None if it is no event.

    The ids of a relay are those of its database, which gives some of them again after a backup was
    restored. Its events, which have a `schemaversion`, are told apart by their time as well.

    The first `#` ends the source. Some services send numbers, which should be texts.

    >>> _event_id({"source": "/shop", "id": "7", "time": "2026-01-01T00:00:00Z"})
    '/shop#7'
    >>> _event_id({"source": "/a%#b", "id": 7})
    '/a%25%23b#7'
    >>> _event_id(
    ...     {"source": "/shop", "id": "7", "time": "2026-01-01T00:00:00Z", "schemaversion": "1"}
    ... )
    '/shop#7@2026-01-01T00:00:00Z'
    """
    source, id = attributes.get("source"), attributes.get("id")
    if not (source and isinstance(source, str) and id != "" and isinstance(id, str | int)):
        return None
    source = source.replace("%", "%25").replace("#", "%23")
    if "schemaversion" in attributes and (time := attributes.get("time")):
        return f"{source}#{id}@{time}"
    return f"{source}#{id}"


def _asked(function: Any, found: Incoming, what: str) -> str:
    try:
        answer = function(found)
    except Exception as error:
        reason = f"the inbox's {what!r} raised {type(error).__name__}"
        raise Undecodable(reason, f"{reason}: {error}") from error
    if not isinstance(answer, str):
        raise Undecodable(f"the inbox's {what!r} returned {type(answer).__name__}, not text")
    if not answer:
        raise Undecodable(f"the inbox's {what!r} returned an empty text")
    return answer


def _key(found: Incoming) -> str | None:
    key = found.attributes.get("partitionkey", found.key)
    try:
        return None if key is None else check_key(key, "key")
    except (InvalidName, InvalidOption):
        return None  # not a valid key here


def _version(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return 1
    return number if 1 <= number <= MAX_INTEGER else 1


def _metadata(found: Incoming) -> dict[str, Any]:
    """Return the attributes and headers as metadata; those of the event itself begin with `ce_`."""
    metadata: dict[str, Any] = {}
    for name, value in found.attributes.items():
        if name == "schemaversion":
            continue
        known = name in OWN or name in ("subject", "dataschema")
        metadata[f"ce_{name}" if known else name.removeprefix("mq.")[:MAX_NAME]] = value
    others = {
        name: value
        for name, value in found.headers.items()
        if not name.lower().startswith(tuple(each.lower() for each in PREFIXES))
    }
    if others:
        metadata["headers"] = others
    return metadata
