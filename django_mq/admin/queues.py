"""The list of queues and the page of one: counts, workers, handlers, pause and limits."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import messages as notices
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from django_mq import handlers, queues
from django_mq.admin.bounds import limited
from django_mq.admin.decisions import QueueDecisionsAdmin
from django_mq.admin.handler_timings import timing_rows
from django_mq.admin.queue_rows import COLUMNS
from django_mq.admin.texts import clock, excerpt
from django_mq.admin.topology import TopologyAdmin
from django_mq.conf import get_settings
from django_mq.models import QueueState
from django_mq.queues.message_counts import read_many_counts
from django_mq.queues.transactions import reading
from django_mq.store.queue_names import CHORES_ROW

#: The maximum number of heads on the page of a queue.
MAX_HEADS = 50
#: Queues on a page of their list.
PER_PAGE = 100


class QueueStateAdmin(QueueDecisionsAdmin, TopologyAdmin):
    """All known queues, with or without a row."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of queues, without the row that has the turn of the chores."""
        return super().get_queryset(request).exclude(pk=CHORES_ROW)

    @limited
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one row per queue, page by page; only the queues of the page are counted.

        A search finds queues by any part of their names.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        query = request.GET.get("q", "").strip()
        wanted = query.lower()
        seen = [name for name in self.seen_queues(request) if wanted in name.lower()]
        page = Paginator(seen, PER_PAGE).get_page(request.GET.get("page"))
        asked = list(page.object_list)
        with reading(self.alias) as cursor:
            found, maximum = read_many_counts(cursor, asked)
        return self.show_page(
            request,
            "queue_list",
            "Queues",
            is_list=True,
            rows=self.rows(request, found.values()),
            page=page,
            columns=COLUMNS,
            maximum=f"{maximum:,}",
            query=query,
            may_pause_query=self.may_change(request) and self.may_name(request, query),
            other_pages="" if not query else f"{urlencode({'q': query})}&",
            topology_url=self.url(QueueState, "topology"),
            **self.form_context(request),
            **(extra_context or {}),
        )

    @limited
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one queue, with or without a row."""
        if request.method == "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        queue = unquote(object_id)
        if not self.knows(request, queue) and not self._has_row(request, queue):
            text = f"Queue {excerpt(queue)} is not known."
            self.message_user(request, text, notices.WARNING)
            return HttpResponseRedirect(self.url(QueueState, "changelist"))
        (row,) = self.rows(request, [queues.counts(queue, using=self.alias)])
        state = queues.state(queue, using=self.alias)
        heads = queues.heads(queue, limit=MAX_HEADS + 1, using=self.alias)
        return self.show_page(
            request,
            "queue",
            queue,
            row=row,
            heads=self.head_rows(request, heads[:MAX_HEADS]),
            more_heads=len(heads) > MAX_HEADS,
            blocked_url=self.messages_url(request, queue=queue, state="blocked"),
            state=state,
            times=_clock_times(state, row.counts),
            options=get_settings().queue(queue),
            handlers=_handlers_of(queue),
            timings=timing_rows(queues.timings(using=self.alias).values(), [queue]),
            history_url=self.url(QueueState, "history", queue),
            messages_url=self.messages_url(request, queue=queue),
            **self.form_context(request),
            **(extra_context or {}),
        )

    def _has_row(self, request: HttpRequest, queue: str) -> bool:
        """Return whether a row records a decision about the queue."""
        return (
            self.may_name(request, queue) and self.get_queryset(request).filter(pk=queue).exists()
        )

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the queue for its history page, even if it has no row."""
        if found := super().get_object(request, object_id, from_field):
            return found
        return QueueState(queue=object_id) if self.knows(request, object_id) else None


def _handlers_of(queue: str) -> list[handlers.Handler]:
    settings = get_settings()
    found = handlers.all_handlers()
    return [each for each in found if queue in handlers.allowed_queues(each, settings)]


def _clock_times(state: queues.State, counts: queues.QueueCounts) -> dict[str, str]:
    """Return what the page says about the queue's next moments, without those that it lacks."""
    times = {"due": state.at, "owned": counts.owned_until, "backoff": counts.backoff_until}
    return {name: clock(at) for name, at in times.items() if at is not None}
