"""A filter of messages as a value, for the lists of the admin and for operations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.values import in_utc, short_repr

#: Both states in which a worker has a message.
IN_FLIGHT = "in_flight"
STATES = frozenset((IN_FLIGHT, "dead", "running", "leased", "blocked", "held", "expired"))
STATES |= {"paused", "retrying", "delayed", "processable"}
FINGERPRINT = re.compile("[0-9a-f]{16}")
#: Any text of a row, on one line: order keys have spaces and emoji that `isprintable()` refuses.
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*")
#: Any smallint, although a message has a priority from -100 to 100.
_PRIORITIES = range(-(2**15), 2**15)
_TEXTS = (
    *("state", "handler", "type", "key", "unique_id", "fingerprint", "error_class", "worker"),
    *("search", "at_path"),
)
_IDS = ("id", "blocked_by")
_OTHER_FIELDS = ("priority", "queues", "path", "metadata", "heads")
#: The conditions that are times.
TIMES = ("since", "until", "due_since", "due_until", "dead_since", "dead_until")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """The conditions that a message must meet, all of them; None means no condition.

    `queues`: its queue is one of these. `since` and `until` limit the time of the broadcast, the
    end excluded; `due_since` and the others limit other times in the same way. `type` may end in
    `*`. `fingerprint` is that of its last failed attempt, `error_class` the class of its last
    error. `metadata` is contained in its own; `at_path` is the text at `path` of its payload or
    metadata. `search` is its id, type, order key or unique id. With `heads`, an action applies not
    to the messages themselves but to the first message in the line of each.

    >>> MessageFilter(queues=("mail",), state="dead").as_json()
    {'queues': ['mail'], 'state': 'dead'}
    """

    queues: tuple[str, ...] | None = None
    state: str | None = None
    handler: str | None = None
    type: str | None = None
    id: int | None = None
    key: str | None = None
    unique_id: str | None = None
    blocked_by: int | None = None
    priority: int | None = None
    fingerprint: str | None = None
    error_class: str | None = None
    worker: str | None = None
    search: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    due_since: datetime | None = None
    due_until: datetime | None = None
    dead_since: datetime | None = None
    dead_until: datetime | None = None
    metadata: Mapping[str, Any] | None = None
    path: tuple[str, ...] | None = None
    at_path: str | None = None
    heads: bool | None = None

    def __post_init__(self) -> None:
        for name in (*_TEXTS, *_IDS, *TIMES, *_OTHER_FIELDS):
            value = getattr(self, name)
            if value is not None and not _fits(name, value):
                raise ValueError(
                    f"{short_repr(value)} is not a {name} that a filter of messages can have"
                )
        if (self.path is None) is not (self.at_path is None):
            raise ValueError("a filter of messages has a path and the text at it, or neither")

    def as_json(self) -> dict[str, Any]:
        """Return the conditions as JSON; times are ISO 8601."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: object) -> MessageFilter:
        """Return the filter that `as_json()` returned; raises ValueError for anything else.

        >>> MessageFilter.from_json({"queues": ["mail"]}).queues
        ('mail',)
        >>> MessageFilter.from_json({"queue": "mail"})
        Traceback (most recent call last):
        ...
        ValueError: a filter of messages has no 'queue'
        """
        if not isinstance(value, dict):
            raise ValueError("a filter of messages is a JSON object")
        given = dict(value)
        if unknown := given.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"a filter of messages has no {min(unknown)!r}")
        for name in ("queues", "path"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        for name in TIMES:
            if isinstance(given.get(name), str):
                given[name] = datetime.fromisoformat(given[name])
        return cls(**given)


def _fits(name: str, value: Any) -> bool:
    if name in ("queues", "path"):
        if type(value) is not tuple or not all(map(_is_text, value)):
            return False
        return name == "queues" or value[:1] in (("payload",), ("metadata",))
    if name == "heads":
        return value is True
    if name == "metadata":
        return isinstance(value, Mapping)
    if name in _IDS:
        return type(value) is int and 0 < value <= MAX_BIGINT
    if name == "priority":
        return type(value) is int and value in _PRIORITIES
    if name in TIMES:
        return isinstance(value, datetime) and value.utcoffset() is not None
    if name == "state":
        return _is_text(value) and value in STATES
    if name == "fingerprint":
        return _is_text(value) and FINGERPRINT.fullmatch(value) is not None
    return _is_text(value)


def _is_text(value: object) -> bool:
    """Return whether `value` is text that PostgreSQL can store, without control characters."""
    return type(value) is str and _TEXT.fullmatch(value) is not None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return in_utc(value).isoformat()
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
