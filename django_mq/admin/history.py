"""Handled messages: the list, and a page for each."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html

from django_mq.admin.exports import ExportAdmin
from django_mq.admin.filter_boxes import HandlerFilter, QueueFilter, TypeFilter
from django_mq.admin.filter_moments import EndedFilter
from django_mq.admin.replaying import ReplayingAdmin
from django_mq.admin.texts import (
    block,
    breakable,
    link,
    moment_column,
    number,
    pretty,
    titled,
    took,
    when,
)
from django_mq.models import FailedAttempt, HandledMessage
from django_mq.policy.column_bounds import id_of
from django_mq.queues.history import CONTENT


class HandledMessageAdmin(ExportAdmin, ReplayingAdmin):
    """Handled messages, the one that ended last first; the list shows no payload."""

    change_form_template = "admin/django_mq/handled.html"
    change_list_template = "admin/django_mq/handled_list.html"
    exact_lookups = (
        *("id", "queue", "type", "handler", "key", "worker"),
        *("correlation_id", "causation_id"),
    )
    exported = (
        *("id", "queue", "type", "schema_version", "handler", "key", "priority", "attempts"),
        *("worker", "size", "correlation_id", "causation_id", "created_at", "due_at"),
        *("started_at", "ended_at", "keep_until"),
    )
    exported_by = ("ended_at", "pk")
    list_display: Any = (number, "what", "ended", "where", "tries", "ran")
    list_display_links: Any = (number, "what")
    list_filter = (EndedFilter, QueueFilter, TypeFilter, HandlerFilter)
    ordering = ("-ended_at", "-pk")  # type: ignore[assignment]
    search_fields = ("pk",)
    # Only columns with an index; a type has none.
    searched_texts = ("key", "correlation_id")
    search_help_text = "Exact id, order key or correlation id."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer(*CONTENT)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list with the buttons that export it."""
        context = {"exports": self.export_urls(request), **(extra_context or {})}
        return super().changelist_view(request, context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the message that ended last: after a reset of the sequence, two share an id."""
        found = self.get_queryset(request).filter(pk=id_of(object_id) or 0)
        return found.order_by("-ended_at").first()

    def page_extras(self, request: HttpRequest, message: Any) -> dict[str, Any]:
        """Return the chain of a message, and the URL of the button that replays it."""
        url = self.url(HandledMessage, "replay") if self.may_replay(request) else ""
        return {"replay_url": url, **super().page_extras(request, message)}

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["handler", "queue", "key", "attempts_linked", "worker", "bytes"]
        times = ["created", "due", "started", "ended_full", "took", "kept"]
        found: list[Any] = [(None, {"fields": fields}), ("Times", {"fields": times})]
        if self.may_see_payloads(request):
            found.append(("Content", {"fields": ["whole_payload", "whole_metadata"]}))
        return found

    @admin.display(description="message")
    def what(self, message: HandledMessage) -> Any:
        notes = [breakable(message.handler)]
        if message.key:
            notes.append(format_html("key {}", breakable(message.key)))
        return titled(breakable(message.type), *notes)

    @admin.display(description="queue")
    def where(self, message: HandledMessage) -> Any:
        return format_html('<span class="mq-name">{}</span>', breakable(message.queue))

    ended = moment_column("ended_at", "ended", when)
    created = moment_column("created_at", "broadcast")
    due = moment_column("due_at", "due")
    started = moment_column("started_at", "started")
    ended_full = moment_column("ended_at", "ended")
    kept = moment_column("keep_until", "kept until")

    @admin.display(description="attempts")
    def tries(self, message: HandledMessage) -> Any:
        return message.attempts

    @admin.display(description="duration")
    def ran(self, message: HandledMessage) -> Any:
        return took(message.started_at, message.ended_at)

    took = ran

    @admin.display(description="attempts")
    def attempts_linked(self, message: HandledMessage) -> Any:
        """Show the number of attempts, linked to the failed ones."""
        url = ""
        if message.attempts > 1:
            url = self.url(FailedAttempt, "changelist", message_id=message.pk)
        return link(url, message.attempts)

    @admin.display(description="payload size")
    def bytes(self, message: HandledMessage) -> Any:
        return filesizeformat(message.size)

    @admin.display(description="payload")
    def whole_payload(self, message: HandledMessage) -> Any:
        return self._document(message, "payload")

    @admin.display(description="metadata")
    def whole_metadata(self, message: HandledMessage) -> Any:
        return self._document(message, "metadata")

    def _document(self, message: HandledMessage, column: str) -> Any:
        """Show a document with secrets hidden, or a note that it was not kept."""
        text = self.stored_json(message, column, ended_at=message.ended_at)  # two may share an id
        if text is None:
            return "Not kept: set history_payload for the queue or the handler."
        return block(pretty(text))
