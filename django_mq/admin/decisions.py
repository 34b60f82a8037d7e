"""What users decide about a queue: pause, resume, limit, end a backoff; and who did it."""

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
from django_mq.admin.lines import QueueLinesAdmin
from django_mq.models import QueueState
from django_mq.queues.connecting import writing
from django_mq.queues.deciding import MOST_IN_FLIGHT

#: How long a pause may be, in seconds; the empty one ends when somebody ends it.
PAUSES = {
    "": _("until resumed"),
    "900": _("15 minutes"),
    "3600": _("1 hour"),
    "14400": _("4 hours"),
    "86400": _("1 day"),
}


class QueueDecisionsAdmin(QueueLinesAdmin):
    """The addresses that the forms post to; each asks who may, and writes down who did."""

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the user may see queues, and decide about them."""
        return self.has_view_permission(request) and self._has_right(request, "change_queue")

    def get_urls(self) -> list[Any]:
        """Add the addresses that the buttons post to."""
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

    def limit_view(self, request: HttpRequest) -> HttpResponse:
        """Limit the posted queue to so many in flight; nothing posted: to what the settings say."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        text = request.POST.get("max_in_flight", "").strip()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 11):
            raise BadRequest("A limit is a whole number, or nothing.")
        most = int(text) if text else None
        if most is not None and most > MOST_IN_FLIGHT:
            raise BadRequest("That is more than a limit can be.")

        def limit() -> str:
            queues.limit(queue, most, using=self.alias)
            return "Limit lifted." if most is None else f"Limited to {most} in flight."

        told = (
            gettext("Queue %s has the limit of the settings.")
            if most is None
            else gettext("Queue %s is limited.")
        )
        return self._change(request, queue, limit, told)

    def end_backoff_view(self, request: HttpRequest) -> HttpResponse:
        """Let the posted queue run at its full rate again."""
        queue = self._posted_queue(request)
        if queue is None:
            return HttpResponseRedirect(self.url(QueueState, "changelist"))

        def end() -> str:
            return "Backoff ended." if queues.end_backoff(queue, using=self.alias) else ""

        told = gettext("Queue %s does not back off any more.")
        return self._change(request, queue, end, told)

    def _posted_queue(self, request: HttpRequest) -> str | None:
        """Return the queue that the user may change, None if nothing was posted."""
        if not self.may_change(request):
            raise PermissionDenied
        if request.method != "POST":
            return None
        queue = request.POST.get("queue", "")
        if not self.knows(request, queue):
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

    def knows(self, request: HttpRequest, queue: str) -> bool:
        """Return whether there is such a queue among those that the user may see."""
        return self.may_see(request, queue) and queue in queues.names(using=self.alias)

    def deciding(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the forms of both pages need."""
        return {
            "may_change": self.may_change(request),
            "pauses": PAUSES.items(),
            "pause_url": self.url(QueueState, "pause"),
            "resume_url": self.url(QueueState, "resume"),
            "limit_url": self.url(QueueState, "limit"),
            "end_backoff_url": self.url(QueueState, "end_backoff"),
            "most_in_flight": MOST_IN_FLIGHT,
        }
