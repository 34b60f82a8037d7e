"""Ids of messages that are no longer stored lead to what is known of them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages as notices
from django.contrib.admin.views.main import SEARCH_VAR
from django.http import HttpRequest, HttpResponseRedirect
from django.utils.html import format_html

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import excerpt, link
from django_mq.models import FailedAttempt, HandledMessage, QueuedMessage
from django_mq.policy.column_bounds import id_of
from django_mq.queues.reasons import GONE


class AbsentMessagesAdmin(ReadOnlyAdmin):
    """Leads from the id of a message that is gone to its history, or to its failed attempts."""

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        """Report what became of a message whose row is gone."""
        wanted = id_of(object_id)
        if target := self._handled_url(request, wanted):
            text = f"Message {wanted} was acked: this is its page in the history."
            self.message_user(request, text, notices.INFO)
            return HttpResponseRedirect(target)
        text = f"Message {excerpt(object_id)} is not stored."
        if wanted is not None and self.get_queues(request) is None:
            why = queues.why(wanted, using=self.alias)
            if why.state == GONE:
                text = str(why) if self.may_see_payloads(request) else why.text
        self.message_user(request, text, notices.WARNING)
        attempts = self.scoped(request, FailedAttempt.objects.using(self.alias))
        attempts = attempts.filter(message_id=wanted or 0)
        if self._has_right(request, "view_failedattempt") and attempts.exists():
            target = self.url(FailedAttempt, "changelist", message_id=wanted)
        return HttpResponseRedirect(target or self.url(QueuedMessage, "changelist"))

    def point_to_history(self, request: HttpRequest) -> None:
        """If the search is for the id of a handled message, link to the page of that message."""
        wanted = id_of(request.GET.get(SEARCH_VAR, "").strip().removeprefix("#"))
        if wanted is None or not (target := self._handled_url(request, wanted)):
            return
        if not QueuedMessage.objects.using(self.alias).filter(pk=wanted).exists():
            text = format_html(
                "Message {} was acked: see {}.", wanted, link(target, "its page in the history")
            )
            self.message_user(request, text, notices.INFO)

    def _handled_url(self, request: HttpRequest, id: int | None) -> str:
        """Return the page of a message in the history, empty if the user may not see it."""
        handled = self.scoped(request, HandledMessage.objects.using(self.alias))
        if self._has_right(request, "view_handledmessage") and handled.filter(pk=id or 0).exists():
            return self.url(HandledMessage, "change", id)
        return ""
