"""The time that a message waits after its worker dies, compared with the documented limit.

A handler sleeps, and its process is killed or frozen. The row is read until that process no longer
claims the message. Each case starts new workers; the slowest case gives the figure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from statistics import median
from time import monotonic, sleep

from django.db import transaction

from benchmarks.database import Database, check
from benchmarks.report import Row, limited
from benchmarks.workers import Worker
from benchmarks.workloads import Bench
from django_mq import broadcast

LEASE, POLL, DRAIN = 3.0, 1.0, 2.0
#: Seconds within which another process settles the messages of one killed while it drains.
SETTLED = 10.0
#: Seconds that the handler sleeps: longer than any case takes.
SLEEPS = 60
#: Workers told to stop do not wait for the handler.
SETTINGS = {"LEASE": LEASE, "POLL_INTERVAL": POLL, "DRAIN_SECONDS": DRAIN}
CLAIMED = "select claimed_by from django_mq_queuedmessage where claimed_by is not null"
PIDS = "select pid from django_mq_workerheartbeat"
PID = f"{PIDS} where id = split_part(%s, ':', 1)"


def run(bench: Bench) -> list[Row]:
    """Return the slowest case of each kind, with the median in its note."""
    cases: dict[str, tuple[float, str, Callable[[Database], float]]] = {
        "process killed": (2.0, "SIGKILL of one of two processes", _child_killed),
        "host lost": (LEASE + POLL, "SIGKILL of a worker and all its processes", _host_lost),
        "host frozen": (LEASE + POLL, "SIGSTOP of a worker and all its processes", _host_frozen),
        "drain": (DRAIN + 2.0 + SETTLED, "SIGTERM while a handler runs on", _drained),
    }
    took: dict[str, list[float]] = {name: [] for name in cases}
    for _ in bench.in_turn("recovery"):
        for name, (_, _, case) in cases.items():
            for _ in range(bench.size(3, 1)):
                bench.database.clear()
                took[name].append(case(bench.database))
    return [
        limited(
            f"recovery, {name}",
            max(took[name]),
            "s",
            at_most=bound,
            note=f"slowest of {len(took[name])}, median {median(took[name]):.2f} s; {note}",
        )
        for name, (bound, note, _) in cases.items()
    ]


def _child_killed(database: Database) -> float:
    with Worker(database, processes=2, **SETTINGS):
        claimer = _claimer(database)
        os.kill(_pid(database, claimer), signal.SIGKILL)
        return _until_freed(database, claimer)


def _host_lost(database: Database) -> float:
    return _whole_host(database, signal.SIGKILL)


def _host_frozen(database: Database) -> float:
    return _whole_host(database, signal.SIGSTOP)


def _whole_host(database: Database, sent: signal.Signals) -> float:
    with Worker(database, **SETTINGS) as lost:
        claimer = _claimer(database)
        pids = [lost.pid, _pid(database, claimer)]
        with Worker(database, **SETTINGS):
            while len(database.execute(PIDS)) < len(pids):
                sleep(0.01)
            for pid in pids:
                os.kill(pid, sent)
            try:
                return _until_freed(database, claimer)
            finally:
                if sent == signal.SIGSTOP:  # the others have ended; their pids may be reused
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)


def _drained(database: Database) -> float:
    with Worker(database, **SETTINGS) as worker:
        _claimer(database)
        began = monotonic()
        worker.terminate()
        return monotonic() - began


def _claimer(database: Database) -> str:
    """Start the handler; return the claimer of its message."""
    with transaction.atomic():
        broadcast("bench.asleep", {"seconds": SLEEPS})
    deadline = monotonic() + 60
    while not (found := database.execute(CLAIMED)):
        check(monotonic() < deadline, "no worker claimed the message")
        sleep(0.01)
    ((claimer,),) = found
    return str(claimer)


def _pid(database: Database, claimer: str) -> int:
    """Return the process that claimed the message, once its heartbeat shows it."""
    while not (found := database.execute(PID, [claimer])):
        sleep(0.01)
    return int(found[0][0])


def _until_freed(database: Database, claimer: str) -> float:
    """Return the seconds until `claimer` no longer claims the message."""
    began = monotonic()
    while database.execute(CLAIMED) == [(claimer,)]:
        check(monotonic() - began < 60, "nobody settled the message")
        sleep(0.005)
    return monotonic() - began
