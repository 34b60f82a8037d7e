"""Unique ids: the message that holds each, its quiet time, and the message put aside for it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from django_mq.admin.filter_boxes import QueueFilter, TypeFilter
from django_mq.admin.texts import badge, block, breakable, full, pretty, titled, when
from django_mq.admin.windows import TableAdmin
from django_mq.models import UniqueKey
from django_mq.policy.durations import span


class UniqueKeyAdmin(TableAdmin):
    """Unique ids, the newest first. Cancel or discard a message to free its id."""

    exact_lookups = ("id", "queue", "type", "handler", "unique_id", "message_id")
    indexed_lookups = ("id", "unique_id")
    list_display: Any = ("unique_id", "what", "queue", "condition")
    list_filter = (QueueFilter, TypeFilter)
    search_fields = ("pk",)
    searched_texts = ("unique_id", "type")
    searched_ids = ("message_id",)
    search_help_text = "Exact unique id or type, or the id of a message."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows without the messages put aside, which hold payloads."""
        found: QuerySet[Any] = super().get_queryset(request)
        found = found.annotate(is_aside=Q(put_aside__isnull=False))
        return found.defer("put_aside")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["unique_id", "type", "queue", "handler", "condition_full", "quiet_time"]
        if obj is not None and obj.is_aside and self.may_see_payloads(request):
            fields.append("whole_aside")
        return [(None, {"fields": fields})]

    @admin.display(description="type")
    def what(self, row: UniqueKey) -> Any:
        return titled(breakable(row.type), breakable(row.handler))

    @admin.display(description="state")
    def condition(self, row: UniqueKey) -> Any:
        """Show whether the id is free, and which message holds it."""
        if row.is_aside:  # type: ignore[attr-defined]  # annotated, as is `now`
            return badge("delayed", "put aside")
        if row.message_id is not None:
            message = self.message_link(row.message_id)
            return format_html("{} {}", badge("running", "taken"), message)
        if row.quiet_until is not None:
            now = row.now  # type: ignore[attr-defined]
            return format_html(
                '{}<span class="mq-under">{}</span>',
                badge("paused", "quiet") if row.quiet_until > now else badge("idle", "free"),
                when(row.quiet_until, now),
            )
        return badge("idle", "free")

    @admin.display(description="state")
    def condition_full(self, row: UniqueKey) -> Any:
        """Show the same in words."""
        if row.is_aside:  # type: ignore[attr-defined]
            return "put aside: it becomes a message when the one that holds this id ends"
        if row.message_id is not None:
            return format_html("taken by message {}", self.message_link(row.message_id))
        if row.quiet_until is None:
            return "free"
        now = row.now  # type: ignore[attr-defined]
        text = "quiet until" if row.quiet_until > now else "free since"
        return format_html("{} {}", text, full(row.quiet_until, now))

    @admin.display(description="quiet time")
    def quiet_time(self, row: UniqueKey) -> Any:
        """Show how long the id stays taken after its message succeeds."""
        return span(row.unique_for) if row.unique_for else None

    @admin.display(description="put aside")
    def whole_aside(self, row: UniqueKey) -> Any:
        """Show the message put aside, with secrets hidden."""
        shown = pretty(self.stored_json(row, "put_aside"), times=("due", "expires"))
        return block(shown)
