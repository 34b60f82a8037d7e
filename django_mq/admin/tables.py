"""The base of the lists of messages, attempts, results and unique ids, which may be long."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import MAX_COUNT
from django_mq.admin.windows import WindowChangeList, window_of
from django_mq.policy.column_bounds import id_of
from django_mq.store import table_extent


class TableAdmin(ReadOnlyAdmin):
    """A list that never reads a whole table, shown window by window."""

    change_list_template = "admin/django_mq/list.html"

    #: Lookups of the URL that an index serves.
    indexed_lookups: tuple[str, ...] = ("id", "pk")
    #: Whether an index finds the rows of a queue.
    queue_is_indexed = False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return WindowChangeList

    def indexed_rows(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see, if an index finds them; otherwise all rows."""
        if self.queue_is_indexed:
            return self.get_queryset(request)
        rows: QuerySet[Any] = self.model._default_manager.using(self.alias)
        return rows

    def estimated_rows(self) -> int | None:
        """Return the planner's estimate of the number of rows."""
        with connections[self.alias].cursor() as cursor:
            return table_extent.estimated_rows(cursor, self.opts.db_table)

    def search_scans(self, term: str) -> bool:
        """Return whether no index serves a search for `term`."""
        text = term.strip()
        is_id = text.startswith("#") and id_of(text[1:]) is not None
        return bool(self.searched_texts) and not is_id

    def found_by_index(self, request: HttpRequest, term: str) -> list[int]:
        """Return the keys of the rows that an index finds for `term`, the newest first."""
        if self.searched_ids == ("pk",):
            id = id_of(term.removeprefix("#"))
            return [] if id is None else [id]
        found = self.get_queryset(request).filter(self.id_condition(term))
        return list(found.values_list("pk", flat=True).order_by("-pk")[: MAX_COUNT + 1])

    def search_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition on ids, and on texts among the rows of the window."""
        wanted = Q(pk__in=self.found_by_index(request, term))
        if self.search_scans(term):
            wanted |= window_of(request).scanned & self.text_condition(request, term)
        return wanted
