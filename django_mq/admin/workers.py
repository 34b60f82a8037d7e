"""The worker processes: their state, queues, running messages and orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from django_mq import queues
from django_mq.admin.bounds import limited
from django_mq.admin.handler_timings import timing_rows
from django_mq.admin.texts import badge, excerpt, link, moment_column, moment_text, when
from django_mq.admin.worker_orders import STORED_LABELS, WorkerOrdersAdmin
from django_mq.models import QueuedMessage, WorkerHeartbeat
from django_mq.policy.durations import span
from django_mq.states import MessageState

#: The maximum number of running messages listed for one worker.
LISTED = 20


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as the page shows it to this user."""

    worker: queues.WorkerProcess
    url: str
    queues: tuple[str, ...]
    #: Running messages; the type is empty if the message has ended since.
    running: list[dict[str, Any]]
    more: int
    orders: tuple[tuple[str, str, str], ...] = ()

    @property
    def badge(self) -> Any:
        if not self.worker.alive:
            return badge(MessageState.DEAD, "gone")
        if self.worker.unreadable:
            return badge(MessageState.HELD, "unreadable")
        if self.worker.draining:
            return badge(MessageState.DELAYED, "draining")
        if self.worker.quiet:
            return badge(MessageState.PAUSED, "quiet")
        if self.worker.running:
            return badge(MessageState.RUNNING, "working")
        return badge(MessageState.PROCESSABLE, "waiting")

    @property
    def serves(self) -> str:
        """The readable names of its queues."""
        names = ", ".join(self.queues)
        if "queues" in self.worker.unreadable:
            return f"{names} (others are unreadable)".strip()
        return "all" if names in ("", "#") else names  # a worker without --queue stores #

    @property
    def in_use(self) -> str:
        """How many of its threads and slots were in use; empty if that is not known."""
        worker = self.worker
        pairs = (
            ("threads", worker.threads_used, worker.threads),
            ("slots", worker.slots_used, worker.slots),
        )
        known = [
            f"{_rounded(used)} of {count:,} {name}"
            for name, used, count in pairs
            if used is not None and count is not None
        ]
        return f"{' and '.join(known)}, on average between its last two heartbeats" if known else ""

    @property
    def is_degraded(self) -> bool:
        return self.worker.wakeup == "degraded"

    @property
    def silent(self) -> str:
        return span(self.worker.silent)

    @property
    def uptime(self) -> str:
        return span(self.worker.uptime)

    @property
    def started(self) -> str:
        return moment_text(self.worker.started_at)


