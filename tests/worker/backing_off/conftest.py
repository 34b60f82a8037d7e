"""A queue whose handlers depend on a service, and the fleet's reaction when that fails."""

from __future__ import annotations

import threading
from typing import Any

from django_mq import RetryPolicy, fixed
from django_mq.models import QueueState
from tests.worker.conftest import Said

#: Failed attempts are due again at once: only the queue's backoff holds them.
AT_ONCE = RetryPolicy(max_attempts=1000, backoff=fixed(0))
#: No test waits for the end of it.
LONG = {"multiplier": 1000, "maximum": 1000, "jitter": 0}


def backing_off(settings: Any, multiplier: float = 0.15, **options: Any) -> None:
    """Let queue `mail` back off: 2, 4, 8 ... `multiplier`s."""
    backoff = {"multiplier": multiplier, "maximum": 100 * multiplier, "jitter": 0}
    queue = {"backoff": backoff, **options.pop("mail", {})}
    settings.DJANGO_MQ = {"LEASE": 300, **options, "QUEUES": {"mail": queue}}


def level() -> int:
    state = QueueState.objects.filter(queue="mail").first()
    return state.backoff_level if state else 0


def changes(said: Said) -> list[tuple[str, int]]:
    """The signals about backoffs, with the new levels."""
    return [(name, data["level"]) for name, _, data in said.all if name.startswith("backoff_")]


def rest(seconds: float) -> None:
    """Wait where no signal comes, since nothing happens."""
    threading.Event().wait(seconds)
