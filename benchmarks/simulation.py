"""Simulates worker processes on one server, event by event, for what `growth.py` leaves out.

They leave out that processes wait for each other: for a core of the server, for the disk at a
commit (commits that wait together are flushed together), and that a claim which takes longer passes
more rows. A process claims its next batch while it runs the last one, as the worker does.

Times vary by half around their mean: with none at all everything falls into step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from random import Random
from typing import NamedTuple

from benchmarks.growth import Costs

BATCH = 100


class Step(NamedTuple):
    """The next step of a process: on its own core, on the server, or waiting for the disk."""

    where: str
    seconds: float = 0.0


Steps = Generator[Step, None, None]


class _World:
    """The clock, the server's cores, and the disk."""

    def __init__(self, cores: int, flush: float) -> None:
        self.now = 0.0
        self._flush = flush
        self._free = cores
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._committing: list[Callable[[], None]] = []
        self._flushing = False

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()

    def do(self, steps: Steps, then: Callable[[], None]) -> None:
        """Go through `steps`; then call `then`."""

        def go_on() -> None:
            step = next(steps, None)
            if step is None:
                then()
            elif step.where == "worker":
                self.after(step.seconds, go_on)
            elif step.where == "server":
                self._queue.append((step.seconds, go_on))
                self._serve()
            else:
                self._committing.append(go_on)
                self._write()

        go_on()

    def _serve(self) -> None:
        while self._free and self._queue:
            seconds, then = self._queue.popleft()
            self._free -= 1

            def done(then: Callable[[], None] = then) -> None:
                self._free += 1
                then()
                self._serve()

            self.after(seconds, done)

    def _write(self) -> None:
        if self._flushing or not self._committing:
            return
        together, self._committing = self._committing, []
        self._flushing = True

        def done() -> None:
            self._flushing = False
            for then in together:
                then()
            self._write()

        self.after(self._flush, done)


def simulate(
    costs: Costs, *, processes: int, cores: int, seconds: float = 2.0, seed: int = 1
) -> float:
    """Return messages a second of `processes`, each with a core of its own, at a server with
    `cores`.

    >>> costs = Costs(alone=2e-5, worker=1.5e-5, server=1e-5, claim=5e-6, passing=0.0,
    ...               look=5e-4, ring=5e-5, flush=1e-4, wal=600, stored=200,
    ...               vacuum=1e-6)
    >>> one, eight, many = (simulate(costs, processes=n, cores=4) for n in (1, 8, 64))
    >>> 40_000 < one < 50_000, 7 * one < eight < 8 * one, 390_000 < many < 410_000
    (True, True, True)
    """
    world = _World(cores, costs.flush)
    random = Random(seed)  # noqa: S311
    taken = done = 0
    settle = max(0.0, costs.server - costs.claim)
    # Round trips and locks of its own: what one process needs beyond all this.
    rest = max(0.0, costs.alone - costs.worker - settle - costs.flush / BATCH)

    def about(mean: float) -> float:
        return mean * random.uniform(0.5, 1.5)

    def claim(seen: list[int]) -> Steps:
        nonlocal taken
        passed = taken - seen[0]
        taken += BATCH
        seen[0] = taken
        yield Step("server", about(costs.claim * BATCH) + costs.passing * passed)
        yield Step("disk")

    def run() -> Steps:
        nonlocal done
        yield Step("worker", about(costs.worker * BATCH))
        yield Step("server", about(settle * BATCH))
        yield Step("disk")
        yield Step("worker", rest * BATCH)
        done += BATCH

    def start() -> None:
        seen = [0]
        open_ends = 0

        def both() -> None:
            nonlocal open_ends
            open_ends = 2
            world.do(run(), ended)
            world.do(claim(seen), ended)

        def ended() -> None:
            nonlocal open_ends
            open_ends -= 1
            if not open_ends:
                both()

        world.do(claim(seen), both)

    for _ in range(processes):
        world.after(random.uniform(0.0, costs.worker * BATCH), start)
    world.run(seconds / 5)  # warm-up
    before = done
    world.run(seconds)
    return (done - before) / (seconds * 4 / 5)
