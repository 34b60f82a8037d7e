"""The page "Errors": failed attempts in groups, each with a sample and actions."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.utils.http import urlencode

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import limited_statements, redirects_on_timeout
from django_mq.admin.message_actions import DISCARD, MESSAGE_ACTIONS, REQUEUE, RUN_NOW
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import excerpt, plain, when
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.policy.column_bounds import id_of

#: The maximum number of groups on a page, and of pages.
GROUPS_PER_PAGE, MAX_PAGES = 50, 1000
#: The offered periods, in seconds.
PERIODS = (
    ("", "Any time", None),
    ("hour", "Past hour", 3600),
    ("day", "Past 24 hours", 86400),
    ("week", "Past 7 days", 604800),
)


class ErrorsAdmin(ReadOnlyAdmin):
    """Failed attempts in groups by fingerprint."""

    @own_page(FailedAttempt, "errors", "errors/")
    @redirects_on_timeout
    def errors_view(self, request: HttpRequest) -> HttpResponse:
        """Show a page of the groups, the most recent failure first."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen = request.GET.get("since", "")
        seconds = next((each[2] for each in PERIODS if each[0] == chosen), None)
        number = min(id_of(request.GET.get("page", "")) or 1, MAX_PAGES)
        with limited_statements(self.alias):
            found = queues.errors(
                seconds,
                self.get_queues(request),
                limit=GROUPS_PER_PAGE + 1,
                offset=(number - 1) * GROUPS_PER_PAGE,
                using=self.alias,
            )
            ids = [each.attempt_id for each in found]
            attempts = FailedAttempt.objects.using(self.alias).annotate(now=Now()).in_bulk(ids)
        rows = [
            self._row(request, each, attempts[each.attempt_id])
            for each in found[:GROUPS_PER_PAGE]
            if each.attempt_id in attempts
        ]
        periods = [(name, label, name == chosen) for name, label, _seconds in PERIODS]
        return self.show_page(
            request,
            "errors",
            "Errors",
            rows=rows,
            periods=periods,
            newer=_link(chosen, number - 1) if number > 1 else "",
            older=_link(chosen, number + 1)
            if len(found) > GROUPS_PER_PAGE and number < MAX_PAGES
            else "",
        )

    def _row(
        self, request: HttpRequest, group: queues.ErrorGroup, sample: FailedAttempt
    ) -> dict[str, Any]:
        """Return a group as the page shows it, with texts only for users who may see payloads."""
        private = self.may_see_payloads(request)
        now = sample.now  # type: ignore[attr-defined]
        messages = {"fingerprint": group.fingerprint}
        return {
            "group": group,
            "error": excerpt(group.error_class) or "unknown",
            "text": excerpt(sample.error_text) if private else "",
            "trace": plain(sample.traceback) if private else "",
            "first": when(group.first, now),
            "last": when(group.last, now),
            "count": f"{group.count:,}",
            "attempts_url": self.url(FailedAttempt, "changelist", **messages),
            "messages_url": self.messages_url(request, **messages),
            "actions": self._actions(request, group),
        }

    def _actions(self, request: HttpRequest, group: queues.ErrorGroup) -> list[tuple[Any, str]]:
        """Return the actions on the messages of a group that the user may perform, with URLs."""
        dead, waiting = (n or not group.is_exact for n in (group.dead, group.waiting))
        fits = {REQUEUE.name: dead, DISCARD.name: dead, RUN_NOW.name: waiting}
        query = {"fingerprint": group.fingerprint}
        return [
            (action, url)
            for action in MESSAGE_ACTIONS.values()
            if fits.get(action.name)
            and self.may(request, action)
            and (url := self.url(QueuedMessage, "everything", action.name, **query))
        ]


def _link(since: str, page: int) -> str:
    return f"?{urlencode({'since': since, 'page': str(page)})}"
