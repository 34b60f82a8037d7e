"""The ids of the rows to which an action applies: selected in a list, or posted by a form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.http import HttpRequest

from django_mq.policy.column_bounds import id_of

#: The maximum number of messages in one action.
MAX_MESSAGES = 1000


def ids_of(texts: Sequence[str]) -> list[int]:
    """Return ids sorted and without duplicates; raises BadRequest for a text that is not an id."""
    found = {id_of(text) for text in texts}
    ids = sorted(id for id in found if id is not None)
    if len(ids) < len(found):
        raise BadRequest("A selected value is not the id of a message.")
    return ids


def ticked_ids(request: HttpRequest) -> list[int]:
    """Return the ids of the rows whose boxes the user has ticked, like `ids_of()`."""
    return ids_of(request.POST.getlist(ACTION_CHECKBOX_NAME))


def first_ids(rows: QuerySet[Any]) -> list[int]:
    """Return the ids of the first rows, up to one more than the maximum of an action."""
    return list(rows.order_by("pk").values_list("pk", flat=True)[: MAX_MESSAGES + 1])


def posted_ids(request: HttpRequest) -> list[int]:
    """Return the posted `ids`, like `ids_of()`; raises BadRequest also for too many."""
    ids = ids_of(request.POST.get("ids", "").split(","))
    if len(ids) > MAX_MESSAGES:
        raise too_many()
    return ids


def too_many() -> BadRequest:
    """Return the error of an action on more messages than it takes."""
    return BadRequest(f"Select at most {MAX_MESSAGES:,} messages for one action.")
