"""Request an action on all messages that match the filters of the list."""

from __future__ import annotations

from django.contrib import messages as notices
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import MAX_COUNT, AtLeast, TookTooLong, limited_statements
from django_mq.admin.message_actions import MESSAGE_ACTIONS, MessageAction
from django_mq.admin.message_filters import HEADS_PARAMETER, filter_of
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import operator
from django_mq.models import FailedAttempt, Operation, QueuedMessage
from django_mq.operations.changes import HEAD_ACTIONS
from django_mq.operations.filter_words import in_words
from django_mq.policy.column_bounds import id_of
from django_mq.policy.message_filter import MessageFilter
from django_mq.policy.plain_text import one_line
from django_mq.queues.errors import error_words
from django_mq.states import MessageState
from django_mq.store import message_filters as filters

#: If the whole count takes too long: the ids of a page, and the number of pages, that are counted.
COUNTED, PAGES = MAX_COUNT + 1, 20


class EverythingAdmin(ReadOnlyAdmin):
    """The page that asks for confirmation with the number of messages, and stores the operation."""

    def everything_url(
        self, action: MessageAction, query: QueryDict, *, heads: bool = False
    ) -> str:
        """Return the URL of the page that requests `action` on the messages that the query shows.

        With `heads`, the action is on the first messages of their lines.
        """
        query = query.copy()
        if heads:
            query[HEADS_PARAMETER] = "1"
        return f"{self.url(QueuedMessage, 'everything', action.name)}?{query.urlencode()}"

    def offered_for_all(self, request: HttpRequest) -> list[tuple[str, str]]:
        """Return the actions on all listed messages, if the list shows a single state: text, URL.

        An action on the heads that blocked messages wait behind frees these.
        """
        state = request.GET.get("state")
        found = [
            (f"{action.label}: all that match…", self.everything_url(action, request.GET))
            for action in MESSAGE_ACTIONS.values()
            if state in action.states and self.may(request, action)
        ]
        for name in HEAD_ACTIONS if state == MessageState.BLOCKED else ():
            action = MESSAGE_ACTIONS[name]
            if self.may(request, action):
                url = self.everything_url(action, request.GET, heads=True)
                found.append((f"{action.label}: all heads they wait behind…", url))
        return found

    @own_page(QueuedMessage, "everything", "everything/<str:name>/")
    def everything_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show how many messages match, and store the operation once that is confirmed."""
        action = MESSAGE_ACTIONS.get(name)
        if action is None or (HEADS_PARAMETER in request.GET and name not in HEAD_ACTIONS):
            raise Http404
        if not self.may(request, action):
            raise PermissionDenied
        shown = request.GET.copy()
        shown.pop(HEADS_PARAMETER, None)
        try:
            wanted = self._wanted(request, request.GET)
        except (ValueError, OverflowError) as error:
            self.message_user(request, one_line(str(error)), notices.ERROR)
            return HttpResponseRedirect(self.url(self.model, "changelist"))
        if request.method == "POST":
            return self._ask(request, action, wanted)
        count = self._count(wanted, action)
        return self.show_page(
            request,
            "everything",
            action.question,
            action=action,
            heads=wanted.heads,
            count=count,
            count_text=str(count) if isinstance(count, AtLeast) else f"{count or 0:,}",
            exact="" if count is None or isinstance(count, AtLeast) else int(count),
            words=[*in_words(wanted.as_json()), *self._error_in_words(request, wanted)],
            back=self.list_url(shown.urlencode()),
        )

    def _wanted(self, request: HttpRequest, query: QueryDict) -> MessageFilter:
        allowed = self.get_queues(request)
        return filter_of(query, allowed, private=self.may_see_payloads(request))

    def _error_in_words(self, request: HttpRequest, wanted: MessageFilter) -> list[str]:
        """Return the error that the filter's fingerprint stands for, if the user may see it."""
        if wanted.fingerprint is None or not self._has_right(request, "view_failedattempt"):
            return []
        attempts = self.scoped(request, FailedAttempt.objects.using(self.alias))
        attempts = attempts.filter(fingerprint=wanted.fingerprint)
        # A fingerprint is made of these columns, so any of its attempts has them.
        found = next(iter(attempts.only("error_class", "handler", "place")[:1]), None)
        return [] if found is None else [f"error {one_line(error_words(found))}"]

    def _ask(
        self, request: HttpRequest, action: MessageAction, wanted: MessageFilter
    ) -> HttpResponse:
        made = queues.operate(
            action.name,
            wanted,
            by=operator(request),
            user_id=request.user.pk,
            # The number of lines of the matching messages is unknown.
            matched=None if wanted.heads else id_of(request.POST.get("matched", "")),
            using=self.alias,
        )
        text = f"Operation {made.pk} begins: a worker carries it out."
        self.message_user(request, text, notices.SUCCESS)
        may_view = self._has_right(request, "view_operation")
        page = self.url(Operation, "changelist") if may_view else ""
        return HttpResponseRedirect(page or self.url(self.model, "changelist"))

    def _count(self, wanted: MessageFilter, action: MessageAction) -> int | None:
        """Return how many messages match; an AtLeast, or None, if that takes too long."""
        with connections[self.alias].cursor() as cursor:
            last = filters.last_id(cursor)
            try:
                with limited_statements(self.alias):
                    return filters.count(cursor, wanted, action=action.name, last=last)
            except TookTooLong:
                pass
            found, after = 0, 0
            for _page in range(PAGES):
                try:
                    with limited_statements(self.alias):
                        page = filters.page(
                            cursor,
                            wanted,
                            action=action.name,
                            after=after,
                            last=last,
                            limit=COUNTED,
                        )
                except TookTooLong:
                    break
                found += len(page.ids)
                if page.after is None:
                    return found
                after = page.after
        return AtLeast(found + 1) if found else None
