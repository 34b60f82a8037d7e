"""The statements of an idle worker while a sibling's handler runs past its lease.

The lease of the handler's row has lapsed, but its transaction has the row locked: an impatient
worker would query again and again. The statements are counted in the process of the idle worker,
by thread: pg_stat_statements is often missing, and cannot tell two workers apart. The threads of
the lease keeper (heartbeat, chores, renewals of nothing) and of the listener (which checks its link
every 10 s) are counted separately.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from time import sleep

from django.db import transaction

from benchmarks.database import check
from benchmarks.report import Row, limited
from benchmarks.workers import Seen, Worker
from benchmarks.workloads import Bench
from django_mq import broadcast
from django_mq.store.claim_lapsed import CLAIM_LAPSED
from django_mq.store.poll import POLL

APART = ("mq-lease-keeper", "mq-listener")
#: After its start, and after the lapse, the idle worker has so many seconds to come to rest.
REST = 2.0
#: The statements of an idle worker, by name.
NAMES = {POLL: "looks for due messages", CLAIM_LAPSED: "claims of lapsed leases"}


def run(bench: Bench) -> list[Row]:
    """Statements a second of the idle worker, from the lapse to the end of the handler."""
    lease, seconds = 1.0, float(bench.size(20, 8))
    database = bench.database
    database.clear()
    with Worker(database, LEASE=lease) as busy:
        busy.until_alive()
        with transaction.atomic():
            broadcast("bench.long", {"seconds": seconds})
        while not database.count("leased_until is not null"):
            sleep(0.01)
        with Worker(database, statements=True, LEASE=lease) as idle:
            sleep(seconds)
            while database.count():
                sleep(0.05)
            looking = idle.stop()
        running = busy.stop()
    check(len(running.starts) == 1 and not looking.starts, "the handler did not run once")
    (started,), (ended,) = running.starts.values(), running.finished
    begin = max(started + lease, looking.begin) + REST
    check(ended - begin > 1.0, "the handler ended too soon to count anything")
    said = [each for each in looking.statements if begin <= each[0] < ended]
    counted = [each for each in said if each[1] not in APART]
    return [
        limited(
            "idle",
            rate([at for at, _, _ in counted]),
            "statements/s",
            at_most=2.0,
            note=f"statements in {ended - begin:.0f} s beside a handler past its lease:"
            f" {shown(counted)}; {len(said) - len(counted)} of the keeper and the listener"
            " not counted",
        ),
        _started(looking),
    ]


def rate(times: list[float]) -> float:
    """Return how many a second, from the first turn until the last begins.

    A turn is what is said within 50 ms. Whole turns: what is said once a second is found 11 times
    in a window of 10 s, if that begins just so.

    >>> rate([5.0, 5.01, 6.0, 6.01, 7.0, 7.01])
    2.0
    """
    turns = [at for last, at in pairwise([float("-inf"), *times]) if at - last > 0.05]
    if len(turns) < 2:
        return 0.0
    return sum(at < turns[-1] for at in times) / (turns[-1] - turns[0])


def shown(statements: list[tuple[float, str, str]]) -> str:
    """Return what was asked how often: by its name, or by the beginning of the statement.

    >>> shown([(0.0, "main", POLL), (0.5, "main", "select 1"), (1.0, "main", POLL)])
    '2 looks for due messages, 1 x select 1'
    """
    names = {_beginning(text): name for text, name in NAMES.items()}
    kinds = Counter(_beginning(text) for _, _, text in statements)
    counts = [(count, names.get(kind, f"x {kind}")) for kind, count in kinds.most_common()]
    return ", ".join(f"{count} {name}" for count, name in counts) or "none"


def _beginning(statement: str) -> str:
    return " ".join(statement.split()[:4])


def _started(looking: Seen) -> Row:
    soon = [each for each in looking.statements if each[0] < looking.begin + REST]
    return limited(
        "idle, at the start", len(soon), "statements", note=f"in its first {REST:g} s, all threads"
    )
