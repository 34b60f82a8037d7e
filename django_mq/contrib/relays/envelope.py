"""A message as a CloudEvent, version 1.0. Source: https://github.com/cloudevents/spec.

The modules of the brokers spell its attributes as headers, each by the binding of its protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django_mq.conf.relays import Envelope
from django_mq.messages import Delivery

Attributes = dict[str, str | int | bool]

JSON = "application/json"
EVENT = "application/cloudevents+json; charset=utf-8"
#: Attributes of the message itself, which metadata cannot set.
OWN = {"specversion", "id", "source", "type", "time", "datacontenttype", "data", "database64"}
OWN |= {"partitionkey", "schemaversion"}
#: Larger numbers are not CloudEvents Integers.
INTEGERS = range(-(2**31), 2**31)
PERCENT = re.compile(r'[^\x21-\x7e]|["%]')


class Outgoing(NamedTuple):
    """One message for a broker; only the binary envelope has `attributes`."""

    id: str
    type: str
    key: str | None
    created_at: datetime
    content_type: str
    body: bytes
    attributes: Mapping[str, str | int | bool]
    source: str

    def headers(self, prefix: str) -> dict[str, str]:
        """Return the attributes as headers whose values are texts in any characters."""
        return {prefix + name: text_of(value) for name, value in self.attributes.items()}


def outgoing(delivery: Delivery, envelope: Envelope, source: str) -> Outgoing:
    """Return the message of `delivery` in an envelope; the payload is as it was stored."""
    payload = delivery._row.payload  # as text, so that floats and large numbers keep their form
    attributes = {} if envelope == "raw" else attributes_of(delivery, source)
    body, content_type = payload, JSON
    if envelope == "structured":
        body = f'{json.dumps(attributes)[:-1]}, "datacontenttype": "{JSON}", "data": {payload}}}'
        attributes, content_type = {}, EVENT
    return Outgoing(
        str(delivery.id),
        delivery.type,
        delivery.key,
        delivery.created_at,
        content_type,
        body.encode(),
        attributes,
        source,
    )


def attributes_of(delivery: Delivery, source: str) -> Attributes:
    """Return the context attributes of the event, without `datacontenttype`."""
    found: Attributes = {
        "specversion": "1.0",
        "id": str(delivery.id),
        "source": source,
        "type": delivery.type,
        "time": delivery.created_at.isoformat().replace("+00:00", "Z"),
        "schemaversion": delivery.schema_version,
    }
    if delivery.key is not None:
        found["partitionkey"] = delivery.key
    return {**extensions(delivery.metadata), **found}


def extensions(metadata: Mapping[str, Any]) -> Attributes:
    """Return metadata as CloudEvents attributes, whose names have only letters and digits.

    A name of the message's own gets the prefix `meta`. Nested values become JSON; null and empty
    texts are left out, which no attribute may be.

    >>> extensions({"mq.correlation_id": "7", "id": 5, "tags": ["a"], "subject": "s", "no": None})
    {'mqcorrelationid': '7', 'metaid': 5, 'tags': '["a"]', 'subject': 's'}
    """
    found: Attributes = {}
    for key, value in metadata.items():
        name = re.sub("[^a-z0-9]", "", key.lower())
        if name and value is not None and value != "":
            found[f"meta{name}" if name in OWN else name] = _attribute(value)
    return found


def _attribute(value: object) -> str | int | bool:
    """Return a value as an attribute: an integer outside `INTEGERS` becomes text.

    >>> _attribute(2**31 - 1), _attribute(2**31), _attribute(-(2**31)), _attribute(-(2**31) - 1)
    (2147483647, '2147483648', -2147483648, '-2147483649')
    >>> _attribute(["ä", 1.5])
    '["ä", 1.5]'
    """
    if isinstance(value, str | bool) or (isinstance(value, int) and value in INTEGERS):
        return value
    return json.dumps(value, ensure_ascii=False)


def text_of(value: str | int | bool) -> str:
    """Return the canonical text of an attribute's value.

    >>> text_of(True), text_of(5)
    ('true', '5')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def percent_encoded(text: str) -> str:
    """Return a text as the value of a header, by the rule of the HTTP and NATS bindings.

    >>> percent_encoded('50 % "€"')
    '50%20%25%20%22%E2%82%AC%22'
    """
    return PERCENT.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "replace")), text
    )
