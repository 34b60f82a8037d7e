"""The list of messages, and the parts of which its admin consists.

In the order in which Python looks up a method:

- `ExportAdmin` (`exports.py`): exports all messages that match
- `BroadcastingAdmin` (`broadcasting.py`): the form that broadcasts a message
- `SuggestingAdmin` (`suggesting.py`): the paths that the search box suggests
- `StateCountsAdmin` (`state_counts.py`): the counts above the list
- `MessageColumnsAdmin` (`message_columns.py`): the columns of the list
- `AbsentMessagesAdmin` (`absent_messages.py`): what became of a message that is not stored
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

from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.db import connections
from django.db.models import Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse

from django_mq.admin.absent_messages import AbsentMessagesAdmin
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
from django_mq.admin.message_columns import MAX_BEHIND, MessageColumnsAdmin
from django_mq.admin.message_page import MessagePageAdmin
from django_mq.admin.state_counts import StateCountsAdmin
from django_mq.admin.suggesting import SuggestingAdmin
from django_mq.admin.texts import number
from django_mq.admin.windows import AFTER_PARAMETER, TableAdmin
from django_mq.conf.local_time import local
from django_mq.models import (
    MessageQuerySet,
    QueuedMessage,
    QueueState,
)
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.queues.stalled import line_positions
from django_mq.store import find_messages


class QueuedMessageAdmin(
    ExportAdmin,
    BroadcastingAdmin,
    SuggestingAdmin,
    StateCountsAdmin,
    MessageColumnsAdmin,
    AbsentMessagesAdmin,
    MessagePageAdmin,
    TableAdmin,
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
        self.point_to_history(request)
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
