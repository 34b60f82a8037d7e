"""The tables of docs/scaling.md that are not measured but modelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.growth import (
    RINGS,
    Costs,
    Handler,
    Machines,
    Missing,
    best_processes,
    connections,
    costs_from,
    idle_cores,
    predict,
    ringing,
)
from benchmarks.markdown import plain, table
from benchmarks.report import Row, number
from benchmarks.simulation import simulate

PROCESSES = (1, 2, 4, 8, 16, 32)
SERVERS = (4, 16)
#: The model assumes that nothing else runs on the two cores.
SMALL = Machines(server=2)


def predictions(name: str, rows: Sequence[Row]) -> str:
    """Return one of TABLES, or a text that names a missing figure."""
    try:
        costs = costs_from(rows)
    except Missing as missing:
        return plain(f"Not computed yet: {missing}.")
    return TABLES[name](costs, rows)


def _check(costs: Costs, rows: Sequence[Row]) -> str:
    """Compare the model with measurements on the machine that provides its constants."""
    measured = {row.workload: row.figure for row in rows}
    lines = []
    for processes, name in ((1, "drain"), (2, "drain, two processes")):
        expected = predict(costs, SMALL, processes)
        found = number(measured.get(name))
        lines.append((str(processes), found, number(expected.rate), expected.limit))
    return table(("processes", "measured", "predicted", "by"), lines)


def _rates(costs: Costs, rows: Sequence[Row]) -> str:
    """Rates of no-op messages; workers run on separate machines, with a core per process."""
    headings = ["processes"]
    for cores in SERVERS:
        headings += [f"{cores} cores, at most", "limited by", "simulated"]
    lines = []
    for processes in PROCESSES:
        line = [str(processes)]
        for cores in SERVERS:
            most = predict(costs, Machines(server=cores, workers=processes), processes)
            simulated = simulate(costs, processes=processes, cores=cores)
            line += [number(most.rate), most.limit, number(simulated)]
        lines.append(line)
    best = [
        f"{best_processes(costs, Machines(server=cores, workers=512))} processes on {cores} cores"
        for cores in SERVERS
    ]
    return f"{table(headings, lines)}\n\nThe rate is highest with {' and '.join(best)}."


def _handlers(costs: Costs, rows: Sequence[Row]) -> str:
    """The rates with handlers that do some work: 8 processes, 8 cores on each side."""
    kinds = {
        "no-op": (Handler(), 1),
        "1 ms of Python": (Handler(cpu=1e-3), 1),
        "1 ms of queries, one thread": (Handler(queries=1e-3), 1),
        "1 ms of queries, four threads": (Handler(queries=1e-3), 4),
        "waits 100 ms, one thread": (Handler(waits=0.1), 1),
        "waits 100 ms, twenty threads": (Handler(waits=0.1), 20),
    }
    lines = []
    for name, (handler, threads) in kinds.items():
        most = predict(costs, Machines(server=8, workers=8), 8, threads=threads, handler=handler)
        lines.append((name, number(most.rate), most.limit, str(connections(8, threads))))
    return table(("handler", "messages a second", "limited by", "connections"), lines)


def _limits(costs: Costs, rows: Sequence[Row]) -> str:
    """The limits of one PostgreSQL server: the load on each resource at these rates."""
    wal = costs.wal + costs.stored
    lines = [
        (
            number(rate),
            f"{rate * wal / 1e6:,.1f} MB/s, {rate * wal * 86_400 / 1e9:,.0f} GB a day",
            f"{rate * costs.server:,.2g} cores",
            f"{rate * costs.vacuum:,.2g} s",
        )
        for rate in (100, 1_000, 10_000, 50_000, 100_000)
    ]
    return table(
        ("messages a second", "WAL", "the server, workers' statements", "vacuum, each second"),
        lines,
    )


def _waking(costs: Costs, rows: Sequence[Row]) -> str:
    """The cost of rings: `n` producing processes at full load, and idle workers."""
    lines = [
        (
            str(count),
            f"{ringing(costs, count):.0%}",
            f"{idle_cores(costs, count, rings=0):.2g} cores",
            f"{idle_cores(costs, count, rings=1):.2g} cores",
            f"{idle_cores(costs, count, rings=RINGS):.2g} cores",
        )
        for count in (1, 8, 32, 128)
    ]
    return table(
        (
            "n",
            "NOTIFY's lock, n producers",
            "n idle workers",
            "at a ring a second",
            f"at {RINGS:.0f} rings a second",
        ),
        lines,
    )


TABLES: dict[str, Callable[[Costs, Sequence[Row]], str]] = {
    "check": _check,
    "rates": _rates,
    "handlers": _handlers,
    "limits": _limits,
    "waking": _waking,
}
