"""The actions on messages: requeue, run now, cancel, discard.

The functions of `queues` decide which messages are changed. This module checks permissions, reports
the result, and logs the user in the same transaction as the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE, DELETION
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict

from django_mq.admin import selected_ids
from django_mq.admin.bounds import limited_statements, redirects_on_timeout, writing
from django_mq.admin.everything import EverythingAdmin
from django_mq.admin.message_actions import (
    CANCEL,
    DISCARD,
    MESSAGE_ACTIONS,
    REQUEUE,
    RUN_NOW,
    MessageAction,
)
from django_mq.admin.own_pages import own_page
from django_mq.admin.selected_ids import (
    first_ids,
    ids_of,
    posted_ids,
    ticked_ids,
    too_many,
)
from django_mq.admin.texts import batch_note
from django_mq.models import QueuedMessage, QueueState
from django_mq.operations.heads import heads_of
from django_mq.policy.rounding import message_count
from django_mq.queues.stalled import line_positions
from django_mq.states import MessageState

#: The stock admin's parameter for the filters of the list from which a page was opened.
FILTERS = "_changelist_filters"


class MessageActionsAdmin(EverythingAdmin):
    """The actions of the message list and of a message's page."""

    actions = ("requeue", "run_now", "cancel", "discard", "requeue_heads", "discard_heads")

    @admin.action(permissions=["requeue"], description="Requeue the selected dead letters")
    def requeue(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, REQUEUE, queryset)

    @admin.action(permissions=["run_now"], description="Run the selected messages now")
    def run_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, RUN_NOW, queryset)

    @admin.action(permissions=["cancel"], description="Cancel the selected messages…")
    def cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, CANCEL, queryset)

    @admin.action(permissions=["discard"], description="Discard the selected dead letters…")
    def discard(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, DISCARD, queryset)

    @admin.action(permissions=["requeue"], description="Requeue the heads they wait behind")
    def requeue_heads(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, REQUEUE, queryset, heads=True)

    @admin.action(permissions=["discard"], description="Discard the heads they wait behind…")
    def discard_heads(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._from_list(request, DISCARD, queryset, heads=True)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return self.may(request, REQUEUE)

    def has_run_now_permission(self, request: HttpRequest) -> bool:
        return self.may(request, RUN_NOW)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, CANCEL)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return self.may(request, DISCARD)

    def check_posted_actions(self, request: HttpRequest) -> None:
        """Refuse a posted action if permission is missing: hiding the action is not enough."""
        if request.method != "POST":
            return
        for name in request.POST.getlist("action"):
            action = MESSAGE_ACTIONS.get(name.removesuffix("_heads"))
            if action is not None and not self.may(request, action):
                raise PermissionDenied
        ticked_ids(request)

    @own_page(QueuedMessage, "action", "actions/<str:name>/")
    @redirects_on_timeout
    def action_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Perform the action `name` on the posted `ids`; removing needs confirmation."""
        action = MESSAGE_ACTIONS.get(name)
        if action is None:
            raise Http404
        if request.method != "POST":
            return HttpResponseRedirect(self.url(self.model, "changelist"))
        if not self.may(request, action):
            raise PermissionDenied
        ids = posted_ids(request)
        if action.removes and "confirmed" not in request.POST:
            return self._confirm(request, action, ids)
        self._perform(request, action, ids)
        return HttpResponseRedirect(self._return_url(request, ids if action.removes else ()))

    def _return_url(self, request: HttpRequest, removed: Sequence[int] = ()) -> str:
        """Return the page from which the form was posted: a message's, a queue's, or the list."""
        if queue := request.POST.get("queue"):
            return self.url(QueueState, "change", queue)
        if page := request.POST.get("page"):
            (id,) = ids_of([page])
            if id not in removed:
                filters = request.POST.get("filters", "")
                query = {FILTERS: QueryDict(filters).urlencode()} if filters else {}
                return self.url(self.model, "change", id, **query)
        return self.list_url(request.POST.get("filters", ""))

    def _from_list(
        self,
        request: HttpRequest,
        action: MessageAction,
        queryset: QuerySet[Any],
        *,
        heads: bool = False,
    ) -> HttpResponse:
        """Apply `action` to the selected messages; with `heads`, to the heads of their lines.

        Two checks of the permission come first: `check_posted_actions()`, and the stock admin's.
        """
        # Everything that matches: an operation has no maximum.
        across = request.POST.get("select_across") == "1"
        with limited_statements(self.alias):
            ids = first_ids(queryset)
        if len(ids) > selected_ids.MAX_MESSAGES:
            if not across:
                raise too_many()
            return HttpResponseRedirect(self.everything_url(action, request.GET, heads=heads))
        # Selected, but no longer in the list: gone, or excluded by its filter.
        absent = 0 if across else len({*ticked_ids(request)}.difference(ids))
        if heads:
            with connections[self.alias].cursor() as cursor:
                ids = heads_of(cursor, ids)
        if action.removes:
            return self._confirm(request, action, ids, absent=absent)
        self._perform(request, action, ids, absent=absent)
        return HttpResponseRedirect(request.get_full_path())

    def _confirm(
        self, request: HttpRequest, action: MessageAction, ids: Sequence[int], *, absent: int = 0
    ) -> HttpResponse:
        """Ask for confirmation, with counts. States are checked again when the user confirms."""
        found: Counter[tuple[str, str]] = Counter()
        others: Counter[str] = Counter()
        matching: list[int] = []
        columns = ("pk", "queue", "type", "state", "leased_until")
        with limited_statements(self.alias):
            rows = list(self.get_queryset(request).filter(pk__in=ids).values_list(*columns))
        for id, queue, type, state, leased_until in rows:
            if leased_until is not None:
                others["in flight"] += 1
            elif state in action.states:
                found[queue, type] += 1
                matching.append(id)
            else:
                others[MessageState(state).label] += 1
        if missing := len(ids) - len(rows) + absent:
            others["gone"] += missing
        filters = request.POST.get("filters", request.GET.urlencode())
        origin = {name: request.POST[name] for name in ("page", "queue") if request.POST.get(name)}
        return self.show_page(
            request,
            "confirmation",
            action.question,
            action=action,
            url=self.url(QueuedMessage, "action", action.name),
            ids=",".join(map(str, ids)),
            filters=filters,
            behind=self._behind(matching),
            origin=origin.items(),
            back=self._return_url(request) if origin else self.list_url(filters),
            found=[(*names, count) for names, count in sorted(found.items())],
            count=sum(found.values()),
            others=sorted(others.items()),
            skipped=sum(others.values()),
        )

    def _behind(self, ids: Sequence[int]) -> str:
        """Return how many messages wait behind the heads among `ids`; empty if none do."""
        found = line_positions(ids, maximum=selected_ids.MAX_MESSAGES, using=self.alias).values()
        count = sum(each.behind for each in found if each.head is None)
        more = any(each.behind == selected_ids.MAX_MESSAGES for each in found)
        return f"{count:,}{'+' if more else ''}" if count else ""

    def _perform(
        self, request: HttpRequest, action: MessageAction, ids: Sequence[int], *, absent: int = 0
    ) -> None:
        """Apply `action` to the messages of `ids` that the user may see, log it, and report it.

        A further `absent` messages were selected, but are no longer in the list.
        """
        alias = self.alias
        visible = self.scoped(request, QueuedMessage.objects.using(alias))
        with writing(alias):
            rows = visible.only("pk", "queue", "type").in_bulk(ids)
            changed = action.run(list(rows), using=alias)
            skipped = len(ids) - len(changed.ids) + absent
            note = f"{action.past}{batch_note(len(changed.ids))}; {skipped} skipped."
            flag = DELETION if action.removes else CHANGE
            self.log(request, [rows[id] for id in changed.ids], flag, note)
        self._report(request, action, len(changed.ids), skipped)

    def _report(self, request: HttpRequest, action: MessageAction, done: int, skipped: int) -> None:
        if done:
            text = f"{action.label}: {message_count(done)}."
            self.message_user(request, text, notices.SUCCESS)
        if skipped:
            subject = "message was" if skipped == 1 else "messages were"
            text = (
                f"{action.label}: {skipped:,} {subject} skipped: in flight, locked, gone, or in a"
                " state that this action does not apply to."
            )
            self.message_user(request, text, notices.WARNING)
