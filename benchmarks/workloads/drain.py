"""Draining no-op messages: a worker with default settings, against the bare loop.

The worker is a real `mq_worker`. Its time runs from its signal `worker_started` (it has connected,
and claimed nothing yet) to the hook after its last COMMIT, so neither Python's start nor the end
of the process counts; nor does the bare loop's connecting. Two processes begin together, and have
twice the messages.
"""

from __future__ import annotations

from benchmarks import bare
from benchmarks.database import Database
from benchmarks.footprints import Cost, with_cpu
from benchmarks.report import Row, compared
from benchmarks.workers import cost_of, verify
from benchmarks.workloads import Bench

PLAIN = f"""
insert into {bare.TABLE} (payload) select payload from django_mq_queuedmessage
"""


def run(bench: Bench) -> list[Row]:
    """Worker, bare loop on the same table, bare loop on a table as plain as can be, in turn; and
    both again with two processes."""
    count = bench.size(50_000, 5_000)
    costs: list[Cost] = []
    two_costs: list[Cost] = []
    same, plain, bare_two = [], [], []
    for _ in bench.in_turn("drain"):
        costs.append(worker_cost(bench.database, count))
        same.append(bare_rate(bench.database, count))
        plain.append(plain_rate(bench.database, count))
        two_costs.append(worker_cost(bench.database, 2 * count, processes=2))
        bare_two.append(bare_rate(bench.database, 2 * count, processes=2))
    note = f"{count:,} no-op messages, one process"
    note_two = f"{2 * count:,} no-op messages, two processes; against: "
    ours, two = ([cost.rate for cost in each] for each in (costs, two_costs))
    first = compared("drain", ours, same, at_least=0.6, note=note)
    second = compared("drain, two processes", two, same, at_least=0.75, note=f"{note_two}one loop")
    return [
        with_cpu(first, costs),
        compared("drain, bare loop on a plain table", ours, plain, at_least=0.6),
        with_cpu(second, two_costs),
        compared("drain, two bare loops", two, bare_two, note=f"{note_two}two bare loops"),
    ]


def worker_cost(database: Database, count: int, processes: int = 1) -> Cost:
    """Return what a message costs one worker."""
    database.clear()
    database.fill(count)
    database.settle()
    return cost_of(database, count, processes=processes)


def bare_rate(database: Database, count: int, processes: int = 1) -> float:
    """Return messages a second of the bare loop, on the same rows of the same table."""
    database.clear()
    database.fill(count)
    database.settle()
    due = database.ids()
    if processes == 1:
        done = bare.drain(database.params())
    else:
        done = bare.drain_together(database.params(), processes)
    verify(database, due, done.ids)
    return count / (done.end - done.begin)


def plain_rate(database: Database, count: int) -> float:
    """Return messages a second of the bare loop, on a table with one index and two columns."""
    database.clear()
    database.fill(count)
    database.execute(PLAIN)
    database.execute("truncate django_mq_queuedmessage")
    database.settle()
    due = {id for (id,) in database.execute(f"select id from {bare.TABLE}")}
    done = bare.drain(database.params(), bare.FROM_PLAIN)
    verify(database, due, done.ids)
    return count / (done.end - done.begin)
