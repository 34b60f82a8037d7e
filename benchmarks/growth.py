"""Predicts the rates of a larger machine from measurements on a small one.

Bounds, as of operational analysis (P. J. Denning, J. P. Buzen, "The Operational Analysis of
Queueing Network Models", ACM Computing Surveys 10 (3), 1978): no rate is higher than what the
busiest resource has, divided by what a message needs of it. They are optimistic where two limits
come together; `simulation.py` says by how much. Every constant comes from rows of the workloads
`drain`, `footprint`, `breadth` and `growth`: nothing is assumed here but the shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.report import Row

#: Connections of a worker process besides one for each thread: claims, leases, LISTEN.
OWN_CONNECTIONS = 3
#: Rings a second of one producing process, at most: it pauses 20 ms between two.
RINGS = 50.0
#: The reaction of an idle worker to a ring: claim, and check again a little later.
LOOKS_A_RING = 2
MICROSECOND = 1e-6

#: Rows that the model needs, and what one of their unit is in its own.
SOURCES = {
    "alone": ("drain", 1.0),
    "worker": (
        "footprint, Python's CPU",
        MICROSECOND,
    ),  # milliseconds of 1,000: microseconds of one
    "server": ("footprint, PostgreSQL's CPU", MICROSECOND),
    "claim": ("growth: claim, CPU of the server", MICROSECOND),
    "passing": ("growth: passing, a row that another worker claimed", MICROSECOND),
    "look": ("growth: queues, claim from 1 with nothing due", 1e-3),
    "ring": ("growth: commit, of a NOTIFY", MICROSECOND),
    "flush": ("growth: commit, the wait for the disk", MICROSECOND),
    "wal": ("footprint, WAL", 1.0),
    "stored": ("growth: WAL, to store a message", 1.0),
    "vacuum": ("growth: vacuum, beside 0 waiting", 1e-3 / 10_000),
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a message: seconds, and bytes of WAL (`wal` to handle it, `stored` to store it).

    `alone`: elapsed, in one process that has the machine to itself. `worker`, `server`: CPU there;
    `claim`: the part of `server` that is the claim. `passing`: CPU of the server to pass a row
    that another process took meanwhile. `look`: to find nothing. `ring`: one NOTIFY with its
    commit. `flush`: what a commit waits for the disk. `vacuum`: to remove what a message left.
    """

    alone: float
    worker: float
    server: float
    claim: float
    passing: float
    look: float
    ring: float
    flush: float
    wal: float
    stored: float
    vacuum: float


class Missing(LookupError):
    """Raised if a figure that the model needs was not measured."""


