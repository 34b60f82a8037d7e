"""Failed attempts; they outlive their messages, so the history survives a later success."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from django_mq.admin.errors import ErrorsAdmin
from django_mq.admin.filter_boxes import (
    AttemptWorkerFilter,
    HandlerFilter,
    QueueFilter,
    TypeFilter,
)
from django_mq.admin.filter_moments import EndedFilter
from django_mq.admin.filters import ErrorFilter
from django_mq.admin.texts import (
    block,
    breakable,
    excerpt,
    moment_column,
    plain,
    titled,
    took,
    when,
)
from django_mq.admin.windows import TableAdmin
from django_mq.models import FailedAttempt


class FailedAttemptAdmin(ErrorsAdmin, TableAdmin):
    """Failed attempts, the newest first."""

    change_list_template = "admin/django_mq/attempt_list.html"
    exact_lookups = (
        *("id", "message_id", "queue", "type", "handler", "attempt", "worker", "fingerprint"),
    )
    list_display: Any = ("ended", "error", "what", "queue", "attempt")
    list_display_links = ("ended", "error")
    indexed_lookups = ("id", "message_id", "fingerprint")
    list_filter = (
        ErrorFilter,
        EndedFilter,
        QueueFilter,
        TypeFilter,
        HandlerFilter,
        AttemptWorkerFilter,
    )
    search_fields = ("pk",)
    searched_texts = ("type", "error_class")
    searched_ids = ("message_id",)
    search_help_text = "Exact id of a message, or a type or error class."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the attempts; private columns are read only for users who may see them."""
        found = super().get_queryset(request)
        if self.may_see_payloads(request):
            return found.defer("traceback")
        return found.defer("error_text", "traceback")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["message", "type", "queue", "handler", "attempt", "worker", "ended_at_full"]
        fields += ["took", "error_class", "place", "fingerprint"]
        if self.may_see_payloads(request):
            fields += ["whole_text", "whole_traceback"]
        return [(None, {"fields": fields})]

    ended = moment_column("ended_at", "ended", when)
    ended_at_full = moment_column("ended_at", "ended")

    @admin.display(description="duration")
    def took(self, attempt: FailedAttempt) -> Any:
        return took(attempt.started_at, attempt.ended_at) or None

    @admin.display(description="error")
    def error(self, attempt: FailedAttempt) -> Any:
        """Show the error class and, to users who may see payloads, the text."""
        text = excerpt(attempt.error_text) if "error_text" in attempt.__dict__ else ""
        return format_html(
            '<span class="mq-error">{}</span><span class="mq-under">{}</span>',
            excerpt(attempt.error_class) or "unknown",
            text,
        )

    @admin.display(description="message")
    def what(self, attempt: FailedAttempt) -> Any:
        title = format_html("{} {}", self.message(attempt), breakable(attempt.type))
        return titled(title, breakable(attempt.handler))

    @admin.display(description="message")
    def message(self, attempt: FailedAttempt) -> Any:
        return self.message_link(attempt.message_id)

    @admin.display(description="error text")
    def whole_text(self, attempt: FailedAttempt) -> Any:
        return block(plain(attempt.error_text))

    @admin.display(description="traceback")
    def whole_traceback(self, attempt: FailedAttempt) -> Any:
        return block(plain(attempt.traceback))
