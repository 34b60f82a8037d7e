"""The forms that change a queue: pause, resume, limit, end a backoff. Each logs the user."""

from __future__ import annotations

from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_mq import queues
from django_mq.admin.bounds import ran_out
from django_mq.admin.queue_rows import QueueRowsAdmin
from django_mq.models import QueueState
from django_mq.queues.decisions import MOST_IN_FLIGHT
from django_mq.queues.transactions import writing

#: The offered pauses in seconds; the empty one lasts until the queue is resumed.
PAUSES = {
    "": _("until resumed"),
    "900": _("15 minutes"),
    "3600": _("1 hour"),
    "14400": _("4 hours"),
    "86400": _("1 day"),
}


class QueueDecisionsAdmin(QueueRowsAdmin):
    """The views that the forms post to; each checks permissions and logs the user."""

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the user may see and change queues."""
        return self.has_view_permission(request) and self._has_right(request, "change_queue")

    def get_urls(self) -> list[Any]:
        """Add the URLs that the forms post to."""
        wrap = self.admin_site.admin_view
        return [
            path("pause/", wrap(self.pause_view), name="django_mq_queuestate_pause"),
            path("resume/", wrap(self.resume_view), name="django_mq_queuestate_resume"),
            path("limit/", wrap(self.limit_view), name="django_mq_queuestate_limit"),
            path(
                "end-backoff/", wrap(self.end_backoff_view), name="django_mq_queuestate_end_backoff"
            ),
            *super().get_urls(),
        ]

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Pause the posted queue for the posted number of seconds, or until it is resumed."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        seconds = request.POST.get("seconds", "")
        if seconds not in PAUSES:
            raise BadRequest("Choose one of the offered pauses.")

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

        return self._change(request, queue, resume, gettext("Queue %s is no longer paused."))

    def limit_view(self, request: HttpRequest) -> HttpResponse:
        """Set the in-flight limit of the posted queue; empty restores the settings' limit."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        text = request.POST.get("max_in_flight", "").strip()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 11):
            raise BadRequest("A limit must be a whole number, or empty.")
        most = int(text) if text else None
        if most is not None and most > MOST_IN_FLIGHT:
            raise BadRequest(f"A limit must be at most {MOST_IN_FLIGHT:,}.")

        def limit() -> str:
            queues.limit(queue, most, using=self.alias)
            return "Limit lifted." if most is None else f"Limited to {most} in flight."

        text = (
            gettext("Queue %s has the limit of the settings again.")
            if most is None
            else gettext("Queue %s is limited.")
        )
        return self._change(request, queue, limit, text)

    def end_backoff_view(self, request: HttpRequest) -> HttpResponse:
        """End the backoff of the posted queue."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))

        def end() -> str:
            return "Backoff ended." if queues.end_backoff(queue, using=self.alias) else ""

        text = gettext("Queue %s is no longer backing off.")
        return self._change(request, queue, end, text)

    def _posted_queue(self, request: HttpRequest) -> str | None:
        """Return the posted queue after checking permissions, None if nothing was posted."""
        if not self.may_change(request):
            raise PermissionDenied
        if request.method != "POST":
            return None
        queue = request.POST.get("queue", "")
        if not self.knows(request, queue):
            raise Http404
        return queue

    def _change(self, request: HttpRequest, queue: str, change: Any, text: str) -> HttpResponse:
        """Change the queue and log the user in one transaction; report `text`, or a held lock."""
        try:
            with writing(self.alias):
                note = change()
                if note:
                    self.log(request, [QueueState(queue=queue)], CHANGE, note)
        except OperationalError as error:
            if not ran_out(error):
                raise
            text = gettext("Another session is changing queue %s. Try again in a moment.")
            self.message_user(request, text % queue, notices.ERROR)
        else:
            self.message_user(request, text % queue, notices.SUCCESS)
        page = ("change", queue) if "page" in request.POST else ("changelist",)
        return HttpResponseRedirect(self.url(QueueState, *page))

    def knows(self, request: HttpRequest, queue: str) -> bool:
        """Return whether the queue exists and the user may see it."""
        return self.may_see(request, queue) and queue in queues.names(using=self.alias)

    def form_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return the template context of the forms."""
        return {
            "may_change": self.may_change(request),
            "pauses": PAUSES.items(),
            "pause_url": self.url(QueueState, "pause"),
            "resume_url": self.url(QueueState, "resume"),
            "limit_url": self.url(QueueState, "limit"),
            "end_backoff_url": self.url(QueueState, "end_backoff"),
            "most_in_flight": MOST_IN_FLIGHT,
        }
