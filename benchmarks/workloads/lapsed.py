"""A message whose worker is gone, behind a backlog: how long after its lease is it taken over?

The row is stored as that worker would have left it, claimed and with a short lease, while the
worker under measurement (default settings) works on the backlog. It must still be at it when the
row is taken, else the measurement says nothing.
"""

from __future__ import annotations

from statistics import median
from time import monotonic

from benchmarks.app.handlers import QUEUE
from benchmarks.database import check
from benchmarks.report import Row, limited
from benchmarks.workers import Worker, until_empty
from benchmarks.workloads import Bench

# Due after all of the backlog: by its due time it would be the last.
LEAVE_BEHIND = """
insert into django_mq_queuedmessage
       (queue, type, handler, payload, processable_after, attempts, claimed_by, leased_until)
values (%s, 'bench.timed', 'bench.timed', '{}', statement_timestamp(), 1, 'gone:1',
        statement_timestamp() + %s * interval '1 second')
returning id
"""


def run(bench: Bench) -> list[Row]:
    """Seconds from the end of the lease to the start of the handler: the worst round."""
    backlog = bench.size(200_000, 60_000)
    lease = 2.0 if backlog > 100_000 else 0.3
    waits = [_wait(bench, backlog, lease) for _ in bench.in_turn("lapsed")]
    return [
        limited(
            "lapsed",
            max(waits),
            "s",
            at_most=1.0,
            note=f"after its lease, worst of {len(waits)} rounds (median {median(waits):.2f}),"
            f" behind {backlog:,} messages",
        )
    ]


def _wait(bench: Bench, backlog: int, lease: float) -> float:
    database = bench.database
    database.clear()
    database.fill(backlog)
    database.settle()
    due = database.ids()
    with Worker(database, expected=backlog) as worker:
        worker.until_alive()
        ((id,),) = database.execute(LEAVE_BEHIND, (QUEUE, lease))
        lapses_at = monotonic() + lease
        until_empty(database, 600)
        seen = worker.stop()
    check(len(seen.ids) == backlog and set(seen.ids) == due, "the backlog was not handled once")
    check(seen.starts[id] < seen.end, "the backlog ended before the lapsed message was taken")
    check(seen.starts[id] > lapses_at - 0.05, "the message was taken before its lease ended")
    return seen.starts[id] - lapses_at
