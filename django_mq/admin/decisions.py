"""The forms that change a queue: pause, resume, limit, end a backoff. Each logs the user.

A queue that is unknown here may be misspelled, or has just become empty: the first post asks for
confirmation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict

from django_mq import queues
from django_mq.admin.bounds import TookTooLong, writing
from django_mq.admin.queue_rows import QueueRowsAdmin
from django_mq.exceptions import InvalidName
from django_mq.models import QueueState
from django_mq.policy.names import check_name
from django_mq.policy.similar_names import similar
from django_mq.queues.decisions import MAX_IN_FLIGHT

#: The offered pauses in seconds; the empty one lasts until the queue is resumed.
PAUSES = {
    "": "until resumed",
    "900": "15 minutes",
    "3600": "1 hour",
    "14400": "4 hours",
    "86400": "1 day",
}

#: A function that makes a change and returns its log entry (empty if nothing changed), and the
#: notice for the user.
PreparedChange = tuple[Callable[[], str], str]


def _pause(form: QueryDict, queue: str, alias: str) -> PreparedChange:
    seconds = form.get("seconds", "")
    if seconds not in PAUSES:
        raise BadRequest("Choose one of the offered pauses.")

    def pause() -> str:
        end = queues.pause(queue, until=int(seconds) if seconds else None, using=alias)
        return f"Paused until {end.isoformat()}." if end else "Paused until it is resumed."

    return pause, f"Queue {queue} is paused."


def _resume(form: QueryDict, queue: str, alias: str) -> PreparedChange:
    def resume() -> str:
        return "Resumed." if queues.resume(queue, using=alias) else ""

    return resume, f"Queue {queue} is no longer paused."


def _limit(form: QueryDict, queue: str, alias: str) -> PreparedChange:
    """Set the limit; an empty value restores the limit of the settings."""
    text = form.get("max_in_flight", "").strip()
    if text and not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise BadRequest("A limit must be a whole number, or empty.")
    maximum = int(text) if text else None
    if maximum is not None and maximum > MAX_IN_FLIGHT:
        raise BadRequest(f"A limit must be at most {MAX_IN_FLIGHT:,}.")

    def limit() -> str:
        queues.limit(queue, maximum, using=alias)
        return "Limit lifted." if maximum is None else f"Limited to {maximum} in flight."

    if maximum is None:
        return limit, f"Queue {queue} has the limit of the settings again."
    return limit, f"Queue {queue} is limited."


def _end_backoff(form: QueryDict, queue: str, alias: str) -> PreparedChange:
    def end() -> str:
        return "Backoff ended." if queues.end_backoff(queue, using=alias) else ""

    return end, f"Queue {queue} is no longer backing off."


#: The button of each decision on the page that asks for confirmation, and its change.
DECISIONS = {
    "pause": ("Pause", _pause),
    "resume": ("Resume", _resume),
    "limit": ("Limit", _limit),
    "end_backoff": ("End the backoff", _end_backoff),
}
#: The fields of the forms, which the page that asks for confirmation posts again.
FIELDS = ("queue", "seconds", "max_in_flight", "page")


class QueueDecisionsAdmin(QueueRowsAdmin):
    """The views to which the forms post; each checks permissions and logs the user."""

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the user may see and change queues."""
        return self.has_view_permission(request) and self._has_right(request, "change_queue")

    def get_urls(self) -> list[Any]:
        """Add the URLs to which the forms post."""
        urls = []
        for name in DECISIONS:
            view = partial(self.decision_view, name=name)
            urls.append(self.page(QueueState, name, f"{name.replace('_', '-')}/", view))
        return [*urls, *super().get_urls()]

    def decision_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Make the decision `name` about the posted queue; ask first if the queue is unknown."""
        if not self.may_change(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        queue = request.POST.get("queue", "")
        if not self.may_name(request, queue):
            raise Http404
        label, prepare = DECISIONS[name]
        change, text = prepare(request.POST, queue, self.alias)
        if "confirmed" not in request.POST and not self.knows(request, queue):
            return self._ask(request, queue, name, label)
        return self._change(request, queue, change, text)

    def _ask(self, request: HttpRequest, queue: str, name: str, label: str) -> HttpResponse:
        """Ask whether an unknown queue is meant, and offer the known queues with similar names."""
        near = similar(queue, self.seen_queues(request))
        return self.show_page(
            request,
            "unknown_queue",
            "Change an unknown queue?",
            queue=queue,
            near=[(each, self.url(QueueState, "change", each)) for each in near],
            label=label,
            url=self.url(QueueState, name),
            fields=[(each, request.POST[each]) for each in FIELDS if each in request.POST],
            back=self.url(QueueState, "changelist"),
        )

    def _change(
        self, request: HttpRequest, queue: str, change: Callable[[], str], text: str
    ) -> HttpResponse:
        """Change the queue and log the user in one transaction; report `text`, or a held lock."""
        try:
            with writing(self.alias):
                note = change()
                if note:
                    self.log(request, [QueueState(queue=queue)], CHANGE, note)
        except TookTooLong:
            text = f"Another session is changing queue {queue}. Try again in a moment."
            self.message_user(request, text, notices.ERROR)
        else:
            self.message_user(request, text, notices.SUCCESS)
        page = ("change", queue) if "page" in request.POST else ("changelist",)
        return HttpResponseRedirect(self.url(QueueState, *page))

    def may_name(self, request: HttpRequest, queue: str) -> bool:
        """Return whether `queue` is a name, and the name of a queue that the user may see."""
        try:
            return self.may_see(request, check_name(queue, "queue"))
        except InvalidName:
            return False

    def knows(self, request: HttpRequest, queue: str) -> bool:
        """Return whether the queue exists and the user may see it."""
        return queue in self.seen_queues(request)

    def form_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return the template context of the forms."""
        return {
            "may_change": self.may_change(request),
            "pauses": PAUSES.items(),
            **{f"{name}_url": self.url(QueueState, name) for name in DECISIONS},
            "most_in_flight": MAX_IN_FLIGHT,
        }
