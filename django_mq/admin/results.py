"""The stored results of requests."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import badge, block, excerpt, full, plain, pretty, when
from django_mq.models import Result


class ResultAdmin(ReadOnlyAdmin):
    """Results, the newest first. They name no queue, so users limited to some queues see none."""

    queue_field = None
    exact_lookups = ("message_id", "handler")
    list_display: Any = ("message_id", "handler", "outcome", "created")
    search_fields = ("pk",)
    search_help_text = _("Exact id of a message.")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("value")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["message_id", "handler", "outcome", "created_full"]
        if self.may_see_payloads(request):
            fields += ["whole_error"] if obj is not None and obj.error_class else ["whole_value"]
        return [(None, {"fields": fields})]

    @admin.display(description=_("outcome"))
    def outcome(self, result: Result) -> Any:
        if result.error_class:
            return badge("dead", excerpt(result.error_class))
        return badge("processable", _("returned"))

    @admin.display(description=_("created"))
    def created(self, result: Result) -> Any:
        return when(result.created_at, result.now)  # type: ignore[attr-defined]

    @admin.display(description=_("created"))
    def created_full(self, result: Result) -> Any:
        return full(result.created_at, result.now)  # type: ignore[attr-defined]

    @admin.display(description=_("value"))
    def whole_value(self, result: Result) -> Any:
        """Show the value with secrets hidden."""
        return block(pretty(self.stored_json(result, "value")))

    @admin.display(description=_("error"))
    def whole_error(self, result: Result) -> Any:
        return block(plain(result.error_text))
