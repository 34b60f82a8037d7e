"""The stored results of requests."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from django_mq.admin.filter_boxes import HandlerFilter
from django_mq.admin.filter_moments import CreatedFilter
from django_mq.admin.filters import OutcomeFilter
from django_mq.admin.texts import (
    badge,
    block,
    document_field,
    excerpt,
    full,
    moment_column,
    number,
    plain,
    when,
)
from django_mq.admin.windows import TableAdmin
from django_mq.models import Result


class ResultAdmin(TableAdmin):
    """Results, the newest first. They name no queue, so users limited to some queues see none."""

    queue_field = None
    exact_lookups = ("message_id", "handler")
    indexed_lookups = ("message_id", "pk")
    list_filter = (HandlerFilter, OutcomeFilter, CreatedFilter)
    list_display: Any = (number, "handler", "outcome", "created")
    search_fields = ("pk",)
    search_help_text = "Exact id of a message."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("value", "payload", "metadata", "attempts")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["message", "handler", "outcome", "created_full"]
        is_django_task = obj is not None and obj.enqueued_at is not None
        if is_django_task:
            fields += ["queue", "priority", "enqueued_full", "kept"]
        if self.may_see_payloads(request):
            fields += ["arguments"] if is_django_task else []
            fields += ["whole_error"] if obj is not None and obj.error_class else ["whole_value"]
        return [(None, {"fields": fields})]

    @admin.display(description="message")
    def message(self, result: Result) -> Any:
        return number(result)

    @admin.display(description="outcome")
    def outcome(self, result: Result) -> Any:
        if result.error_class:
            return badge("dead", excerpt(result.error_class))
        return badge("processable", "returned")

    created = moment_column("created_at", "created", when)
    created_full = moment_column("created_at", "created")
    enqueued_full = moment_column("enqueued_at", "enqueued")

    @admin.display(description="kept until")
    def kept(self, result: Result) -> Any:
        if result.keep_until is None:
            return "RESULT_RETENTION has passed"
        return full(result.keep_until, result.now)  # type: ignore[attr-defined]

    arguments = document_field("payload", "arguments")
    whole_value = document_field("value", "value")

    @admin.display(description="error")
    def whole_error(self, result: Result) -> Any:
        return block(plain(result.error_text))
