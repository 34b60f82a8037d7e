"""The filters in the URL of the list of messages, as a value."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NoReturn

from django.http import QueryDict

from django_mq.admin.filter_boxes import read_error_class, read_priority
from django_mq.admin.filter_moments import read_moment
from django_mq.admin.json_paths import read_path
from django_mq.conf.local_time import utc_now
from django_mq.policy.column_bounds import id_of
from django_mq.policy.message_filter import MessageFilter

#: Parameters of the URL, and the conditions that they set.
TEXTS = {
    "state": "state",
    "handler": "handler",
    "type": "type",
    "key": "key",
    "unique_id": "unique_id",
    "fingerprint": "fingerprint",
    "claimed_by": "worker",
}
IDS = ("id", "blocked_by")
MOMENTS = {
    "created_at_from": "since",
    "created_at_to": "until",
    "processable_after_from": "due_since",
    "processable_after_to": "due_until",
    "dead_at_from": "dead_since",
    "dead_at_to": "dead_until",
}
#: Columns for which an operation also compares beginnings, or values that are computed.
INEXACT = frozenset(("state", "type", "claimed_by"))
#: Parameters that the list ignores while they are empty.
OPTIONAL = MOMENTS.keys() | frozenset(
    ("handler", "type", "key", "queue", "priority", "error_class", "fingerprint", "claimed_by", "q")
)
#: The parameter for an action on the heads of the listed messages.
HEADS_PARAMETER = "heads"
#: Parameters that choose a page or an order, not messages.
NON_FILTER_PARAMETERS = frozenset(
    ("p", "o", "all", "e", "_popup", "_to_field", "_facets", "after", "before")
)


def filter_of(query: QueryDict, allowed: Collection[str] | None, *, private: bool) -> MessageFilter:
    """Return the filter of a list's URL; only messages of the `allowed` queues, None for all.

    `private` allows conditions on payload and metadata. Raises ValueError for a parameter that is
    unknown, or sets a condition again, since the operation would act on more messages than the list
    shows.
    """
    found: dict[str, Any] = {}
    now = utc_now()
    for name, texts in query.lists():
        text = texts[-1]
        if name in (*MOMENTS, "q"):
            text = text.strip()
        if name in NON_FILTER_PARAMETERS or (not text and name in OPTIONAL):
            continue
        more = _conditions(name, text, now, private=private)
        if more.keys() & found.keys():
            _refuse(name)
        found |= more
    if allowed is not None:
        queues = found.get("queues", allowed)
        found["queues"] = tuple(sorted(set(queues) & set(allowed)))
    return MessageFilter(**found)


def _conditions(name: str, text: str, now: datetime, *, private: bool) -> dict[str, Any]:
    """Return the conditions that one parameter sets, as the list reads it."""
    column = name.removesuffix("__exact")
    if name != column and column in INEXACT:
        return _refuse(name)
    if column in TEXTS and text:
        return {TEXTS[column]: text}
    if column in IDS:
        return {column: id_of(text.strip()) or _refuse(name)}
    if name in MOMENTS:
        return {MOMENTS[name]: read_moment(text, now)}
    if column == "priority":
        return {column: read_priority(text)}
    if column == "queue":
        return {"queues": (text,)}
    if name == "error_class":
        return {name: read_error_class(text)}
    if name == HEADS_PARAMETER:
        return {"heads": True}
    if name == "q":
        return _search(text, private=private)
    return _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"the filter {name!r} cannot be carried over to an operation")


def _search(text: str, *, private: bool) -> dict[str, Any]:
    path = read_path(text)
    if path is None:
        return {"search": text}
    if not private or path.is_secret:
        return _refuse("q")
    return {"path": (path.column, *path.path), "at_path": path.value}