class WorkerHeartbeatAdmin(WorkerOrdersAdmin):
    """The worker processes as of their last heartbeats."""

    change_form_template = "admin/django_mq/worker.html"

    queue_field = None

    def scoped(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Filter rows to the workers that serve one of the user's queues."""
        if self.get_queues(request) is None:
            return queryset
        return queryset.filter(pk__in=[each.id for each in self._visible(request)])

    @limited
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one row per worker."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        rows = self._rows(request, self._visible(request))
        found = queues.timings(using=self.alias).values()
        return self.show_page(
            request,
            "worker_list",
            "Workers",
            is_list=True,
            rows=rows,
            may_order=any(row.orders for row in rows),
            timings=timing_rows(found, self.get_queues(request)),
            **(extra_context or {}),
        )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = (
            "condition",
            "host",
            "process",
            "version",
            "wakeup",
            "serves",
            "runs",
            "in_use",
            "handler_timings",
        )
        return [(None, {"fields": [*fields, "started", "seen", "recent_orders"]})]

    @limited
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the worker with the buttons of the orders that it can be given."""
        found = [each for each in self._visible(request) if each.id == unquote(object_id)]
        orders = self.orders(request, found[0]) if found else []
        context = {"orders": orders, **(extra_context or {})}
        return super().change_view(request, object_id, form_url, context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the heartbeat with its row and its handlers' numbers."""
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            same = [each for each in self._visible(request) if each.id == found.pk]
            found.row = next(iter(self._rows(request, same)), None)
            did = queues.timings(worker=found.pk, using=self.alias).values()
            found.timings_seen = timing_rows(did, self.get_queues(request))
        return found

    @admin.display(description="state")
    def condition(self, beat: Any) -> Any:
        return beat.row.badge if beat.row else None

    @admin.display(description="process id")
    def process(self, beat: Any) -> Any:
        """Show it without thousands separators."""
        return str(beat.pid)

    @admin.display(description="queues")
    def serves(self, beat: Any) -> Any:
        return beat.row.serves if beat.row else None

    @admin.display(description="running")
    def runs(self, beat: Any) -> Any:
        if not beat.row:
            return None
        running = ((link(each["url"], f"#{each['id']}"), each["type"]) for each in beat.row.running)
        return format_html_join(", ", "{} {}", running)

    @admin.display(description="in use")
    def in_use(self, beat: Any) -> Any:
        return (beat.row.in_use or None) if beat.row else None

    @admin.display(description="handler timings")
    def handler_timings(self, beat: Any) -> Any:
        if not beat.timings_seen:
            return None
        context = {"timings": beat.timings_seen}
        return render_to_string("admin/django_mq/includes/timings.html", context)

    started = moment_column("started_at", "started")
    seen = moment_column("last_seen", "last seen")

    @admin.display(description="orders in the last hour")
    def recent_orders(self, beat: Any) -> Any:
        """Show the orders of operators, and whether the worker has read them."""
        rows = (
            (
                STORED_LABELS.get(each.action, each.action),
                f" by {excerpt(each.asked_by)}" if each.asked_by else "",
                when(each.asked_at, beat.now),
                "" if each.taken_at else ", not read yet",
            )
            for each in queues.worker_orders(beat.pk, using=self.alias)
        )
        return format_html_join(SafeString("<br>"), "{}{} {}{}", rows) or None

    def _visible(self, request: HttpRequest) -> list[queues.WorkerProcess]:
        allowed = self.get_queues(request)
        found = queues.workers(using=self.alias)
        if allowed is None:
            return found
        return [each for each in found if any(each.serves(queue) for queue in allowed)]

    def _rows(
        self, request: HttpRequest, workers: Iterable[queues.WorkerProcess]
    ) -> list[WorkerRow]:
        """Return the rows, without queues and messages that the user may not see."""
        workers = list(workers)
        allowed = self.get_queues(request)
        listed = {id for worker in workers for id in worker.running[:LISTED] if id > 0}
        messages = self.scoped_messages(request).filter(pk__in=listed)
        ran = {each.id: each.ran_for for each in queues.running(ids=listed, using=self.alias)}
        types = dict(messages.values_list("pk", "type") if listed else ())
        rows = []
        for worker in workers:
            ids = [id for id in worker.running if allowed is None or id in types]
            rows.append(
                WorkerRow(
                    worker,
                    self.url(WorkerHeartbeat, "change", worker.id),
                    worker.queues
                    if allowed is None
                    else tuple(sorted(queue for queue in allowed if worker.serves(queue))),
                    [
                        {
                            "id": id,
                            "type": types.get(id, ""),
                            "url": self.message_url(request, id),
                            "ran_for": span(since) if (since := ran.get(id)) else "",
                        }
                        for id in ids[:LISTED]
                    ],
                    max(0, len(ids) - LISTED),
                    tuple(self.orders(request, worker)),
                )
            )
        return rows

    def scoped_messages(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the messages that the user may see."""
        found = QueuedMessage.objects.using(self.alias)
        if not self.may_see_messages(request):
            return found.none()
        allowed = self.get_queues(request)
        return found if allowed is None else found.filter(queue__in=list(allowed))


def _rounded(used: float) -> str:
    """Return a number with three digits.

    >>> [_rounded(used) for used in (0.0, 0.25, 3.484, 99.96, 1234.5)]
    ['0', '0.25', '3.48', '100', '1,234']
    """
    return f"{used:,.0f}" if used >= 100 else f"{used:.3g}"
