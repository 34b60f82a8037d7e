"""Schedules: the next time of each, and the outcome of its last; run, enable, disable, add."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, IntegrityError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from psycopg.errors import UniqueViolation

from django_mq import queues
from django_mq.admin.bounds import (
    READS,
    TookTooLong,
    answer_read_only,
    limited_throughout,
    writing,
)
from django_mq.admin.schedule_form import CONTENT, EDITABLE, TIMING, ScheduleForm
from django_mq.admin.schedule_rows import ScheduleRowsAdmin
from django_mq.admin.seen_handlers import did_you_mean
from django_mq.exceptions import MQError
from django_mq.models import Schedule
from django_mq.models.columns import Unreadable
from django_mq.queues.scheduling import restart_schedule

#: The fields of every schedule's page, and the fields of a page that the user cannot edit.
COMMON_FIELDS = ("condition_full", "timing", "last_full", "next_full", "source")
READ_ONLY_FIELDS = ("what_full", "queue", "catch_up", "overlap", "lifetime")

LOCKED_TEXT = "Another session is changing this schedule. Try again in a moment."
GONE_TEXT = "Nothing was changed: another session has just deleted this schedule."
TAKEN_TEXT = "Not added: another session has just added a schedule of this name."


class Overtaken(Exception):
    """During the request, another session deleted the schedule, or added one with its name."""


def _run(name: str, alias: str) -> tuple[str, str]:
    receipt = queues.run_schedule(name, using=alias)
    if not receipt:
        return "", f"Not run: the last message of {name} still waits or runs."
    ids = ", ".join(f"#{id}" for id in receipt.ids)
    return f"Run: {ids}.", f"Schedule {name} was broadcast."


def _enable(name: str, alias: str) -> tuple[str, str]:
    queues.enable_schedule(name, using=alias)
    return "Enabled.", f"Schedule {name} is enabled."


def _disable(name: str, alias: str) -> tuple[str, str]:
    queues.disable_schedule(name, using=alias)
    return "Disabled.", f"Schedule {name} is disabled."


#: The functions of the buttons. Each returns a note for the log (or nothing) and the notice.
ORDERS = {"run": _run, "enable": _enable, "disable": _disable}


class ScheduleAdmin(ScheduleRowsAdmin):
    """Schedules by name. Those of the code can be run, enabled and disabled; others also edited."""

    actions = None
    change_form_template = "admin/django_mq/schedule.html"
    exact_lookups = ("name", "type", "queue")
    form = ScheduleForm
    list_display: Any = ("short_name", "what", "timing", "condition", "last", "next")
    list_filter = ("enabled", "source")
    ordering = ("name",)
    search_fields = ("pk",)
    searched_texts = ("name", "type")
    searched_ids = ()
    search_help_text = "Exact name or type."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows; contents, which may be long, are read on demand."""
        found: QuerySet[Any] = super().get_queryset(request)
        return found.defer("payload", "metadata")

    # ---- rights

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.may_change(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may edit this schedule: not if the code declares it."""
        return self.may_change(request) and (obj is None or obj.source == "admin")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return obj is not None and self.has_change_permission(request, obj)

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the user may run, enable, disable and add schedules."""
        return self._has_right(request, "change_schedule")

    # ---- the page

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return [(None, {"fields": EDITABLE})]
        fields: tuple[str, ...] = COMMON_FIELDS
        private = self.may_see_payloads(request)
        if private and obj.last_error:
            fields = ("error", *fields)
        if not self.has_change_permission(request, obj):
            content = ("whole_payload", "whole_metadata") if private else ()
            return [(None, {"fields": ("name", *fields, *READ_ONLY_FIELDS, *content)})]
        hidden = CONTENT if not private or _is_unreadable(obj) else ()
        editable = tuple(name for name in EDITABLE if name not in (*hidden, "name"))
        return [(None, {"fields": ("name", *fields)}), ("Definition", {"fields": editable})]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return ()
        if not self.has_change_permission(request, obj):
            return super().get_readonly_fields(request, obj)
        return ("name", "error", *COMMON_FIELDS)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        """Return a form that knows which queues the user may choose."""
        form = super().get_form(request, obj, change, **kwargs)
        return type(form.__name__, (form,), {"allowed_queues": self.get_queues(request)})

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Write the edited columns, and none that a worker may have written meanwhile."""
        with writing(self.alias):
            self._write(obj, form, change)
        if question := did_you_mean(obj.type, self.get_queues(request)):
            text = f"No handler here takes {obj.type}, the type of schedule {obj.name}. {question}"
            self.message_user(request, text, notices.WARNING)

    def _write(self, obj: Any, form: Any, change: bool) -> None:
        if not change:
            self._insert(obj)
        else:
            stored = self._lock(obj.name)
            changed = set(form.changed_data)
            if changed & {"cron", "every"}:  # one of them is empty, whatever is stored by now
                changed |= {"cron", "every"}
            if "enabled" not in changed:
                obj.enabled = stored.enabled
            obj.save(using=self.alias, update_fields=changed - {"enabled"})
            if not changed.intersection(TIMING):
                return
        restart_schedule(obj.name, enabled=obj.enabled, using=self.alias)

    def _insert(self, obj: Any) -> None:
        obj.source = "admin"
        try:
            obj.save(using=self.alias, force_insert=True)
        except IntegrityError as error:
            if isinstance(error.__cause__, UniqueViolation):
                raise Overtaken(TAKEN_TEXT) from error
            raise

    def _lock(self, name: str) -> Schedule:
        """Lock the row until the end of the transaction; raises Overtaken if the row is gone."""
        rows = Schedule.objects.using(self.alias).select_for_update(no_key=True)
        found = rows.only("enabled").filter(pk=name).first()
        if found is None:
            raise Overtaken(GONE_TEXT)
        return found

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the schedule; the messages that it has broadcast stay."""
        with writing(self.alias):
            obj.delete(using=self.alias)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Show or save a schedule; if another session has locked the row, show a notice."""
        return self._unless_locked(request, super().changeform_view, *args, **kwargs)

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Delete a schedule; if another session has locked the row, show a notice."""
        return self._unless_locked(request, super().delete_view, *args, **kwargs)

    def _unless_locked(
        self, request: HttpRequest, view: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if request.method in READS:
            return view(request, *args, **kwargs)
        request.mq_limited = True  # type: ignore[attr-defined]  # here, not by the base's view
        try:
            with limited_throughout(self.alias):
                return view(request, *args, **kwargs)
        except TookTooLong:
            text = LOCKED_TEXT
        except Overtaken as error:
            text = str(error)
        except DatabaseError as error:
            return answer_read_only(self, request, error)
        self.message_user(request, text, notices.ERROR)
        return HttpResponseRedirect(self.url(Schedule, "changelist"))

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        """Add the buttons that run, enable and disable."""
        obj = kw.get("obj")
        if obj is not None and self.may_change(request):
            other = ("disable", "Disable") if obj.enabled else ("enable", "Enable")
            actions = (("run", "Run now"), other)
            context["actions"] = [(label, self.url(Schedule, name)) for name, label in actions]
        return super().render_change_form(request, context, *args, **kw)

    # ---- what the buttons post to

    def get_urls(self) -> list[Any]:
        pages = [
            self.page(Schedule, order, f"{order}/", partial(self.order_view, order=order))
            for order in ORDERS
        ]
        return [*pages, *super().get_urls()]

    def order_view(self, request: HttpRequest, order: str) -> HttpResponse:
        """Run, enable or disable the posted schedule, and log the user, in one transaction."""
        if not self.may_change(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self.url(Schedule, "changelist"))
        name = request.POST.get("schedule", "")
        found = self.get_object(request, name)
        if found is None:
            raise Http404
        try:
            with writing(self.alias):
                self._lock(name)
                note, text = ORDERS[order](name, self.alias)
                if note:
                    self.log(request, [Schedule(name=name)], CHANGE, note)
        except Overtaken as error:
            self.message_user(request, str(error), notices.ERROR)
            return HttpResponseRedirect(self.url(Schedule, "changelist"))
        except MQError as error:
            self.message_user(request, str(error), notices.ERROR)
        except TookTooLong:
            self.message_user(request, LOCKED_TEXT, notices.ERROR)
        else:
            self.message_user(request, text, notices.SUCCESS if note else notices.WARNING)
        return HttpResponseRedirect(self.url(Schedule, "change", name))


def _is_unreadable(row: Schedule) -> bool:
    return isinstance(row.payload, Unreadable) or isinstance(row.metadata, Unreadable)
