"""The search of a list: its text must be the whole value of a column, or an id."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest

from django_mq.policy.column_bounds import id_of


class ExactSearchMixin:
    """Finds rows by the exact values of columns, which indexes can serve."""

    #: Columns whose values a search compares with its text, and with its number.
    searched_texts: tuple[str, ...] = ()
    searched_ids: tuple[str, ...] = ("pk",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find the rows that meet `search_condition()`; no column contains a NUL."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if "\x00" in term:
            return queryset.none(), False
        return queryset.filter(self.search_condition(request, term)), False

    def search_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition of a search for `term`."""
        return self.text_condition(request, term) | self.id_condition(term)

    def text_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition that a searched text is `term`."""
        wanted = Q(pk__in=())
        for column in self.searched_texts:
            wanted |= Q(**{column: term})
        return wanted

    def id_condition(self, term: str) -> Q:
        """Return the condition that a searched id is `term`, with or without `#`."""
        wanted = Q(pk__in=())
        if (id := id_of(term.removeprefix("#"))) is not None:
            for column in self.searched_ids:
                wanted |= Q(**{column: id})
        return wanted
