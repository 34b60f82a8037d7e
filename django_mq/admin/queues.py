"""The queues, with or without a row: what waits in them, who serves them; pause and resume."""

from __future__ import annotations

from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.contrib.admin.utils import unquote
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import OperationalError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_mq import handlers, queues
from django_mq.admin.bounds import ran_out
from django_mq.admin.lines import COLUMNS, QueueLinesAdmin
from django_mq.admin.texts import excerpt
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues.connecting import writing

#: How long a pause may be, in seconds; the empty one ends when somebody ends it.
PAUSES = {
    "": _("until resumed"),
    "900": _("15 minutes"),
    "3600": _("1 hour"),
    "14400": _("4 hours"),
    "86400": _("1 day"),
}


class QueueStateAdmin(QueueLinesAdmin):
    """All queues that are known here; pausing and resuming them."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return what was decided about queues; the turn of the chores is no queue."""
        return super().get_queryset(request).filter(chores_ran_at__isnull=True)

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the user may see queues, and pause and resume them."""
        return self.has_view_permission(request) and self._has_right(request, "change_queue")

    def get_urls(self) -> list[Any]:
        """Add the addresses that the buttons post to."""
        wrap = self.admin_site.admin_view
        return [
            path("pause/", wrap(self.pause_view), name="django_mq_queuestate_pause"),
            path("resume/", wrap(self.resume_view), name="django_mq_queuestate_resume"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show a line for each queue."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = queues.counts(using=self.alias)
        seen = [each for name, each in found.items() if self.may_see(request, name)]
        context = self.page_context(
            request,
            gettext("Queues"),
            lines=self.lines(request, seen),
            columns=COLUMNS,
            **self._pausing(request),
            **(extra_context or {}),
        )
        return TemplateResponse(request, "admin/django_mq/queue_list.html", context)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one queue, whether anything was decided about it or not."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            raise PermissionDenied
        queue = unquote(object_id)
        if not self._knows(request, queue):
            text = gettext("Queue %s is not known.") % excerpt(queue)
            self.message_user(request, text, notices.WARNING)
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        (line,) = self.lines(request, [queues.counts(queue, using=self.alias)])
        settings = get_settings()
        context = self.page_context(
            request,
            queue,
            list_crumb=True,
            line=line,
            state=queues.state(queue, using=self.alias),
            decided=self.get_queryset(request).filter(pk=queue).first(),
            options=settings.queue(queue),
            handlers=[
                each
                for each in handlers.all_handlers()
                if queue in handlers.allowed_queues(each, settings)
            ],
            history_url=self.url(QueueState, "history", queue),
            messages_url=self.url(QueuedMessage, "changelist", queue=queue)
            if self.may_see_messages(request)
            else "",
            **self._pausing(request),
            **(extra_context or {}),
        )
        return TemplateResponse(request, "admin/django_mq/queue.html", context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the queue for its history, also one about which nothing is decided now."""
        if found := super().get_object(request, object_id, from_field):
            return found
        return QueueState(queue=object_id) if self._knows(request, object_id) else None

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Pause the posted queue for the posted number of seconds, or until it is resumed."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        seconds = request.POST.get("seconds", "")
        if seconds not in PAUSES:
            raise BadRequest("That is none of the offered pauses.")

        def pause() -> str:
            until = int(seconds) if seconds else None
            end = queues.pause(queue, until=until, using=self.alias)
            return f"Paused until {end.isoformat()}." if end else "Paused until it is resumed."

        return self._change(request, queue, pause, gettext("Queue %s is paused."))

    def resume_view(self, request: HttpRequest) -> HttpResponse:
        """Resume the posted queue."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))

        def resume() -> str:
            return "Resumed." if queues.resume(queue, using=self.alias) else ""

        return self._change(request, queue, resume, gettext("Queue %s is not paused any more."))

    def _posted_queue(self, request: HttpRequest) -> str | None:
        """Return the queue that the user may change, None if nothing was posted."""
        if not self.may_change(request):
            raise PermissionDenied
        if request.method != "POST":
            return None
        queue = request.POST.get("queue", "")
        if not self._knows(request, queue):
            raise Http404
        return queue

    def _change(self, request: HttpRequest, queue: str, change: Any, told: str) -> HttpResponse:
        """Change the queue and log who did it, together; somebody else's lock is not awaited."""
        try:
            with writing(self.alias):
                note = change()
                if note:
                    self.log(request, [QueueState(queue=queue)], CHANGE, note)
        except OperationalError as error:
            if not ran_out(error):
                raise
            told = gettext("Queue %s is being changed by somebody else. Try again in a moment.")
            self.message_user(request, told % queue, notices.ERROR)
        else:
            self.message_user(request, told % queue, notices.SUCCESS)
        page = ("change", queue) if "page" in request.POST else ("changelist",)
        return HttpResponseRedirect(self.url(QueueState, *page))

    def _knows(self, request: HttpRequest, queue: str) -> bool:
        return self.may_see(request, queue) and queue in queues.names(using=self.alias)

    def _pausing(self, request: HttpRequest) -> dict[str, Any]:
        return {
            "may_change": self.may_change(request),
            "pauses": PAUSES.items(),
            "pause_url": self.url(QueueState, "pause"),
            "resume_url": self.url(QueueState, "resume"),
        }
