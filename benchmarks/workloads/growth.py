"""How the cost of one thing grows with the number of another: for docs/scaling.md.

The claim's time with the backlog, and with the rows that others take meanwhile; vacuum with the
backlog that it has to walk around; and what commits and rings cost by themselves. Claims are the
worker's own statement on its kind of connection, one after another, each from where the last one
ended. `breadth` has queues and handlers.
"""

from __future__ import annotations

from statistics import median

from benchmarks import bare
from benchmarks.claims import BATCH, Claimer, each_once
from benchmarks.database import check
from benchmarks.growing import grown, milliseconds
from benchmarks.report import Row
from benchmarks.workloads import Bench
from django_mq.store import notify

DAY = 86_400.0
TIMES = 20
MANY = 200
#: Rows that another worker takes between two claims: enough to time them.
OTHERS = 2_000
DYING = 10_000
DIE = """
with claimed as (
    update django_mq_queuedmessage
       set attempts = 1, claimed_by = 'bench:1', leased_until = statement_timestamp()
     where processable_after <= statement_timestamp() returning id
)
select count(*) from claimed
"""


WRITTEN = "select pg_current_wal_insert_lsn() - '0/0'"
INSERT = f"insert into {bare.TABLE} (payload) values ('{{}}')"


def run(bench: Bench) -> list[Row]:
    """Run all measurements, one after another."""
    rows: list[Row] = []
    for part in (_backlog, _claim, _passing, _vacuum, _commits):
        rows += part(bench)
    bench.database.clear()
    return rows


def _backlog(bench: Bench) -> list[Row]:
    sizes = bench.size(1_000_000, 10_000), bench.size(100_000, 3_000), 1_000
    figures, pages = {}, {}
    for size in reversed(sizes):
        _fill(bench, size)
        with Claimer("ours") as ours:
            taken = [ours.take() for _ in range(min(TIMES + 3, size // 100 - 1))]
            check(all(len(each.ids) == 100 for each in taken), "a claim took fewer than 100")
            each_once(taken)
            figures[f"{size:,}"] = median(each.milliseconds for each in taken[3:])
            pages[f"{size:,}"] = ours.explain().pages
    notes = {name: f"{count} pages of 8 kB, all in memory" for name, count in pages.items()}
    return grown("growth: backlog, claim of 100 from {} waiting", figures, "ms", notes)


def _claim(bench: Bench) -> list[Row]:
    """Measure the server's work per message of a claim, without the commit."""
    _fill(bench, 10_000)
    with Claimer("ours") as ours:
        ours.warm_up()
        explained = [ours.explain().milliseconds for _ in range(TIMES)]
    return [
        Row(
            workload="growth: claim, CPU of the server",
            figure=median(explained) * 1000 / BATCH,
            unit="us/msg",
            note=f"by EXPLAIN ANALYZE, {BATCH} at once",
        )
    ]


def _passing(bench: Bench) -> list[Row]:
    """A row that another claimed is dead in the index, or, until that commits, locked."""
    times = bench.size(TIMES, 4)
    _fill(bench, (times + 1) * (2 * OTHERS + 400))
    dead, locked, plain = [], [], []
    with Claimer("ours") as ours, Claimer("other") as other:
        ours.warm_up()
        other.warm_up()
        for _ in range(times):
            plain.append(ours.take())
            with other.transaction():
                theirs = other.take(OTHERS)
                locked.append(ours.take())
            after = ours.take()
            others = other.take(OTHERS)
            dead.append(ours.take())
            each_once([plain[-1], theirs, locked[-1], after, others, dead[-1]])

    def per_row(taken: list[float]) -> float:
        extra = [each - usual.milliseconds for each, usual in zip(taken, plain, strict=True)]
        return median(extra) / OTHERS * 1000

    note = f"{OTHERS:,} of them between two claims of 100"
    return [
        Row(
            workload=f"growth: passing, a row that another worker {what}",
            figure=per_row([each.milliseconds for each in taken]),
            unit="us/row",
            note=note,
        )
        for what, taken in (("claimed", dead), ("has locked", locked))
    ]


def _vacuum(bench: Bench) -> list[Row]:
    """Measure the removal of what 10,000 messages leave behind, by one process like autovacuum."""
    figures = {}
    for beside in (0, bench.size(1_000_000, 20_000)):
        bench.database.clear()
        bench.database.fill(beside, after=DAY)
        bench.database.settle()
        bench.database.fill(DYING)
        check(bench.database.execute(DIE) == [(DYING,)], "not all messages were claimed")
        bench.database.execute("delete from django_mq_queuedmessage where claimed_by = 'bench:1'")
        figures[f"{beside:,}"] = milliseconds(
            lambda: bench.database.execute(
                "vacuum (parallel 0, index_cleanup on) django_mq_queuedmessage"
            ),
            times=1,
        )
    note = f"of what {DYING:,} messages left, indexes included"
    return grown("growth: vacuum, beside {} waiting", figures, "ms", note)


def _commits(bench: Bench) -> list[Row]:
    """A commit that waits for the disk, less one that does not; and a ring, which does not."""
    with bench.database.connect() as connection:
        waiting = milliseconds(lambda: connection.execute(INSERT), MANY)
        connection.execute("set synchronous_commit = off")
        waiting -= milliseconds(lambda: connection.execute(INSERT), MANY)
    with Claimer("ours") as ours:
        ringing = milliseconds(lambda: notify.ring(ours.cursor), MANY)
    return [
        Row(
            workload="growth: WAL, to store a message",
            figure=_stored(bench),
            unit="bytes/msg",
            note="by one INSERT of many rows",
        ),
        Row(workload="growth: commit, the wait for the disk", figure=waiting * 1000, unit="us"),
        Row(
            workload="growth: commit, of a NOTIFY",
            figure=ringing * 1000,
            unit="us",
            note="NOTIFY and its commit, which does not wait for the disk",
        ),
    ]


def _stored(bench: Bench) -> float:
    """Return the bytes of WAL that a message of the usual size takes."""
    bench.database.clear()
    bench.database.settle()
    before = bench.database.execute(WRITTEN)[0][0]
    bench.database.fill(DYING)
    return float(bench.database.execute(WRITTEN)[0][0] - before) / DYING


def _fill(bench: Bench, count: int) -> None:
    bench.database.clear()
    bench.database.fill(count)
    bench.database.settle()
