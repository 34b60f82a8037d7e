"""Lists of tables with millions of rows: each page scans a bounded part, and names that part.

A page shows at most `MAX_COUNT` rows of a window, and links to the next window. Where no index
serves a filter or a search, the window ends after `MAX_SCANNED_ROWS` rows, whether or not they
match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import build_q_object_from_lookup_parameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import MAX_COUNT, BoundedChangeList, Estimate
from django_mq.policy.column_bounds import id_of
from django_mq.store import table_extent

#: The number of rows to which a condition without an index is applied. A hundred thousand messages
#: take about 0.1 s, with payloads 0.3 s.
MAX_SCANNED_ROWS = 100_000
#: The parameter of the URL with the id after which a window begins.
AFTER_PARAMETER = "after"


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that a list shows or scans, by primary key."""

    #: The row before the window's first one; None for the beginning of the list.
    after: int | None = None
    #: The last row that is scanned, matching or not; None for all rows.
    last: int | None = None
    #: A part of the table that contains every match.
    bounds: Q = field(default_factory=Q)
    ascending: bool = False
    #: Sort the rows. They are in several parts of an index, but the planner might expect to find
    #: them sooner in the order of the primary key, among any number of others.
    sorts: bool = False

    @property
    def beyond(self) -> Q:
        """The rows from the window's beginning on."""
        if self.after is None:
            return Q()
        return Q(pk__gt=self.after) if self.ascending else Q(pk__lt=self.after)

    @property
    def scanned(self) -> Q:
        """The rows to which conditions without an index are applied."""
        if self.last is None:
            return self.bounds
        end = Q(pk__lte=self.last) if self.ascending else Q(pk__gte=self.last)
        return self.bounds & end

    def step(self, rows: QuerySet[Any], maximum: int) -> int | None:
        """Return the key of the `maximum`-th row, in the list's order; None if there are fewer."""
        keys = rows.order_by("pk" if self.ascending else "-pk").values_list("pk", flat=True)
        found: int | None = next(iter(keys[maximum - 1 : maximum]), None)
        return found


def window_of(request: HttpRequest) -> Window:
    """Return the window of the list that this request shows."""
    found = getattr(request, "mq_window", None)
    return found if isinstance(found, Window) else Window()


class WindowChangeList(BoundedChangeList):
    """A list that is shown window by window."""

    #: A TableAdmin.
    model_admin: Any
    after: int | None = None
    #: False for an export, which reads all rows by id.
    has_windows = True

    def get_filters(self, request: HttpRequest) -> Any:
        """Return the filters; decide which rows to scan, before any condition is applied."""
        # An action asks for the rows a second time.
        if AFTER_PARAMETER in self.params:
            self.after = id_of(self.params.pop(AFTER_PARAMETER))
            self.filter_params.pop(AFTER_PARAMETER)
        found = super().get_filters(request)
        if not self.has_windows:
            request.mq_window = self.window = Window()  # type: ignore[attr-defined]
            return found
        order = [str(each) for each in self.get_ordering(request, self.root_queryset)]
        self.window = Window(self.after, ascending=not order[0].startswith("-"))
        if self._must_scan(request, found[0], found[2]):
            self.window = self._bounded(request, found[0], found[2])
        request.mq_window = self.window  # type: ignore[attr-defined]  # for the search
        return found

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Return the rows of the window that match."""
        found: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        found = found.filter(self.window.beyond)
        if self.window.sorts:
            unindexed = F("pk") + 0
            found = found.order_by(unindexed.asc() if self.window.ascending else unindexed.desc())
        # A search also finds rows by index: it applies the window only to the other conditions.
        return found if self.query else found.filter(self.window.scanned)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.is_whole = self.window.after is None and not self.has_active_filters and not self.query
        if self.result_count > MAX_COUNT:
            self.next_after = self.paginator.ids[MAX_COUNT - 1]
        else:
            self.next_after = self.window.last
        # If the list ended before all rows were scanned, the page must say so.
        self.scanned_rows = (
            MAX_SCANNED_ROWS if self.result_count <= MAX_COUNT and self.window.last else 0
        )
        self.depth = self._depth(request)

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Keep the window in links to its pages; other links start at the beginning of the list."""
        if self.after is not None and PAGE_VAR in (new_params or {}):
            new_params = {AFTER_PARAMETER: self.after, **new_params}
        return str(super().get_query_string(new_params, remove))

    @property
    def scanned_rows_text(self) -> str:
        """The number of scanned rows, as text."""
        return f"{self.scanned_rows:,}"

    @property
    def next_url(self) -> str:
        """The link to the rows after this window, empty if it is the last one."""
        return self.get_query_string({AFTER_PARAMETER: self.next_after}) if self.next_after else ""

    @property
    def first_url(self) -> str:
        """The link to the beginning of the list."""
        return "" if self.window.after is None else self.get_query_string()

    def _depth(self, request: HttpRequest) -> int:
        """Return the number of rows; for a whole large table, the planner's estimate."""
        count: int = self.result_count
        if (
            count <= MAX_COUNT
            or not self.is_whole
            or self.model_admin.get_queues(request) is not None
        ):
            return count
        estimate = self.model_admin.estimated_rows()
        return Estimate(estimate) if estimate and estimate > MAX_COUNT else count

    def _must_scan(
        self, request: HttpRequest, specs: Iterable[Any], others: dict[str, Any]
    ) -> bool:
        """Return whether any condition of this list has no index."""
        admin = self.model_admin
        return (
            (bool(self.query) and admin.search_scans(self.query))
            or any(spec.used_parameters and not _is_indexed(spec) for spec in specs)
            or any(name.removesuffix("__exact") not in admin.indexed_lookups for name in others)
            or (admin.get_queues(request) is not None and not admin.queue_is_indexed)
        )

    def _bounded(
        self, request: HttpRequest, specs: Iterable[Any], others: dict[str, Any]
    ) -> Window:
        """Return the window with the last row to scan."""
        used = [spec for spec in specs if spec.used_parameters]
        for spec in used:
            if hasattr(spec, "step") and not _is_indexed(spec):
                after, ascending = self.window.after, self.window.ascending
                last = spec.step(after, ascending=ascending, maximum=MAX_SCANNED_ROWS)
                return replace(self.window, last=last, sorts=True)
        rows = self.model_admin.indexed_rows(request).filter(self.window.beyond)
        for spec in used:
            if hasattr(spec, "narrow"):
                rows = spec.narrow(rows)
        for name, values in others.items():
            if name.removesuffix("__exact") in self.model_admin.indexed_lookups:
                rows = _filtered(rows, name, values)
        last = self.window.step(rows, MAX_SCANNED_ROWS)
        if last is None:
            return self.window
        bounds = Q()
        for spec in used:
            if hasattr(spec, "part_of_table"):
                bounds &= spec.part_of_table(self.model_admin.alias)
        last = self.window.step(rows.filter(bounds), MAX_SCANNED_ROWS) if bounds else last
        return replace(self.window, last=last, bounds=bounds)


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


def _is_indexed(spec: Any) -> bool:
    return bool(getattr(spec, "is_indexed", False))


def _filtered(rows: QuerySet[Any], name: str, values: list[str]) -> QuerySet[Any]:
    try:
        return rows.filter(build_q_object_from_lookup_parameters({name: values}))
    except (ValueError, ValidationError) as error:
        raise IncorrectLookupParameters(error) from error
