"""The filters of the list of messages as a value: from the URL, and in words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import QueryDict

from django_mq.admin.filter_boxes import read_priority
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
    "error_class": "error_class",
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
#: The parameter for an action on the heads of the listed messages.
HEADS_PARAMETER = "heads"
#: Parameters that choose a page or an order, not messages.
NON_FILTER_PARAMETERS = frozenset(
    ("p", "o", "all", "e", "_popup", "_to_field", "_facets", "after", "before")
)


def filter_of(query: QueryDict, allowed: Collection[str] | None, *, private: bool) -> MessageFilter:
    """Return the filter of a list's URL; only messages of the `allowed` queues, None for all.

    `private` allows conditions on payload and metadata. Raises ValueError for an unknown parameter,
    since the operation would act on more messages than the list shows.
    """
    found: dict[str, Any] = {}
    now = utc_now()
    for name, texts in query.lists():
        text, column = texts[-1].strip(), name.removesuffix("__exact")
        if name in NON_FILTER_PARAMETERS or not text:
            continue
        if column in TEXTS:
            found[TEXTS[column]] = text
        elif column in IDS:
            found[column] = id_of(text) or _no(name)
        elif column in MOMENTS:
            found[MOMENTS[column]] = read_moment(text, now)
        elif column == "priority":
            found[column] = read_priority(text)
        elif column == "queue":
            found["queues"] = (text,)
        elif column == HEADS_PARAMETER:
            found["heads"] = True
        elif column == "q":
            found |= _search(text, private=private)
        else:
            _no(name)
    if allowed is not None:
        queues = found.get("queues", allowed)
        found["queues"] = tuple(sorted(set(queues) & set(allowed)))
    return MessageFilter(**found)


def _no(name: str) -> Any:
    raise ValueError(f"the filter {name!r} cannot be carried over to an operation")


def _search(text: str, *, private: bool) -> dict[str, Any]:
    path = read_path(text)
    if path is None:
        return {"search": text.removeprefix("#")}
    if not private or path.is_secret:
        return _no("q")  # type: ignore[no-any-return]
    return {"path": (path.column, *path.path), "at_path": path.value}
