"""Counts and durations by handler, from the heartbeats of the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db.models.functions import Now

from django_mq.models import WorkerHeartbeat
from django_mq.policy.handler_stats import HandlerTimings, Tally
from django_mq.queues.transactions import alias_of
from django_mq.states import GONE_AFTER


def timings(*, worker: str | None = None, using: str | None = None) -> dict[str, HandlerTimings]:
    """Return counts and durations by handler name, over all live workers or for one `worker`.

    The numbers cover the time since each worker started, as of its last heartbeat, so they are
    up to 10 s old; a worker that ends takes its numbers along. The empty name stands for messages
    without a handler, or with one that their worker did not know.
    """
    if worker is not None and not (isinstance(worker, str) and worker and worker.isprintable()):
        raise ValueError(f"worker must be the id of a worker, as workers() has it, not {worker!r}")
    beats = WorkerHeartbeat.objects.using(alias_of(using)).order_by("-last_seen", "pk")
    if worker is None:
        beats = beats.filter(last_seen__gt=Now() - GONE_AFTER)
    else:
        beats = beats.filter(pk=worker)
    return added_up(beats.values_list("timings", flat=True))


def added_up(columns: Iterable[object]) -> dict[str, HandlerTimings]:
    """Merge the `timings` columns of heartbeats, the latest first, into timings by handler.

    Skips values that no worker of this version writes: other clients may write rows, too.

    >>> added_up([{"mail": {"acked": "many"}}, None])
    {}
    """
    tallies: dict[str, Tally] = {}
    for each in columns:
        for handler, written in each.items() if isinstance(each, Mapping) else ():
            try:
                tally = Tally.from_json(written)
            except ValueError:
                continue
            if handler in tallies:
                tallies[handler].merge(tally)
            else:
                tallies[handler] = tally
    return {name: tallies[name].timings(name) for name in sorted(tallies)}
