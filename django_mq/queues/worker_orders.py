"""Orders to worker processes: claim nothing more, claim again, or finish what runs and end."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from django_mq.conf import alias_of
from django_mq.models import WorkerCommand
from django_mq.policy.names import check_name
from django_mq.queues.arguments import names_in, operator_name
from django_mq.queues.transactions import after_commit, writing
from django_mq.store import commands

logger = logging.getLogger("django_mq")

#: The id of one worker process, as `workers()` has it, or several.
WorkerIds = str | Iterable[str]


def quiet_workers(workers: WorkerIds, *, by: str = "", using: str | None = None) -> tuple[str, ...]:
    """Tell worker processes to claim nothing more; return those that are alive and were told.

    A quiet worker finishes what runs, releases what it has claimed but not started, and gives up
    its ordered queues. It stays alive: it renews leases, does chores, fires schedules, and carries
    out operations, until `resume_workers()` or `stop_workers()`. If its process dies, its
    supervisor replaces it by a quiet one.

    A worker obeys within about a second, or within a heartbeat (10 s) without LISTEN. `by` names
    the operator, for the log.
    """
    return _order("quiet", "worker_quiet_asked", workers, by, using)


def resume_workers(
    workers: WorkerIds, *, by: str = "", using: str | None = None
) -> tuple[str, ...]:
    """Tell quiet worker processes to claim again; return those that are alive and were told."""
    return _order("resume", "worker_resume_asked", workers, by, using)


def stop_workers(workers: WorkerIds, *, by: str = "", using: str | None = None) -> tuple[str, ...]:
    """Tell worker processes to drain and end; return those that are alive and were told.

    Each is one process: its supervisor does not replace it, and goes on with its other processes.
    When the last one has ended, `mq_worker` ends too, with exit code 0, or 5 if a drain ran out of
    time. A service manager that restarts every service that ends will start it again: use
    `quiet_workers()` there.
    """
    return _order("leave", "worker_stop_asked", workers, by, using)


def worker_orders(worker: str, *, using: str | None = None) -> list[WorkerCommand]:
    """Return the orders to a worker process in the last hour, the latest first; at most 10.

    `taken_at` is None until the worker has read the order.
    """
    check_name(worker, "worker")
    found = WorkerCommand.objects.using(alias_of(using))
    return list(found.filter(worker=worker, message_id__isnull=True).order_by("-id")[:10])


def _order(
    action: str, event: str, workers: WorkerIds, by: str, using: str | None
) -> tuple[str, ...]:
    wanted = sorted(set(names_in(workers, "worker")))
    name, alias = operator_name(by), alias_of(using)
    with writing(alias) as cursor:
        told = commands.order(cursor, workers=wanted, action=action, by=name)
    if told:
        after_commit(
            alias,
            lambda: logger.info(
                "told workers to %s: %s, by %s",
                "stop" if action == "leave" else action,
                ", ".join(told),
                name or "an operator",
                extra={"event": event, "workers": told, "by": name},
            ),
        )
    return tuple(told)
