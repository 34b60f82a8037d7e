"""The list of messages, and the parts of which its admin consists.

In the order in which Python looks up a method:

- `ExportAdmin` (`exports.py`): exports all messages that match
- `BroadcastingAdmin` (`broadcasting.py`): the form that broadcasts a message
- `SuggestingAdmin` (`suggesting.py`): the paths that the search box suggests
- `StateCountsAdmin` (`state_counts.py`): the counts above the list
- `MessagePageAdmin` (`message_page.py`): the page of one message, from the next seven
- `MessageFieldsAdmin` (`fields.py`): its columns in words
- `HeadsAdmin` (`heads.py`): links to the other messages of its line
- `MessageActionsAdmin` (`actions.py`): performs actions on the messages of the list or a page
- `EverythingAdmin` (`everything.py`): asks workers for an action on all messages that match
- `ChainsAdmin` (`chains.py`): its causes and effects
- `RunningAdmin` (`running.py`): the panel of a message that runs
- `EditingAdmin` (`editing.py`): the form that edits a message
- `TableAdmin` (`windows.py`): a list that reads a large table window by window
- `ReadOnlyAdmin` (`base.py`): permissions, time limits, and the actions that the pages offer
- `QueueScopeMixin` (`scope.py`): the queues that the user sees
- `OwnPagesAdmin` (`own_pages.py`): routes to the views that `own_page()` marks
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib import messages as notices
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.db import connections
from django.db.models import Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html

from django_mq import queues
from django_mq.admin.bounds import MAX_COUNT
from django_mq.admin.broadcasting import BroadcastingAdmin
from django_mq.admin.days import FROM, TO, Period, above, chosen, within
from django_mq.admin.exports import ExportAdmin
from django_mq.admin.filter_boxes import (
    FingerprintFilter,
    HandlerFilter,
    KeyFilter,
    LastErrorFilter,
    MessageQueueFilter,
    PriorityFilter,
    TypeFilter,
    WorkerFilter,
    of_queues,
)
from django_mq.admin.filter_moments import CreatedFilter, DeadFilter, DueFilter
from django_mq.admin.filters import StateFilter
from django_mq.admin.json_paths import read_path
from django_mq.admin.message_page import MessagePageAdmin
from django_mq.admin.state_counts import StateCountsAdmin
from django_mq.admin.suggesting import SuggestingAdmin
from django_mq.admin.texts import badge, breakable, excerpt, link, notes_below, number, titled, when
from django_mq.admin.windows import AFTER_PARAMETER, TableAdmin
from django_mq.conf.local_time import local
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    MessageQuerySet,
    QueuedMessage,
    QueueState,
)
from django_mq.policy.column_bounds import MAX_NAME, id_of
from django_mq.queues.dead_letters import OWN_REASONS
from django_mq.queues.reasons import GONE
from django_mq.queues.stalled import line_positions, shown_count
from django_mq.states import MessageState
from django_mq.store import find_messages

#: Counts of messages behind one in the list stop here.
MAX_BEHIND = 100


class QueuedMessageAdmin(
    ExportAdmin, BroadcastingAdmin, SuggestingAdmin, StateCountsAdmin, MessagePageAdmin, TableAdmin
):
    """Messages, the newest first; the list shows no payload."""

    change_list_template = "admin/django_mq/message_list.html"
    exact_lookups = ("id", "queue", "type", "handler", "key", "unique_id", "blocked_by")
    exported = (
        *("id", "queue", "type", "schema_version", "handler", "state", "priority", "key"),
        *("unique_id", "attempts", "max_attempts", "created_at", "processable_after"),
        *("leased_until", "claimed_by", "expires_at", "held_since", "dead_at"),
    )
    exported_privately = ("dead_reason", "last_error", "payload", "metadata")
    list_display: Any = (number, "what", "condition", "where", "tries")
    list_display_links = (number, "what")
    indexed_lookups = ("id", "pk", "blocked_by")
    list_filter = (
        StateFilter,
        MessageQueueFilter,
        TypeFilter,
        HandlerFilter,
        PriorityFilter,
        KeyFilter,
        LastErrorFilter,
        FingerprintFilter,
        WorkerFilter,
        CreatedFilter,
        DueFilter,
        DeadFilter,
    )
    queue_is_indexed = True
    search_fields = ("pk",)
    searched_texts = ("type", "key", "unique_id")
    search_help_text = (
        "Exact id, type, order key or unique id; with the right to see payloads also a value by its"
        " path, such as payload.user.id:7 or metadata.tenant:acme."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the messages with their states, without large or private columns."""
        found = cast(MessageQuerySet, super().get_queryset(request))
        if self.get_queues(request) is not None:
            found = cast(MessageQuerySet, of_queues(Q(), found))
        return found.with_state().defer("payload", "metadata", "retry")

    def found_by_index(self, request: HttpRequest, term: str) -> list[int]:
        """Return the ids of the messages with this id, order key or unique id."""
        found = super().found_by_index(request, term)
        if len(term) > MAX_NAME or read_path(term) is not None:
            return found
        with connections[self.alias].cursor() as cursor:
            return found + find_messages.find(cursor, key=term, unique_id=term, limit=MAX_COUNT + 1)

    def text_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition on a type, or on a value in a document."""
        path = read_path(term)
        if path is None:
            return super().text_condition(request, term)
        if self.may_see_payloads(request) and not path.is_secret:
            return path.condition
        return Q(pk__in=())

    def read_rows(self, request: HttpRequest, found: ChangeList) -> None:
        """Read the messages, their positions in their lines, creation days, counts, and a hint."""
        self._point_to_history(request)
        rows = list(found.result_list)
        known = line_positions([row.pk for row in rows], maximum=MAX_BEHIND, using=self.alias)
        for row in rows:
            row.position = known.get(row.pk)
        found.days = self.days(request)  # type: ignore[attr-defined]  # for the template
        found.state_counts = self.state_counts(request)  # type: ignore[attr-defined]

    def get_sortable_by(self, request: HttpRequest) -> Any:
        """Return the columns that an index sorts by."""
        return (number,)

    def days(self, request: HttpRequest) -> dict[str, Any]:
        """Return the links to periods of creation; none for a user who may see only some queues."""
        if self.get_queues(request) is not None:
            return {}
        every = QueuedMessage.objects.using(self.alias)
        ends = (Subquery(every.order_by(order).values("pk")[:1]) for order in ("pk", "-pk"))
        times = list(every.filter(pk__in=tuple(ends)).values_list("created_at", flat=True))
        period = chosen(request.GET)
        try:
            first, last = (local(pick(times)).date() for pick in (min, max))
            found = within(first, last, period)
        except (ValueError, OverflowError):  # no message, or one of a year that Python lacks
            return {}
        query = request.GET.copy()
        for name in (AFTER_PARAMETER, PAGE_VAR, FROM, TO):
            query.pop(name, None)

        def linked(periods: Iterable[Period]) -> list[tuple[str, str]]:
            return [
                (each.label, f"?{urlencode([*query.items(), *each.parameters.items()])}")
                for each in periods
            ]

        return {
            "any": f"?{query.urlencode()}" if period else "",
            "above": linked(above(period)) if period else (),
            "period": period,
            "within": linked(found),
        }

    def get_list_display(self, request: HttpRequest) -> Any:
        """Return the columns; the last error only for users who may see payloads."""
        columns = super().get_list_display(request)
        return (*columns, "error") if self.may_see_payloads(request) else columns

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, or apply an action to the selected messages."""
        self.check_posted_actions(request)
        context = {
            "queues_url": self.url(QueueState, "changelist"),
            "everything": self.offered_for_all(request),
            "broadcast_url": self.broadcast_url(request),
            "exports": self.export_urls(request),
            "paths_url": self.paths_url(request),
        }
        return super().changelist_view(request, {**context, **(extra_context or {})})

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

    def _point_to_history(self, request: HttpRequest) -> None:
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

    @admin.display(description="message")
    def what(self, message: QueuedMessage) -> Any:
        notes = [breakable(message.handler) if message.handler else "routed at delivery"]
        if message.key:
            notes.append(format_html("key {}", breakable(message.key)))
        return titled(breakable(message.type), *notes)

    @admin.display(description="queue")
    def where(self, message: QueuedMessage) -> Any:
        return format_html('<span class="mq-name">{}</span>', breakable(message.queue))

    @admin.display(description="state")
    def condition(self, message: QueuedMessage) -> Any:
        """Show the state with its time, its worker, or the message it waits behind."""
        notes = [self._detail(message)]
        position = getattr(message, "position", None)
        if position is not None and position.head is None and position.behind:
            count = shown_count(position.behind, MAX_BEHIND)
            notes.append(f"{count} behind it")
        return format_html("{}{}", badge(message.state), notes_below(*notes))

    def _detail(self, message: QueuedMessage) -> Any:
        now = message.now  # type: ignore[attr-defined]  # annotated
        state = message.state
        if state == MessageState.DEAD and message.dead_at is not None:
            expired = message.dead_reason == MessageState.EXPIRED
            return when(message.dead_at, now, "expired {}" if expired else "{}")
        if message.leased_until is not None:
            lease = when(message.leased_until, now, "lease ends {}")
            if message.leased_until <= now:
                lease = when(message.leased_until, now, "lease lapsed {}")
            return format_html("{}<br><code>{}</code>", lease, message.claimed_by)
        position = getattr(message, "position", None)
        behind = position.waits_for if position is not None else None
        if behind is not None and state in (MessageState.BLOCKED, MessageState.PROCESSABLE):
            return format_html("behind {}", self.message_link(behind))
        if state == MessageState.BLOCKED:
            return "now first of its key, freed soon"
        if state == MessageState.HELD and message.held_since is not None:
            return when(message.held_since, now)
        if state == MessageState.EXPIRED and message.expires_at is not None:
            return when(message.expires_at, now)
        return when(message.processable_after, now, "due {}")

    @admin.display(description="attempts")
    def tries(self, message: QueuedMessage) -> Any:
        return format_html(
            '<span class="mq-number">{} / {}</span>', message.attempts, message.max_attempts
        )

    @admin.display(description="last error", empty_value="")
    def error(self, message: QueuedMessage) -> Any:
        """Show the last error, or the reason a handler gave for the dead letter."""
        reason = message.dead_reason
        text = message.last_error if reason in OWN_REASONS or not reason else reason
        return format_html('<span class="mq-error">{}</span>', excerpt(text)) if text else None
