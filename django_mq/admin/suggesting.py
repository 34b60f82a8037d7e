"""Suggests paths of payload and metadata to the search box of the list of messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Case, F, Func, IntegerField, Q, TextField, Value, When
from django.db.models.functions import Cast, Length
from django.db.models.lookups import LessThan
from django.http import HttpRequest, HttpResponse, JsonResponse

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import TookTooLong, limited_statements
from django_mq.admin.own_pages import own_page
from django_mq.models import QueuedMessage
from django_mq.queues.redaction import REDACTED, redacted

#: The number of newest messages that are examined, and the number of characters from which a
#: document is too large.
NEWEST, MAX_DOCUMENT_CHARS = 200, 8192
#: The maximum number of paths that are offered, and of keys in a path.
MAX_PATHS, MAX_PATH_KEYS = 50, 5
_KEY = re.compile(r"[^.:\x00-\x1f\x7f-\x9f]{1,64}")


class SuggestingAdmin(ReadOnlyAdmin):
    """Adds the address that the search box queries once it has the focus."""

    def may_search_documents(self, request: HttpRequest) -> bool:
        """Return whether the user may see messages and their payloads."""
        return self.may_see_messages(request) and self.may_see_payloads(request)

    def paths_url(self, request: HttpRequest) -> str:
        """Return the address of the suggestions, empty if the user may not search documents."""
        return self.url(QueuedMessage, "paths") if self.may_search_documents(request) else ""

    @own_page(QueuedMessage, "paths", "paths/")
    def paths_view(self, request: HttpRequest) -> HttpResponse:
        """Return the paths in the newest messages as JSON; none if the database takes too long."""
        if not self.may_search_documents(request):
            raise PermissionDenied
        try:
            with limited_statements(self.alias):
                found = most_seen(self._paths(request))
        except TookTooLong:
            found = []
        return JsonResponse({"paths": found})

    def _paths(self, request: HttpRequest) -> Iterator[str]:
        every = QueuedMessage.objects.using(self.alias)
        newest = list(every.order_by("-pk").values_list("pk", flat=True)[:NEWEST])
        rows = self.scoped(request, every.filter(pk__in=newest))
        columns = ("payload", "metadata")
        return chain.from_iterable(
            paths_in(_decoded(text), column)
            for column in columns
            for text in rows.filter(_is_small(column)).values_list(
                Cast(column, TextField()), flat=True
            )
        )


def _is_small(column: str) -> Q:
    """Return the condition that a document is short as text; does not decompress large ones."""
    stored = Func(F(column), function="pg_column_size", output_field=IntegerField())
    length = Length(Cast(column, TextField()))
    small = Case(
        When(Q(LessThan(stored, MAX_DOCUMENT_CHARS)), then=length),
        default=Value(MAX_DOCUMENT_CHARS),
    )
    return Q(LessThan(small, MAX_DOCUMENT_CHARS))


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def paths_in(document: Any, column: str) -> Iterator[str]:
    """Return the paths to the values of a document, without those under a secret key.

    Positions in lists are left out: a search needs the right position, which differs in the next
    row.

    >>> list(paths_in({"user": {"id": 7, "api_token": "x"}, "odd.key": 1, "lines": [1]}, "payload"))
    ['payload.user.id']
    """
    if not isinstance(document, dict):
        return
    covered = redacted(document)
    for key, value in document.items():
        if covered[key] == REDACTED or not _KEY.fullmatch(key):
            continue
        path = f"{column}.{key}"
        if isinstance(value, dict):
            if path.count(".") < MAX_PATH_KEYS:
                yield from paths_in(value, path)
        elif not isinstance(value, list):
            yield path


def most_seen(paths: Iterator[str]) -> list[str]:
    """Return the `MAX_PATHS` most frequent paths, by name, as the beginnings of searches."""
    return sorted(f"{path}:" for path, _times in Counter(paths).most_common(MAX_PATHS))
