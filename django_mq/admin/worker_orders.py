"""Orders to a worker process: be quiet, resume, stop. Each is confirmed or undoable, and logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import LOCKED, TookTooLong, writing
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import operator
from django_mq.models import WorkerCommand, WorkerHeartbeat


class WorkerOrder(NamedTuple):
    """An order: its function, its button, the entry of the log, and the question, if any."""

    give: Callable[..., tuple[str, ...]]
    label: str
    note: str
    question: str = ""


ORDERS = {
    "quiet": WorkerOrder(
        queues.quiet_workers, "Quiet", "Told to claim nothing more.", "Quiet this worker?"
    ),
    "resume": WorkerOrder(queues.resume_workers, "Resume", "Told to claim again."),
    "stop": WorkerOrder(
        queues.stop_workers, "Stop", "Told to drain and stop.", "Stop this worker?"
    ),
}
#: The labels of the actions under which orders are stored.
STORED_LABELS = {
    WorkerCommand.CommandAction.QUIET.value: ORDERS["quiet"].label,
    WorkerCommand.CommandAction.RESUME.value: ORDERS["resume"].label,
    WorkerCommand.CommandAction.LEAVE.value: ORDERS["stop"].label,
}
#: The number of queues that the confirmation names because no other worker claims from them.
MAX_QUEUES = 10


class WorkerOrdersAdmin(ReadOnlyAdmin):
    """The view to which the buttons of the list and of a worker's page post."""

    def may_order(self, request: HttpRequest, worker: queues.WorkerProcess) -> bool:
        """Return whether the user may give orders to this worker.

        A user restricted to some queues may do so if the worker serves only these, each by its
        name.
        """
        if not (self.has_view_permission(request) and self._has_right(request, "stop_worker")):
            return False
        allowed = self.get_queues(request)
        return allowed is None or (bool(worker.queues) and set(worker.queues) <= set(allowed))

    def orders(
        self, request: HttpRequest, worker: queues.WorkerProcess
    ) -> list[tuple[str, str, str]]:
        """Return the orders that the user may give to this worker now: name, label, URL."""
        if not worker.alive or worker.draining or not self.may_order(request, worker):
            return []
        names = ("resume" if worker.quiet else "quiet", "stop")
        return [
            (
                name,
                ORDERS[name].label + ("…" if ORDERS[name].question else ""),
                self.url(WorkerHeartbeat, "order", name),
            )
            for name in names
        ]

    @own_page(WorkerHeartbeat, "order", "orders/<str:name>/")
    def order_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Give the posted worker the order `name`, after confirmation if it needs one."""
        if name not in ORDERS:
            raise Http404
        listed = HttpResponseRedirect(self.url(WorkerHeartbeat, "changelist"))
        if request.method != "POST":
            return listed
        if not self._has_right(request, "stop_worker"):
            raise PermissionDenied
        known = queues.workers(using=self.alias)
        worker = next((each for each in known if each.id == request.POST.get("worker")), None)
        if worker is None or not self.get_queryset(request).filter(pk=worker.id).exists():
            self.message_user(request, "This worker has ended.", notices.WARNING)
            return listed
        if not self.may_order(request, worker):
            raise PermissionDenied
        if ORDERS[name].question and "confirmed" not in request.POST:
            return self._confirm(request, name, worker, known)
        self._give(request, name, worker)
        if "page" in request.POST:
            return HttpResponseRedirect(self.url(WorkerHeartbeat, "change", worker.id))
        return listed

    def _give(self, request: HttpRequest, name: str, worker: queues.WorkerProcess) -> None:
        """Give the order, log the user in the same transaction, and report the order."""
        order = ORDERS[name]
        try:
            with writing(self.alias):
                told = order.give(worker.id, by=operator(request), using=self.alias)
                if told:
                    row = WorkerHeartbeat(pk=worker.id, host=worker.host, pid=worker.pid)
                    self.log(request, [row], CHANGE, order.note)
        except TookTooLong:
            self.message_user(request, LOCKED, notices.ERROR)
            return
        if told:
            text = "The worker was told. It obeys within a second, or without LISTEN within ten."
            self.message_user(request, text, notices.SUCCESS)
        else:
            self.message_user(request, "This worker is not alive.", notices.WARNING)

    def _confirm(
        self,
        request: HttpRequest,
        name: str,
        worker: queues.WorkerProcess,
        known: Sequence[queues.WorkerProcess],
    ) -> HttpResponse:
        """Ask for confirmation; name the queues from which no other worker claims."""
        others = [each for each in known if each.id != worker.id and each.claims]
        alone = [
            queue
            for queue in self.seen_queues(request)
            if worker.serves(queue) and not any(each.serves(queue) for each in others)
        ]
        page = "page" in request.POST
        return self.show_page(
            request,
            "worker_order",
            ORDERS[name].question,
            order=name,
            label=ORDERS[name].label,
            worker=worker,
            running=len(worker.running),
            alone=alone[:MAX_QUEUES],
            more=max(0, len(alone) - MAX_QUEUES),
            on_page=page,
            url=self.url(WorkerHeartbeat, "order", name),
            back=self.url(WorkerHeartbeat, "change", worker.id)
            if page
            else self.url(WorkerHeartbeat, "changelist"),
        )
