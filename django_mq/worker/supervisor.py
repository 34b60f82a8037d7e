"""Processes: starts them, ends the one past its time, passes on what a dead one ran, restarts.

The supervisor has no database connection and no threads: it forks, and it must outlive
whatever handlers do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.worker import child as child_process
from django_mq.worker.board import Board
from django_mq.worker.child import BROKEN, DONE, GAVE_UP, GOODBYE, OUT_OF_TIME, describe_exit
from django_mq.worker.leases import DeadWorker
from django_mq.worker.place import Place
from django_mq.worker.shutdown import STOP_SIGNALS, Signals, leave_by, signals_held
from django_mq.worker.wakeup import Deadline

if TYPE_CHECKING:
    from django_mq.worker import Worker
    from django_mq.worker.health import Health

logger = logging.getLogger("django_mq")

#: Seconds between two looks at what runs: how exact timeouts are.
TICK = 0.2
#: Seconds that a child has, after its drain ran out of time, before it is killed.
GRACE = 2.0
#: Seconds between the starts of two processes in one place that grew too large.
RECYCLE_PAUSE = 1.0
#: Ids in a line of the log, at most.
MOST_IDS = 20
#: Seconds that the last process has to settle what the others left.
LAST = 10.0


class Supervisor:
    """Runs `processes` children until they are done or a signal says stop.

    `make_worker(number, id, board)` is called in the child. `max_rss` is in megabytes.
    """

    def __init__(
        self,
        make_worker: Callable[[int, str, Board], Worker],
        *,
        processes: int,
        places: int,
        drain_seconds: float,
        until_empty: bool = False,
        max_rss: int | None = None,
        health: Health | None = None,
    ) -> None:
        self._make_worker = make_worker
        self._until_empty = until_empty
        self._drain_seconds = drain_seconds
        self._max_rss = max_rss
        self._health = health
        self._children = [Place(Board(places)) for _ in range(processes)]
        self._orphaned: dict[str, DeadWorker] = {}
        self._deadline: Deadline | None = None
        self._code = DONE

    def run(self) -> int:
        """Return the exit code.

        0 done or drained, 1 a child died while it drained, 5 the drain ran out of time.
        """
        with Signals(signal.SIGCHLD) as signals:
            self._signals = signals
            try:
                for place in self._children:
                    self._start(place)
                while not all(place.finished for place in self._children):
                    self._wait()
                    self._step()
                self._settle_the_rest()
            finally:
                self._kill_all()
        return self._code

    # ---- one turn

    def _wait(self) -> None:
        readers = [self._signals.fileno()]
        readers += [place.link.fileno() for place in self._children if place.link is not None]
        if self._health is not None:
            readers.append(self._health.fileno())
        readable = select.select(readers, [], [], TICK)[0]
        if self._health is not None and self._health.fileno() in readable:
            self._health.answer(self._is_live(), self._is_ready())
        for place in self._children:
            if place.link is not None and place.link.fileno() in readable:
                place.hear()

    def _step(self) -> None:
        for number in self._signals.read():
            self._stop(number)
        for place in self._children:
            if place.pid:
                place.end_overrun()
                if self._max_rss is not None and self._deadline is None:
                    place.end_large(self._max_rss)
                self._reap(place)
        for place in self._children:
            if not place.pid and not place.finished:
                if self._deadline is not None:
                    place.finished = True
                elif monotonic() >= place.restart_at:
                    self._start(place)
        self._pass_on()
        if self._deadline is not None and self._deadline.passed():
            for place in self._children:
                if place.pid:
                    place.signal(signal.SIGKILL)
                    self._reap(place, wait=True)

    def _stop(self, number: int) -> None:
        if self._deadline is not None:
            self._kill_all()
            leave_by(number)
        logger.info(
            "%s: draining for at most %g s; again to leave at once",
            signal.Signals(number).name,
            self._drain_seconds,
            extra={"event": "draining"},
        )
        self._deadline = Deadline(self._drain_seconds + GRACE)
        for place in self._children:
            place.signal(signal.SIGTERM)

    # ---- children

    def _start(self, place: Place, *, last: bool = False) -> None:
        ours, theirs = socket.socketpair()
        place.prepare()
        sys.stdout.flush()
        sys.stderr.flush()
        with signals_held():
            pid = os.fork()
            if pid == 0:
                self._become_child(place, ours, theirs, last)
        theirs.close()
        place.taken_by(pid, ours)

    def _become_child(
        self, place: Place, ours: socket.socket, theirs: socket.socket, last: bool
    ) -> None:
        code = child_process.BROKEN
        try:
            ours.close()
            for other in self._children:
                if other.link is not None:
                    other.link.close()
            if self._health is not None:
                self._health.close()
            self._signals.restore()
            signals = Signals()
            signals.install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            number = self._children.index(place)
            worker = self._make_worker(number, place.worker, place.board)
            code = child_process.run(
                worker, theirs, signals, until_empty=self._until_empty, last=last
            )
        except BaseException:
            logger.exception("worker failed", extra={"event": "worker_failed"})
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not sys.exit: threads may be stuck in handlers, and exit hooks are the parent's.
            os._exit(code)

    def _reap(self, place: Place, *, wait: bool = False) -> None:
        pid = place.pid
        status = place.reap(wait=wait)
        if status is None:
            return
        self._orphaned.update(place.recovering)
        place.recovering = {}
        if place.last_word == GOODBYE:
            self._ended(place)
        elif place.last_word == GAVE_UP or wait:
            if not place.recycling:
                self._code = OUT_OF_TIME
                place.finished = True
            self._died(place, "its drain ran out of time")
        elif place.overran:
            self._died(place, f"process {pid} was ended")
        else:
            self._died(place, f"process {pid} {describe_exit(status)}")

    def _ended(self, place: Place) -> None:
        if place.recycling:
            place.restart_at = place.started_at + RECYCLE_PAUSE
        elif not self._orphaned:
            place.finished = True

    def _died(self, place: Place, reason: str) -> None:
        ran = [entry.fence.id for entry in place.board.read(place.worker)]
        self._orphaned[place.worker] = place.what_it_held(reason)
        if place.finished or self._deadline is not None:
            place.finished = True
            self._code = max(self._code, BROKEN)
            then = ""
        else:
            brake = place.brake()
            place.restart_at = monotonic() + brake
            then = f"; restarting in {brake:g} s" if brake else "; restarting now"
        logger.error(
            "worker %s: %s while it ran %s%s",
            place.worker,
            reason,
            _listed(ran),
            then,
            extra={"event": "worker_died", "worker": place.worker},
        )

    def _pass_on(self) -> None:
        """Hand what dead processes held to a child that lives; it says when that is settled."""
        alive = [place for place in self._children if place.link is not None]
        if not alive:
            return
        for worker, dead in list(self._orphaned.items()):
            place = max(alive, key=lambda place: place.started_at if place.failures else 0.0)
            if place.pass_on(dead):
                del self._orphaned[worker]

    def _settle_the_rest(self) -> None:
        """Let one more process settle what the last ones left behind, and do nothing else."""
        if not self._orphaned:
            return
        place = self._children[0]
        place.finished = True
        self._start(place, last=True)
        self._pass_on()
        if place.link is not None:
            place.link.shutdown(socket.SHUT_WR)
        deadline = Deadline(LAST)
        while place.pid and not deadline.passed():
            self._wait()
            for number in self._signals.read():
                self._stop(number)
            self._reap(place)

    def _kill_all(self) -> None:
        for place in self._children:
            place.kill()

    def _is_live(self) -> bool:
        return all(place.pid or place.finished for place in self._children)

    def _is_ready(self) -> bool:
        return self._deadline is None and self._is_live()


def _listed(ids: list[int]) -> str:
    if not ids:
        return "nothing"
    more = ", ..." if len(ids) > MOST_IDS else ""
    return f"message {', '.join(map(str, ids[:MOST_IDS]))}{more}"
