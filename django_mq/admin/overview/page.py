"""The overview as a page of its own and at the top of the app's index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import connections
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from django_mq import queues
from django_mq.admin.bounds import TookTooLong, limited_statements, reporting_timeouts
from django_mq.admin.overview.charts import charts
from django_mq.admin.overview.panels import (
    STEP_LABELS,
    OverviewRow,
    handler_rows,
    overview_rows,
    state_tiles,
    step_rows,
    workers_panel,
)
from django_mq.admin.queue_rows import COLUMNS, QueueRowsAdmin
from django_mq.admin.state_counts import MAX_QUEUES
from django_mq.admin.texts import clock, excerpt
from django_mq.models import (
    FailedAttempt,
    QueuedMessage,
    QueueState,
    Schedule,
    WorkerHeartbeat,
)
from django_mq.policy.figures import SPANS, Span
from django_mq.queues.figures import figures_of, rates_of
from django_mq.queues.known_queues import read_names
from django_mq.queues.message_counts import read_many_counts
from django_mq.store import read_figures
from django_mq.store.readers import prepare_to_read

#: The maximum numbers of queues, handlers, error classes and schedules that are listed.
LISTED, HANDLERS, ERRORS, SCHEDULES = 50, 25, 5, 5
#: The number of newest failed attempts, and of newest dead letters, that are counted.
NEWEST = 5000
SPAN_NAMES = {"hour": "Hour", "day": "Day", "week": "Week"}


class OverviewAdmin(QueueRowsAdmin):
    """The overview, for users who may see the queues."""

    def get_urls(self) -> list[Any]:
        """Return only the address of the page, since its model has no rows to show."""
        return [self.page(self.model, "changelist", "", self.changelist_view)]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._has_right(request, "view_queuestate")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page or, with `?part=live`, its changing part."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        if request.GET.get("part") == "live":
            return HttpResponse(self.live(request))
        return self.show_page(
            request,
            "overview",
            "Overview",
            is_list=True,
            overview=self.section(request),
            **(extra_context or {}),
        )

    def section(self, request: HttpRequest) -> SafeString:
        """Return the overview as HTML, for any page; empty if the user may not see it."""
        if not self.has_view_permission(request):
            return SafeString("")
        context = {
            "live": self.live(request),
            "span": _span(request).name,
            "url": self.url(self.model, "changelist"),
            "pages": self._pages(request),
        }
        return render_to_string("admin/django_mq/includes/overview.html", context, request)

    def _pages(self, request: HttpRequest) -> list[tuple[str, str]]:
        """Return the pages that no model lists, if the user may see them."""
        pages = (
            ("Errors in groups", FailedAttempt, "errors", "view_failedattempt"),
            ("Types and handlers", QueueState, "topology", "view_queuestate"),
            ("Broadcast a message", QueuedMessage, "broadcast", "broadcast_message"),
        )
        return [
            (label, self.url(model, page))
            for label, model, page, right in pages
            if self._has_right(request, right) and self.admin_site.is_registered(model)
        ]

    def live(self, request: HttpRequest) -> SafeString:
        """Return the changing part of the page as HTML."""
        try:
            with reporting_timeouts():
                context = self._read(request)
        except TookTooLong:
            context = {"too_slow": True}
        return render_to_string("admin/django_mq/includes/overview_live.html", context, request)

    def _read(self, request: HttpRequest) -> dict[str, Any]:
        allowed = self.get_queues(request)
        wanted = None if allowed is None else sorted(allowed)
        span = _span(request)
        with limited_statements(self.alias), connections[self.alias].cursor() as cursor:
            prepare_to_read(cursor)
            names = [name for name in read_names(cursor) if self.may_see(request, name)]
            counts, maximum = read_many_counts(cursor, names[:MAX_QUEUES])
            new = read_figures.uncounted(cursor, queues=wanted)
            figures = figures_of(cursor, span, new, wanted)
            rates = rates_of(cursor, new, wanted)
            workers = queues.workers(using=self.alias)
            more = {
                **self._failures(request, names),
                "schedules": self._schedules(request) if allowed is None else [],
            }
        if allowed is not None:
            workers = [each for each in workers if any(each.serves(name) for name in allowed)]
        listed = overview_rows(self.rows(request, counts.values(), workers), rates)
        may_see_workers = self._has_right(request, "view_workerheartbeat")
        workers_url = self.url(WorkerHeartbeat, "changelist") if may_see_workers else ""
        return {
            "tiles": state_tiles(
                counts.values(),
                {name: self.messages_url(request, state=name) for name, _label in COLUMNS},
            ),
            "maximum": f"{maximum:,}",
            "queues_url": self.url(QueueState, "changelist"),
            "workers": workers_panel(workers, workers_url),
            **_listed(listed, len(names)),
            **_shown(figures),
            **more,
        }

    def _failures(self, request: HttpRequest, names: Collection[str]) -> dict[str, Any]:
        """Return the failed attempts of the last hour by class, and the messages that died."""
        hour_ago = Now() - timedelta(hours=1)
        attempts = self.scoped(request, FailedAttempt.objects.using(self.alias))
        attempts = attempts.filter(ended_at__gte=hour_ago)
        classes = attempts.order_by("-ended_at").values_list("error_class", flat=True)
        found = Counter(classes[: NEWEST + 1])
        dead = QueuedMessage.objects.using(self.alias).filter(
            queue__in=names, dead_at__gte=hour_ago, dead_at__isnull=False
        )
        died = len(dead.values_list("pk", flat=True)[: NEWEST + 1])
        linked = self._has_right(request, "view_failedattempt")
        return {
            "failed": _at_most(sum(found.values())),
            "died": _at_most(died),
            "dead_url": self.messages_url(request, state="dead"),
            "attempts_url": self.url(FailedAttempt, "changelist") if linked else "",
            "errors": [
                (
                    excerpt(name) or "without a class",
                    f"{times:,}",
                    self.url(FailedAttempt, "changelist", error_class=name)
                    if linked and name
                    else "",
                )
                for name, times in found.most_common(ERRORS)
            ],
        }

    def _schedules(self, request: HttpRequest) -> list[tuple[str, str, str]]:
        """Return the schedules whose last time failed: name, error, page."""
        if not self._has_right(request, "view_schedule"):
            return []
        failing = Schedule.objects.using(self.alias).exclude(last_error="").order_by("name")
        texts = self.may_see_payloads(request)
        return [
            (name, excerpt(error) if texts else "", self.url(Schedule, "change", name))
            for name, error in failing.values_list("name", "last_error")[:SCHEDULES]
        ]


def _span(request: HttpRequest) -> Span:
    return SPANS.get(request.GET.get("span", ""), SPANS["hour"])


def _listed(rows: Sequence[OverviewRow], known: int) -> dict[str, Any]:
    """Return the queues that are listed, the idle ones apart, and the number of other queues."""
    busy = [row for row in rows if not row.is_idle][:LISTED]
    idle = [row for row in rows if row.is_idle][:LISTED]
    return {"busy": busy, "idle": idle, "more_queues": known - len(busy) - len(idle)}


def _shown(figures: queues.Figures) -> dict[str, Any]:
    """Return the charts, the same data as a table, and the handlers."""
    handlers, more_handlers = handler_rows(figures, HANDLERS)
    return {
        "span": figures.span,
        "span_name": SPAN_NAMES[figures.span],
        "spans": SPAN_NAMES,
        "now": clock(figures.now),
        "charts": charts(figures),
        "steps": step_rows(figures),
        "step_labels": STEP_LABELS,
        "handlers": handlers,
        "more_handlers": more_handlers,
    }


def _at_most(count: int) -> str:
    return f"{min(count, NEWEST):,}{'+' if count > NEWEST else ''}"