def costs_from(rows: Iterable[Row]) -> Costs:
    """Return the costs that these rows say; raises Missing with the first that is not there."""
    figures = {row.workload: row.figure for row in rows if row.figure == row.figure}
    found = {}
    for name, (workload, unit) in SOURCES.items():
        if workload not in figures:
            raise Missing(f"{workload!r} was not measured")
        found[name] = figures[workload] * unit
    found["alone"] = 1 / found["alone"]
    # Small differences of large figures can be below nothing by chance.
    return Costs(**{name: max(0.0, value) for name, value in found.items()})


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Cores of the server, and of the workers' machines together; None: they share the server's.

    `wal`: bytes a second that the server's disk, its archive and its standbys take.
    """

    server: float
    workers: float | None = None
    wal: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Handler:
    """The seconds that a handler needs per message.

    `cpu`: of its own. `queries`: CPU of the server for its queries. `waits`: waiting for others.
    """

    cpu: float = 0.0
    queries: float = 0.0
    waits: float = 0.0


NOTHING = Handler()


class Prediction(NamedTuple):
    """Messages per second, and the resource that limits them."""

    rate: float
    limit: str


def limits(
    costs: Costs,
    machines: Machines,
    processes: int,
    *,
    threads: int = 1,
    handler: Handler = NOTHING,
) -> dict[str, float]:
    """Return the messages per second that each resource allows.

    Python runs in one thread of a process at a time; others wait for their queries meanwhile.
    Each claim passes the rows that the other processes took since its last one: as many for each
    of its own as there are other processes.
    """
    python = costs.alone + handler.cpu
    each = min(1 / python, threads / (python + handler.queries + handler.waits))
    worker = costs.worker + handler.cpu
    server = costs.server + handler.queries + (processes - 1) * costs.passing
    found = {"processes": processes * each}
    if machines.workers is None:
        found["cores"] = machines.server / (worker + server)
    else:
        found["workers' cores"] = machines.workers / worker
        found["server's cores"] = machines.server / server
    if wal := costs.wal + costs.stored:
        found["WAL"] = machines.wal / wal
    return found


def predict(
    costs: Costs,
    machines: Machines,
    processes: int,
    *,
    threads: int = 1,
    handler: Handler = NOTHING,
) -> Prediction:
    """Return the lowest of the limits.

    >>> costs = Costs(alone=2e-5, worker=1.5e-5, server=1e-5, claim=5e-6, passing=2e-7,
    ...               look=5e-4, ring=5e-5, flush=1e-3, wal=600, stored=200,
    ...               vacuum=1e-6)
    >>> small = Machines(server=2)
    >>> [round(predict(costs, small, n).rate, -3) for n in (1, 2, 4)]
    [50000.0, 79000.0, 78000.0]
    >>> large = Machines(server=8, workers=32, wal=200e6)
    >>> [predict(costs, large, n).limit for n in (4, 12, 24, 64)]
    ['processes', 'WAL', 'WAL', 'WAL']
    >>> predict(costs, Machines(server=8, workers=64), 64).limit
    "server's cores"
    >>> mail = Handler(waits=0.1)
    >>> round(predict(costs, large, 2, threads=20, handler=mail).rate)
    400
    """
    found = limits(costs, machines, processes, threads=threads, handler=handler)
    limit = min(found, key=lambda name: found[name])
    return Prediction(found[limit], limit)


def best_processes(costs: Costs, machines: Machines, *, most: int = 512) -> int:
    """Return the smallest number of processes with the highest rate: more only pass rows.

    >>> costs = Costs(alone=2e-5, worker=1.5e-5, server=1e-5, claim=5e-6, passing=2e-7,
    ...               look=5e-4, ring=5e-5, flush=1e-3, wal=600, stored=200,
    ...               vacuum=1e-6)
    >>> best_processes(costs, Machines(server=8, workers=64))
    13
    """
    return max(range(1, most + 1), key=lambda n: (predict(costs, machines, n).rate, -n))


def idle_cores(costs: Costs, workers: int, *, rings: float) -> float:
    """Return how many of the server's cores idle workers keep busy, at so many rings a second.

    Each ring wakes all of them. One that is awake hears what rings meanwhile as one.

    >>> costs = Costs(alone=2e-5, worker=1.5e-5, server=1e-5, claim=5e-6, passing=2e-7,
    ...               look=5e-4, ring=5e-5, flush=1e-3, wal=600, stored=200,
    ...               vacuum=1e-6)
    >>> round(idle_cores(costs, 32, rings=0), 3), round(idle_cores(costs, 32, rings=RINGS), 1)
    (0.016, 1.6)
    """
    looks = 1.0 + LOOKS_A_RING * rings
    return workers * min(1.0, looks * costs.look)


def ringing(costs: Costs, producers: int) -> float:
    """Return the share of the time for which rings hold the lock that orders all NOTIFYs.

    It is one for the whole cluster, held to the end of the commit. `producers` are processes,
    each as busy as can be.

    >>> costs = Costs(alone=2e-5, worker=1.5e-5, server=1e-5, claim=5e-6, passing=2e-7,
    ...               look=5e-4, ring=5e-5, flush=1e-3, wal=600, stored=200,
    ...               vacuum=1e-6)
    >>> ringing(costs, 48)
    0.12
    """
    return round(producers * RINGS * costs.ring, 9)


def connections(processes: int, threads: int, *, coroutines: bool = False) -> int:
    """Return how many connections so many worker processes have.

    >>> connections(32, 4), connections(32, 1, coroutines=True)
    (224, 160)
    """
    return processes * (threads + OWN_CONNECTIONS + coroutines)
