"""What a heartbeat says about its worker process."""

from __future__ import annotations

import os
import socket
from typing import Any

from django_mq.conf.version import VERSION
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.scoreboard import Scoreboard
from django_mq.store.leases import Capacity
from django_mq.worker.listener import Listener
from django_mq.worker.worker_options import WorkerOptions


def heartbeat(
    worker: WorkerOptions,
    *,
    local_queue: LocalQueue,
    scoreboard: Scoreboard,
    listener: Listener | None,
) -> dict[str, Any]:
    """Return the columns of the next heartbeat of `worker`."""
    return {
        "queues": worker.queues,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": VERSION,
        "wakeup": "poll" if not listener else "degraded" if listener.degraded() else "notify",
        "draining": worker.stopping.is_set(),
        "quiet": worker.orders.quiet,
        "running": scoreboard.running_for(),
        "capacity": _capacity(worker, local_queue),
    }


def _capacity(worker: WorkerOptions, local_queue: LocalQueue) -> Capacity:
    free, taken = local_queue.free.mean(), local_queue.slots.taken.mean()
    return Capacity(
        threads=worker.threads,
        threads_used=None if free is None else round(max(0.0, worker.threads - free), 2),
        slots=worker.async_slots,
        slots_used=None if taken is None else round(max(0.0, taken), 2),
    )
