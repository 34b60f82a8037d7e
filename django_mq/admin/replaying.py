"""The action that broadcasts handled messages again, after a confirmation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from django_mq import handlers, queues
from django_mq.admin import selected_ids
from django_mq.admin.bounds import limited_statements, redirects_on_timeout, writing
from django_mq.admin.chains import ChainsAdmin
from django_mq.admin.own_pages import own_page
from django_mq.admin.selected_ids import first_ids, posted_ids, ticked_ids
from django_mq.admin.texts import batch_note
from django_mq.conf import get_settings
from django_mq.exceptions import MQError
from django_mq.models import HandledMessage
from django_mq.policy.rounding import message_count


class ReplayingAdmin(ChainsAdmin):
    """The action of the list and of a message's page."""

    actions = ("replay",)

    @admin.action(permissions=["replay"], description="Replay the selected messages…")
    def replay(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        if not self.may_replay(request):
            raise PermissionDenied
        with limited_statements(self.alias):
            ids = first_ids(queryset)
        if len(ids) > (maximum := selected_ids.MAX_MESSAGES):
            ids = ids[:maximum]
            text = f"More than {maximum:,} messages were selected: these are the oldest."
            self.message_user(request, text, notices.WARNING)
        return self._confirm(request, ids)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return self.may_replay(request)

    def may_replay(self, request: HttpRequest) -> bool:
        """Return whether the user may see handled messages and broadcast them again."""
        return self._has_right(request, "view_handledmessage") and self._has_right(
            request, "replay_message"
        )

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list; a posted action without permission is refused, not only hidden."""
        if request.method == "POST":
            if "replay" in request.POST.getlist("action") and not self.may_replay(request):
                raise PermissionDenied
            ticked_ids(request)
        return super().changelist_view(request, extra_context)

    @own_page(HandledMessage, "replay", "replay/")
    @redirects_on_timeout
    def replay_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for confirmation, or replay the posted `ids` to the posted handler `to`."""
        if request.method != "POST":
            return HttpResponseRedirect(self.url(HandledMessage, "changelist"))
        if not self.may_replay(request):
            raise PermissionDenied
        ids = posted_ids(request)
        to = request.POST.get("to", "")
        if to and to not in self._recipients(request):
            raise PermissionDenied
        try:
            if "confirmed" not in request.POST:
                return self._confirm(request, ids)
            self._perform(request, ids, to or None)
        except MQError as error:
            self.message_user(request, str(error), notices.ERROR)
        return HttpResponseRedirect(self.list_url(request.POST.get("filters", "")))

    def _recipients(self, request: HttpRequest) -> list[str]:
        """Return the handlers that the user may choose: those whose queue the user may see."""
        settings = get_settings()
        return sorted(
            each.name
            for each in handlers.all_handlers()
            if each.patterns and self.may_see(request, handlers.queue_of(each, settings))
        )

    def _visible(self, request: HttpRequest, ids: Sequence[int]) -> QuerySet[Any]:
        return self.get_queryset(request).filter(pk__in=ids)

    def _confirm(self, request: HttpRequest, ids: Sequence[int]) -> HttpResponse:
        visible = self._visible(request, ids).annotate(bare=Q(payload__isnull=True))
        with limited_statements(self.alias):
            rows = list(visible.values_list("queue", "type", "handler", "bare"))
        found = Counter(row[:3] for row in rows if not row[3])
        filters = request.POST.get("filters", request.GET.urlencode())
        return self.show_page(
            request,
            "replay",
            "Replay these messages?",
            url=self.url(HandledMessage, "replay"),
            ids=",".join(map(str, ids)),
            filters=filters,
            back=self.list_url(filters),
            found=[(*names, count) for names, count in sorted(found.items())],
            count=sum(found.values()),
            bare=sum(row[3] for row in rows),
            missing=len(ids) - len(rows),
            recipients=self._recipients(request),
        )

    def _perform(self, request: HttpRequest, ids: Sequence[int], to: str | None) -> None:
        """Replay the messages of `ids` that the user may see, log it, and report it."""
        with writing(self.alias):
            rows = {row.pk: row for row in self._visible(request, ids).only("pk", "type")}
            if rows:
                done = queues.replay(ids=list(rows), to=to, using=self.alias)
                note = f"Replayed to {to or 'its own handler'}{batch_note(len(done.ids))}."
                self.log(request, [rows[id] for id in done.ids], CHANGE, note)
        if count := len(rows):
            text = f"{message_count(count)} replayed."
            self.message_user(request, text, notices.SUCCESS)
        if missing := len(ids) - count:
            text = f"{message_count(missing)} skipped: no longer in the history."
            self.message_user(request, text, notices.WARNING)
