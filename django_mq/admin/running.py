"""A running message: its worker and duration; stop it, or see where its handler is."""

from __future__ import annotations

from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import LOCKED, TookTooLong, writing
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import full, operator, plain
from django_mq.models import QueuedMessage, WorkerHeartbeat
from django_mq.policy.durations import span

#: The commands to a worker, and the permission that each needs.
RIGHTS = {"stop": "stop_message", "stack": "view_payload"}


class RunningAdmin(ReadOnlyAdmin):
    """The panel of a running message: its time, its worker and its actions."""

    def may_ask(self, request: HttpRequest, name: str) -> bool:
        """Return whether the user may stop messages, or may see stacks."""
        return self.may_see_messages(request) and self._has_right(request, RIGHTS[name])

    @own_page(QueuedMessage, "running", "running/<int:id>/<str:name>/")
    def running_view(self, request: HttpRequest, id: int, name: str) -> HttpResponse:
        """Ask the worker of message `id` to stop it, after confirmation, or for its stack."""
        if name not in RIGHTS:
            raise Http404
        page = HttpResponseRedirect(self.url(QueuedMessage, "change", id))
        if request.method != "POST":
            return page
        if not self.may_ask(request, name):
            raise PermissionDenied
        row = self.get_queryset(request).filter(pk=id).first()
        if row is None:
            self.message_user(request, "The message has ended.", notices.WARNING)
            return HttpResponseRedirect(self.url(QueuedMessage, "changelist"))
        if name == "stop" and "confirmed" not in request.POST:
            return self._confirm_stop(request, row)
        try:
            with writing(self.alias):
                ask = queues.stop if name == "stop" else queues.ask_stack
                asked = ask(id, by=operator(request), using=self.alias)
                if asked and name == "stop":
                    self.log(request, [row], CHANGE, "Asked its worker to stop it.")
        except TookTooLong:
            self.message_user(request, LOCKED, notices.ERROR)
            return page
        if asked:
            text = "The worker was asked. Reload the page in a second to see its answer."
            self.message_user(request, text, notices.SUCCESS)
        else:
            text = "No live worker has this message now."
            self.message_user(request, text, notices.WARNING)
        return page

    def _confirm_stop(self, request: HttpRequest, row: QueuedMessage) -> HttpResponse:
        return self.show_page(
            request,
            "stopping",
            "Stop this message?",
            row=row,
            url=self.url(QueuedMessage, "running", row.pk, "stop"),
            back=self.url(QueuedMessage, "change", row.pk),
        )

    def running_context(self, request: HttpRequest, message: QueuedMessage) -> dict[str, Any]:
        """Return where `message` runs, the commands that are allowed, and the worker's answers."""
        if message.leased_until is None:
            return {}
        now = message.now  # type: ignore[attr-defined]
        found = next(iter(queues.running(ids=[message.pk], using=self.alias)), None)
        labels = {"stop": "Stop…", "stack": "Show stack"}
        offered = [
            (name, label, self.url(QueuedMessage, "running", message.pk, name))
            for name, label in labels.items()
            if self.may_ask(request, name)
        ]
        answers = [
            {
                "what": "Stop" if each.action == "stop" else "Stack",
                "by": each.asked_by,
                "at": full(each.asked_at, now),
                "answer": plain(each.answer) if each.answered_at else "",
            }
            for each in queues.commands(message.pk, using=self.alias)
            if each.attempt == message.attempts
            and (each.action == "stop" or self.may_see_payloads(request))
        ]
        return {
            "running": found,
            "ran_for": span(found.ran_for) if found and found.ran_for else "",
            "worker_url": self.url(WorkerHeartbeat, "change", found.worker)
            if found and self._has_right(request, "view_workerheartbeat")
            else "",
            "asks": [each for each in offered if each[2]],
            "answers": answers,
        }
