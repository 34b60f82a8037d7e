"""The kinds of faults: the event at request N, and the rest of the point after it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.faults.app import trace
from tests.faults.driver import Tree, until
from tests.faults.invariants import ALWAYS, AT_REST
from tests.faults.wire import ANY, COMMIT, Fault, Link, When

if TYPE_CHECKING:
    from tests.faults.stage import Stage

#: Seconds in which a worker must be done, less than any lease. The machine may be loaded; other
#: tests check the time limits of the guarantees.
SOON = 30.0
#: The lease that a point waits for, in seconds.
SHORT = 1.0
#: Queries that handlers themselves send to the server.
INSIDE = re.compile("faults_(effect|sent)")
#: The query that begins a slice and locks: the handler is running already, or waits for it.
BEGINS = re.compile(r"^begin\b.*;", re.IGNORECASE)
#: After this many seconds a worker is done and sleeps. If it is not, a point tests less than it
#: could.
ASLEEP = 0.5


@dataclass(frozen=True, slots=True)
class Kind:
    """`play(stage, at)` runs workers until all is done; the fault is at request `at`.

    `spare` is how many attempts a message may be charged without having started, and `begun` how
    many messages may be charged one for a process that was about to start them. If `swept`, there
    is a point for each counted request `among` the given ones; other kinds have one point.
    `strict`: there is no fault, so no message may run twice; `freezes`: a worker stands still
    beyond its lease. It `sends` the messages itself, or they exist when it begins. `only` limits it
    to these scenarios.
    """

    play: Callable[[Stage, int], None]
    spare: int = 0
    begun: int = 0
    swept: bool = True
    sends: bool = False
    strict: bool = False
    freezes: bool = False
    among: re.Pattern[str] = ANY
    only: tuple[str, ...] = ()

    def points(self, requests: Sequence[str]) -> int:
        """Return the number of points where a worker without faults sends `requests`."""
        return sum(bool(self.among.search(text)) for text in requests) if self.swept else 1


def _end(stage: Stage, worker: Tree) -> None:
    """Wait until all is done; if this worker has left, a new one finishes."""
    stage.wait(lambda: stage.is_done() or worker.code() is not None, SOON)
    if worker.code() is not None:
        worker.destroy()
        stage.start(direct=True)
        stage.wait_done(SOON)


def _first(workers: list[Tree]) -> Tree:
    """Return the first worker, which may send its first request before it is in the list."""
    until(lambda: workers, "the first worker")
    return workers[0]


def nothing(stage: Stage, at: int) -> None:
    """No fault: this is recorded, and compared with the faults."""
    stage.proxy.begin()
    worker = stage.start()
    stage.wait_done(SOON)
    stage.leave(worker)


def tree(when: When, among: re.Pattern[str] = ANY) -> Callable[[Stage, int], None]:
    """The whole worker is killed; another one, later, meets the lapsed leases."""

    def play(stage: Stage, at: int) -> None:
        workers: list[Tree] = []
        stage.proxy.begin(Fault(at, lambda link: _first(workers).kill(), when, among))
        workers.append(stage.start())
        stage.wait(lambda: stage.proxy.struck.is_set() or stage.is_done(), SOON)
        if not stage.proxy.struck.is_set():
            return
        until(workers[0].is_gone, "the end of a killed worker")
        until(stage.is_quiet, "the end of its transactions")
        stage.check(ALWAYS)
        stage.pass_time()
        stage.start(direct=True)
        stage.wait_done(SOON)

    return play


def child(when: When, among: re.Pattern[str] = ANY) -> Callable[[Stage, int], None]:
    """The process that runs handlers is killed; its supervisor replaces it."""

    def play(stage: Stage, at: int) -> None:
        workers: list[Tree] = []
        stage.proxy.begin(Fault(at, lambda link: _first(workers).kill_child(), when, among))
        workers.append(stage.start())
        _end(stage, workers[0])

    return play


def cut(when: When) -> Callable[[Stage, int], None]:
    """One session is cut; the worker lives. `after`: the server has carried out the request."""

    def play(stage: Stage, at: int) -> None:
        stage.proxy.begin(Fault(at, lambda link: None, when))
        _end(stage, stage.start())

    return play


def lose_commit(stage: Stage, at: int) -> None:
    """The reply to a COMMIT is lost: it is committed, and the worker cannot know."""
    stage.proxy.begin(Fault(at, lambda link: None, "after", COMMIT))
    _end(stage, stage.start())


def refuse(stage: Stage, at: int) -> None:
    """The server is gone, and returns after three failed attempts to connect."""
    stage.proxy.begin(Fault(at, lambda link: stage.proxy.refuse()))
    worker = stage.start()
    stage.wait(
        lambda: stage.is_done() or stage.proxy.refused > 2 or worker.code() is not None, SOON
    )
    stage.proxy.let_in()
    _end(stage, worker)


def stall(stage: Stage, at: int) -> None:
    """One link stalls for a moment: the server has the request, but its answer comes late."""
    stage.proxy.begin(Fault(at, stage.proxy.hold, "passing"))
    worker = stage.start()
    stage.wait(lambda: stage.proxy.struck.is_set() or stage.is_done(), SOON)
    stage.wait(stage.is_done, ASLEEP)
    stage.proxy.let_in()
    _end(stage, worker)


def freeze(among: re.Pattern[str] = ANY) -> Callable[[Stage, int], None]:
    """A worker stops for longer than its leases; another one takes over; the first wakes up.

    It wakes up while a handler of the second worker waits at the gate.
    """

    def play(stage: Stage, at: int) -> None:
        workers: list[Tree] = []
        stop = Fault(at, lambda link: _first(workers).signal_all(signal.SIGSTOP), "passing", among)
        stage.proxy.begin(stop)
        with trace.shut_gate(stage.directory):
            workers.append(stage.start(LEASE=SHORT))
            stage.wait(lambda: stage.proxy.struck.is_set() or stage.is_done(), SOON)
            workers.append(stage.start(direct=True, gated=True, LEASE=10 * SOON))
            stage.wait_lapsed(SHORT)
            stage.wait_taken(SOON)
            stage.wait(lambda: stage.is_done() or trace.is_anybody_waiting(stage.directory), ASLEEP)
            workers[0].signal_all(signal.SIGCONT)
            stage.leave(workers[0])
        stage.wait_done(SOON)

    return play


def term(*, late: bool = False) -> Callable[[Stage, int], None]:
    """The worker is told to stop, and another one finishes the rest before any lease lapses.

    `late`: the answer to the request comes when the worker is already draining.
    """

    def play(stage: Stage, at: int) -> None:
        workers: list[Tree] = []

        def tell(link: Link) -> None:
            _first(workers).tell(signal.SIGTERM)
            if late:
                stage.proxy.hold(link)

        stage.proxy.begin(Fault(at, tell, "passing"))
        workers.append(stage.start())
        stage.wait(lambda: stage.proxy.struck.is_set() or stage.is_done(), SOON)
        if late:  # a worker that has not started never says that
            stage.wait(lambda: "draining" in workers[0].said(), ASLEEP)
            stage.proxy.let_in()
        stage.leave(workers[0], told=True, codes=(0, 5))
        stage.check(ALWAYS, AT_REST)
        stage.start(direct=True)
        stage.wait_done(SOON)

    return play


def held(stage: Stage, at: int) -> None:
    """Another session, such as psql, has locked a message: only that message waits."""
    stage.proxy.begin()
    with stage.somebody_locks_first():
        worker = stage.start()
        stage.wait(stage.are_others_done, SOON)
        if not stage.are_others_done():
            stage.find("a row that is locked holds up others")
    stage.wait_done(SOON)
    stage.leave(worker)


def deaf(stage: Stage, at: int) -> None:
    """No notification arrives; the messages come while the worker sleeps."""
    stage.proxy.begin(deaf=True)
    stage.start()
    stage.wait(lambda: stage.execute("select 1 from django_mq_workerheartbeat").fetchone(), SOON)
    time.sleep(ASLEEP)
    stage.send()
    stage.wait_done(SOON)


def twins(stage: Stage, at: int) -> None:
    """Two workers; a handler runs for longer than its lease, which is renewed."""
    stage.proxy.begin()
    with trace.shut_gate(stage.directory):
        workers = [stage.start(gated=True, LEASE=SHORT) for _ in range(2)]
        stage.wait(lambda: trace.events(stage.directory), SOON)
        stage.wait_lapsed(2.5 * SHORT)
    stage.wait_done(SOON)
    stage.leave(*workers)


KINDS = {
    "none": Kind(nothing, swept=False, strict=True),
    "term": Kind(term(), strict=True),
    "term-late": Kind(term(late=True), strict=True),
    "held": Kind(held, swept=False, only=("writes", "reads", "unused", "calls", "coroutines")),
    "deaf": Kind(deaf, swept=False, sends=True, only=("writes",)),
    "twins": Kind(twins, swept=False, strict=True, only=("long",)),
    "tree-before": Kind(tree("before"), spare=1),
    "tree-after": Kind(tree("after"), spare=1),
    "tree-commit": Kind(tree("after", COMMIT), spare=1, among=COMMIT),
    "child-before": Kind(child("before"), begun=1),
    "child-after": Kind(child("after"), begun=1),
    "child-inside": Kind(child("before", INSIDE), among=INSIDE),
    "child-begins": Kind(child("after", BEGINS), begun=1, among=BEGINS),
    "cut-before": Kind(cut("before")),
    "cut-after": Kind(cut("after")),
    "commit-lost": Kind(lose_commit, among=COMMIT),
    "refuse": Kind(refuse),
    "stall": Kind(stall),
    "freeze": Kind(freeze(), spare=1, freezes=True),
    "freeze-inside": Kind(freeze(INSIDE), spare=1, freezes=True, among=INSIDE),
}
