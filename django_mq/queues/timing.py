"""What the handlers of the fleet did, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db.models.functions import Now

from django_mq.models import WorkerHeartbeat
from django_mq.queues.connecting import alias_of
from django_mq.states import GONE_AFTER
from django_mq.timing import HandlerTimings, Tally


def timings(*, worker: str | None = None, using: str | None = None) -> dict[str, HandlerTimings]:
    """Return what each handler did in all workers that live, or in one `worker`; by name.

    Counted since each worker was started, as of its last heartbeat, so up to 10 s old; a worker
    that ended takes its numbers along. The empty name is for messages without a handler, or with
    one that their worker did not know.
    """
    beats = WorkerHeartbeat.objects.using(alias_of(using)).order_by("-last_seen", "pk")
    if worker is None:
        beats = beats.filter(last_seen__gt=Now() - GONE_AFTER)
    else:
        beats = beats.filter(pk=worker)
    return added_up(beats.values_list("timings", flat=True))


def added_up(said: Iterable[object]) -> dict[str, HandlerTimings]:
    """Return the timings by handler of heartbeats, the latest first.

    What no worker of this version would write is left out: rows are written by others, too.

    >>> added_up([{"mail": {"acked": "many"}}, None])
    {}
    """
    tallies: dict[str, Tally] = {}
    for each in said:
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
