"""Operations: the request, the user and the progress; and the button that cancels them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import TookTooLong, writing
from django_mq.admin.message_actions import MESSAGE_ACTIONS
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import excerpt, moment_column, notes_below, titled, took, when
from django_mq.models import Operation
from django_mq.operations.filter_words import in_words, without_values
from django_mq.policy.column_bounds import id_of

OPEN = ("waiting", "running")


class OperationAdmin(ReadOnlyAdmin):
    """Operations, the newest first."""

    change_form_template = "admin/django_mq/operation.html"
    change_list_template = "admin/django_mq/operation_list.html"
    list_display: Any = ("what", "progress", "condition", "by", "asked")
    list_display_links = ("what",)
    list_filter = ("state", "action")
    queue_field = None
    search_fields = ()

    def scoped(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep only operations that are limited to the user's queues."""
        allowed = self.get_queues(request)
        if allowed is None:
            return queryset
        return queryset.filter(
            filter__has_key="queues", filter__queues__contained_by=sorted(allowed)
        )

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list; each row knows whether the user may cancel it."""
        found = super().get_changelist_instance(request)
        if request.method == "GET":
            actions, shows_values = self._may_cancel(request), self.may_see_payloads(request)
            for row in found.result_list:
                row.is_cancellable = row.state in OPEN and row.action in actions
                row.shows_values = shows_values
        return found

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the operation; it knows whether the user may see values of payloads."""
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            found.shows_values = self.may_see_payloads(request)
        return found

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["what", "progress", "condition", "by", "asked_full", "lasted"]
        return [(None, {"fields": fields})]

    def _may_cancel(self, request: HttpRequest) -> set[str]:
        """Return the actions that the user may perform, and may therefore cancel."""
        return {
            name
            for name, action in MESSAGE_ACTIONS.items()
            if self._has_right(request, action.permission)
        }

    @own_page(Operation, "cancel", "cancel/")
    def cancel_view(self, request: HttpRequest) -> HttpResponse:
        """Cancel the posted operation, and log the user in the same transaction."""
        back = HttpResponseRedirect(self.url(Operation, "changelist"))
        if request.method != "POST":
            return back
        id = id_of(request.POST.get("operation", ""))
        row = None if id is None else self.get_queryset(request).filter(pk=id).first()
        if row is None:
            raise Http404
        if not self.has_view_permission(request) or row.action not in self._may_cancel(request):
            raise PermissionDenied
        try:
            with writing(self.alias):
                cancelled = queues.cancel_operation(row.pk, using=self.alias)
                if cancelled:
                    self.log(request, [row], CHANGE, "Cancelled.")
        except TookTooLong:
            text = f"A worker is carrying out operation {row.pk}. Try again in a moment."
            self.message_user(request, text, notices.ERROR)
            return back
        text = f"Operation {row.pk} {'is cancelled' if cancelled else 'was over'}."
        self.message_user(request, text, notices.SUCCESS)
        return back

    @admin.display(description="operation")
    def what(self, row: Operation) -> Any:
        conditions = row.filter if isinstance(row.filter, dict) else {}
        if not getattr(row, "shows_values", False):
            conditions = without_values(conditions)
        words = in_words(conditions)
        label = MESSAGE_ACTIONS[row.action].label
        notes = [excerpt(each) for each in words] or ["every message"]
        return titled(f"#{row.pk} {label}", *notes)

    @admin.display(description="progress")
    def progress(self, row: Operation) -> Any:
        """Show a bar if the number of messages is known, the counts, and the button."""
        seen = row.done + row.skipped
        bar: Any = ""
        if row.state in OPEN and row.matched:
            bar = format_html(
                '<progress max="{}" value="{}"></progress> ', row.matched, min(seen, row.matched)
            )
        text = f"{row.done:,} changed"
        if row.matched is not None:
            text += f" of {row.matched:,}"
        if row.skipped:
            text += f", {row.skipped:,} skipped"
        return format_html('{}<span class="mq-number">{}</span> {}', bar, text, self._button(row))

    @admin.display(description="state")
    def condition(self, row: Operation) -> Any:
        return format_html("{}{}", row.get_state_display(), notes_below(*filter(None, [row.error])))

    asked = moment_column("created_at", "requested", when)
    asked_full = moment_column("created_at", "requested")

    @admin.display(description="duration")
    def lasted(self, row: Operation) -> Any:
        if row.ended_at is None:
            return self.get_empty_value_display()
        return took(row.started_at, row.ended_at)

    def _button(self, row: Operation) -> Any:
        """Return the button that cancels the operation, while it can be cancelled."""
        if not getattr(row, "is_cancellable", False):
            return ""
        return format_html(
            '<span class="mq-inline"><button type="submit" class="button" name="operation"'
            ' value="{}" formaction="{}">Cancel</button></span>',
            row.pk,
            self.url(Operation, "cancel"),
        )
