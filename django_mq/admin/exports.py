"""The filtered list of messages as a CSV or JSON file, streamed in short transactions."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.main import PAGE_VAR
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast
from django.http import Http404, HttpRequest, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import NoReverseMatch, path, reverse
from django.utils import timezone

from django_mq.admin.bounds import impatient
from django_mq.admin.tables import TableAdmin
from django_mq.admin.texts import LONGEST_JSON
from django_mq.admin.windows import AFTER
from django_mq.models import QueuedMessage
from django_mq.queues import redacted

PUBLIC = (
    "id",
    "queue",
    "type",
    "schema_version",
    "handler",
    "state",
    "priority",
    "key",
    "unique_id",
    "attempts",
    "max_attempts",
    "created_at",
    "processable_after",
    "leased_until",
    "claimed_by",
    "expires_at",
    "held_since",
    "dead_at",
)
#: For users who may see payloads.
PRIVATE = ("dead_reason", "last_error", "payload", "metadata")
DOCUMENTS = ("payload", "metadata")
#: The number of ids that one statement compares with the filters, and of messages that one reads in
#: full: a payload may have a megabyte.
SCANNED, READ = 20_000, 50

# A spreadsheet runs a cell that begins with one of these as a formula, even after spaces.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}


def harmless(value: object) -> str:
    """Return a cell that a spreadsheet shows as text, and never runs as a formula.

    >>> harmless("=1+1"), harmless("shop.orders"), harmless(-7), harmless(None)
    ("'=1+1", 'shop.orders', '-7', '')
    """
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    text = str(value)
    is_formula = isinstance(value, str) and text.lstrip(" ").startswith(_FORMULA)
    return f"'{text}" if is_formula else text


def document(text: str | None) -> Any:
    """Return a stored document with secrets hidden; None if they could not be hidden."""
    if text is None or len(text) > LONGEST_JSON:
        return None
    try:
        return redacted(json.loads(text))
    except (ValueError, RecursionError):
        return None


def as_csv(rows: Iterator[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Return the lines of a CSV file, with a header."""
    buffer = StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            harmless(json.dumps(row[name], ensure_ascii=False) if name in DOCUMENTS else row[name])
            for name in columns
        )
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def as_json(rows: Iterator[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Return a JSON array, one object per line."""
    joint = "[\n"
    for row in rows:
        found = {name: row[name] for name in columns}
        yield joint + json.dumps(found, ensure_ascii=False, default=datetime.isoformat)
        joint = ",\n"
    yield "\n]\n" if joint != "[\n" else "[]\n"


class ExportAdmin(TableAdmin):
    """Adds the view that exports all messages that match, beyond the window of the list."""

    def may_export(self, request: HttpRequest) -> bool:
        """Return whether the user may export messages."""
        return self.may_see_messages(request) and self._has_right(request, "export_message")

    def get_urls(self) -> list[Any]:
        """Add the URL that the list's buttons post to, with the filters as its query."""
        view = self.admin_site.admin_view(self.export_view)
        route = path("export/<str:kind>/", view, name="django_mq_queuedmessage_export")
        return [route, *super().get_urls()]

    def export_urls(self, request: HttpRequest) -> list[tuple[str, str]]:
        """Return the kinds of files with the URLs that export the list's filters."""
        if not self.may_export(request):
            return []
        query = request.GET.copy()
        for name in (AFTER, PAGE_VAR):
            query.pop(name, None)
        name = f"{self.admin_site.name}:django_mq_queuedmessage_export"
        try:
            return [(kind, f"{reverse(name, args=[kind])}?{query.urlencode()}") for kind in TYPES]
        except NoReverseMatch:  # this site has a message admin of its own
            return []

    def export_view(self, request: HttpRequest, kind: str) -> HttpResponseBase:
        """Stream the messages that match the filters of the URL; log the user first."""
        if kind not in TYPES:
            raise Http404
        if not self.may_export(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self.url(QueuedMessage, "changelist"))
        columns = PUBLIC + (PRIVATE if self.may_see_payloads(request) else ())
        rows = self._matching(request)
        what = "with payloads" if "payload" in columns else "without payloads"
        filters = request.GET.urlencode() or "none"
        self.log_export(request, f"Exported messages as {kind}, {what}. Filters: {filters}.")
        shown = as_csv if kind == "csv" else as_json
        lines = shown(exported(rows, columns, self.alias), columns)
        content: Any = _asynchronous(lines) if isinstance(request, ASGIRequest) else lines
        response = StreamingHttpResponse(content, content_type=TYPES[kind])
        name = f"messages-{timezone.localtime():%Y%m%d-%H%M%S}.{kind}"
        response["Content-Disposition"] = f'attachment; filename="{name}"'
        return response

    def log_export(self, request: HttpRequest, note: str) -> None:
        """Log that the user exported messages; the entry is about the list, not about a message."""
        LogEntry.objects.create(
            user_id=cast(int, request.user.pk),
            content_type=ContentType.objects.get_for_model(QueuedMessage),
            object_repr=str(self.opts.verbose_name_plural),
            action_flag=CHANGE,
            change_message=note,
        )

    def _matching(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all messages that match, not only those of one window."""
        changelist = self.get_changelist_instance(request)
        return changelist.every_match(request)  # type: ignore[attr-defined,no-any-return]


def exported(
    rows: QuerySet[Any], columns: Sequence[str], alias: str
) -> Iterator[Mapping[str, Any]]:
    """Return the columns of `rows`, the newest first, with bounded statements and memory.

    Between two statements no transaction is open: a slow reader holds no snapshot.
    """
    every = QueuedMessage.objects.using(alias).order_by("-pk").values_list("pk", flat=True)
    documents = {f"{name}_text": Cast(name, TextField()) for name in DOCUMENTS if name in columns}
    plain = [name for name in columns if name not in DOCUMENTS]
    last: int | None = None
    while True:
        scanned = every if last is None else every.filter(pk__lt=last)
        with impatient(alias):
            end = next(iter(scanned[SCANNED - 1 : SCANNED]), None)
            part = rows.order_by("-pk") if last is None else rows.filter(pk__lt=last)
            part = part if end is None else part.filter(pk__gte=end)
            ids = list(part.order_by("-pk").values_list("pk", flat=True))
        for start in range(0, len(ids), READ):
            chosen = rows.filter(pk__in=ids[start : start + READ]).order_by("-pk")
            with impatient(alias):
                found = list(chosen.annotate(**documents).values(*plain, *documents))
            for row in found:
                for name in documents:
                    row[name.removesuffix("_text")] = document(row.pop(name))
                yield row
        if end is None:
            return
        last = end


async def _asynchronous(lines: Iterator[str]) -> AsyncIterator[str]:
    """Yield `lines` to an asynchronous server, which would collect an ordinary iterator first."""
    following = sync_to_async(lambda: next(lines, None))
    while (line := await following()) is not None:
        yield line
