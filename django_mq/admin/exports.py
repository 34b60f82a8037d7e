"""The filtered list of a page as a CSV or JSON file, streamed in short transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, cast

from asgiref.sync import sync_to_async
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import BadRequest, PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.http import (
    Http404,
    HttpRequest,
    HttpResponseRedirect,
    QueryDict,
    StreamingHttpResponse,
)
from django.http.response import HttpResponseBase
from django.utils.text import slugify

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import limited_statements, redirects_on_timeout
from django_mq.admin.export_files import DOCUMENTS, TYPES, as_csv, as_json, document
from django_mq.admin.json_paths import read_path
from django_mq.admin.own_pages import own_page
from django_mq.admin.windows import AFTER_PARAMETER
from django_mq.conf.local_time import local, utc_now

#: The number of keys that one statement compares with the filters, and the number of rows that one
#: statement reads in full: a payload may have a megabyte.
SCANNED, READ = 20_000, 50


class ExportAdmin(ReadOnlyAdmin):
    """Adds the view that exports all matching rows, beyond the part that the list shows."""

    #: Columns of the file, and further columns for users who may see payloads.
    exported: tuple[str, ...] = ()
    exported_privately: tuple[str, ...] = DOCUMENTS
    #: Columns that are unique together and have an index: the newest row has the largest values.
    exported_by: tuple[str, ...] = ("pk",)

    def may_export(self, request: HttpRequest) -> bool:
        """Return whether the user may see the list and export messages."""
        return self.has_view_permission(request) and self._has_right(request, "export_message")

    def export_urls(self, request: HttpRequest) -> list[tuple[str, str]]:
        """Return the kinds of files with the URLs that export the list's filters."""
        if not self.may_export(request):
            return []
        query = request.GET.copy()
        for name in (AFTER_PARAMETER, PAGE_VAR):
            query.pop(name, None)
        urls = ((kind, self.url(self.model, "export", kind)) for kind in TYPES)
        return [(kind, f"{url}?{query.urlencode()}") for kind, url in urls if url]

    @own_page(None, "export", "export/<str:kind>/")
    @redirects_on_timeout
    def export_view(self, request: HttpRequest, kind: str) -> HttpResponseBase:
        """Stream the rows that match the filters of the URL; log the user first."""
        if kind not in TYPES:
            raise Http404
        if not self.may_export(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self.url(self.model, "changelist"))
        private = self.exported_privately if self.may_see_payloads(request) else ()
        columns = self.exported + private
        rows = self._matching(request)
        what = "with payloads" if "payload" in columns else "without payloads"
        filters = _public(request.GET).urlencode() or "none"
        name = str(self.opts.verbose_name_plural)
        note = f"Exported {name} as {kind}, {what}. Filters: {filters}."
        found = exported(rows, columns, self.exported_by)
        first = list(islice(found, 1))  # nothing is logged if the table is locked
        self.log_export(request, note)
        shown = as_csv if kind == "csv" else as_json
        lines = shown(chain(first, found), columns)
        content: Any = _asynchronous(lines) if isinstance(request, ASGIRequest) else lines
        response = StreamingHttpResponse(content, content_type=TYPES[kind])
        name = f"{slugify(name)}-{local(utc_now()):%Y%m%d-%H%M%S}.{kind}"
        response["Content-Disposition"] = f'attachment; filename="{name}"'
        return response

    def log_export(self, request: HttpRequest, note: str) -> None:
        """Log that the user exported rows; the entry is about the list, not about a row."""
        LogEntry.objects.create(
            user_id=cast(int, request.user.pk),
            content_type=ContentType.objects.get_for_model(self.model),
            object_repr=str(self.opts.verbose_name_plural),
            action_flag=CHANGE,
            change_message=note,
        )

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list; for an export, a list that applies the filters and reads nothing."""
        found = super().get_changelist(request, **kwargs)
        if not getattr(request, "mq_export", False):
            return found
        more = {"has_windows": False, "get_results": lambda changelist, request: None}
        return type("ExportedList", (found,), more)

    def _matching(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all matching rows, not only one page; raises BadRequest for a bad filter."""
        request.mq_export = True  # type: ignore[attr-defined]
        try:
            found: QuerySet[Any] = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters as error:  # the stock view of a list catches it
            raise BadRequest("A filter in the URL has a value that it cannot have.") from error
        return found


def _public(query: QueryDict) -> QueryDict:
    """Return the parameters of a list for the log, without a value of a payload."""
    path = read_path(query.get(SEARCH_VAR, "").strip())
    if path is None:
        return query
    shown = query.copy()
    shown[SEARCH_VAR] = f"{'.'.join((path.column, *path.path))}:..."
    return shown


def exported(
    rows: QuerySet[Any], columns: Sequence[str], key: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """Return the columns of `rows`, the newest first, with bounded statements and memory.

    Between two statements no transaction is open: a slow reader holds no snapshot.
    """
    order = [f"-{name}" for name in key]
    every = rows.model._default_manager.using(rows.db).order_by(*order).values_list(*key)
    last: tuple[Any, ...] | None = None
    while True:
        beyond = Q() if last is None else _compared(key, last, "lt")
        with limited_statements(rows.db):
            end = next(iter(every.filter(beyond)[SCANNED - 1 : SCANNED]), None)
            part = beyond if end is None else beyond & _compared(key, end, "gte")
            found = list(rows.filter(part).order_by(*order).values_list(*key))
        for start in range(0, len(found), READ):
            yield from _read(rows, columns, key, found[start : start + READ])
        if end is None:
            return
        last = end


def _read(
    rows: QuerySet[Any], columns: Sequence[str], key: Sequence[str], chosen: Sequence[Any]
) -> Iterator[Mapping[str, Any]]:
    """Return the columns of the rows that have the `chosen` keys and still match."""
    documents = {f"{name}_text": Cast(name, TextField()) for name in DOCUMENTS if name in columns}
    names = [*(name for name in columns if name not in DOCUMENTS), *documents, *key]
    # An id may have several rows: after a reset of the sequence, the history has it twice.
    part = Q(pk__in=[each[-1] for each in chosen]) & _compared(key, chosen[-1], "gte")
    part &= Q(**{f"{key[0]}__lte": chosen[0][0]})
    order = [f"-{name}" for name in key]
    with limited_statements(rows.db):
        read = rows.filter(part).order_by(*order).annotate(**documents)
        found = list(read.values(*dict.fromkeys(names)))
    for row in found:
        if tuple(row[name] for name in key) in chosen:
            for name in documents:
                row[name.removesuffix("_text")] = document(row.pop(name))
            yield row


def _compared(key: Sequence[str], values: Sequence[Any], way: Literal["lt", "gte"]) -> Q:
    """Return the condition on the rows after the one with these values, in descending order.

    With `gte`, on that row and the rows before it.
    """
    name, value = key[0], values[0]
    if len(key) == 1:
        return Q(**{f"{name}__{way}": value})
    tied = Q(**{name: value}) & _compared(key[1:], values[1:], way)
    strictly = way[:2]
    return Q(**{f"{name}__{strictly}e": value}) & (Q(**{f"{name}__{strictly}": value}) | tied)


async def _asynchronous(lines: Iterator[str]) -> AsyncIterator[str]:
    """Yield `lines` to an asynchronous server, which would collect an ordinary iterator first."""
    following = sync_to_async(lambda: next(lines, None))
    while (line := await following()) is not None:
        yield line
