"""Processes: starts them, ends the one past its time, passes on what a dead one ran, restarts.

The supervisor has no database connection and no threads: it forks, and it must outlive
whatever handlers do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.worker import child as child_process
from django_mq.worker.board import Board
from django_mq.worker.child import BROKEN, DONE, GAVE_UP, GOODBYE, OUT_OF_TIME, describe_exit
from django_mq.worker.leases import DeadWorker
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
#: The first restart is at once, the next after 1 s, doubling; a child that lived so long is well.
LONGEST_BRAKE, WELL_AFTER = 60.0, 60.0
#: Seconds between the starts of two processes in one place that grew too large.
RECYCLE_PAUSE = 1.0
#: Ids in a line of the log, at most.
MOST_IDS = 20
#: Seconds that the last process has to settle what the others left.
LAST = 10.0
MEGABYTE = 1024 * 1024


@dataclass(slots=True)
class Child:
    """One place for a child process, and the process that has it now."""

    board: Board
    worker: str = ""
    pid: int = 0
    link: socket.socket | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    failures: int = 0
    heard: bytes = b""
    last_word: bytes = b""
    recycling: bool = False
    overran: bool = False
    finished: bool = False
    recovering: dict[str, DeadWorker] = field(default_factory=dict)


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
        self._children = [Child(Board(places)) for _ in range(processes)]
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
                self._hear(place)

    def _step(self) -> None:
        for number in self._signals.read():
            self._stop(number)
        for place in self._children:
            if place.pid:
                self._end_overrun(place)
                self._watch_memory(place)
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
                    self._signal(place, signal.SIGKILL)
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
            self._signal(place, signal.SIGTERM)

    # ---- children

    def _start(self, place: Child, *, last: bool = False) -> None:
        ours, theirs = socket.socketpair()
        place.board.wipe()
        place.worker = secrets.token_hex(8)
        place.heard = place.last_word = b""
        place.recycling = place.overran = False
        sys.stdout.flush()
        sys.stderr.flush()
        with signals_held():
            pid = os.fork()
            if pid == 0:
                self._become_child(place, ours, theirs, last)
        theirs.close()
        place.pid, place.link, place.started_at = pid, ours, monotonic()

    def _become_child(
        self, place: Child, ours: socket.socket, theirs: socket.socket, last: bool
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

    def _reap(self, place: Child, *, wait: bool = False) -> None:
        pid, status = os.waitpid(place.pid, 0 if wait else os.WNOHANG)
        if not pid:
            return
        while place.link is not None and self._hear(place):
            pass
        self._hang_up(place)
        place.pid = 0
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

    def _ended(self, place: Child) -> None:
        if place.recycling:
            place.restart_at = place.started_at + RECYCLE_PAUSE
        elif not self._orphaned:
            place.finished = True

    def _died(self, place: Child, reason: str) -> None:
        now = monotonic()
        entries = list(place.board.read(place.worker))
        dead = DeadWorker(worker=place.worker, reason=reason)
        for entry in entries:
            if place.overran and entry.deadline <= now:
                dead.timed_out.append(entry.fence)
            elif not place.overran or not entry.atomic:
                dead.lost.append(entry.fence)
        self._orphaned[dead.worker] = dead
        ids = ", ".join(str(entry.fence.id) for entry in entries[:MOST_IDS])
        if place.finished or self._deadline is not None:
            place.finished = True
            self._code = max(self._code, BROKEN)
            then = ""
        else:
            brake = self._brake(place, now)
            place.restart_at = now + brake
            then = f"; restarting in {brake:g} s" if brake else "; restarting now"
        logger.error(
            "worker %s: %s while it ran %s%s",
            place.worker,
            reason,
            f"message {ids}{', ...' if len(entries) > MOST_IDS else ''}" if ids else "nothing",
            then,
            extra={"event": "worker_died", "worker": place.worker},
        )

    def _brake(self, place: Child, now: float) -> float:
        if place.overran:
            return 0.0  # it was ended here; timeouts come no faster than they last
        if now - place.started_at >= WELL_AFTER:
            place.failures = 0
        place.failures += 1
        return 0.0 if place.failures == 1 else min(2.0 ** (place.failures - 2), LONGEST_BRAKE)

    def _end_overrun(self, place: Child) -> None:
        now = monotonic()
        for entry in place.board.read(place.worker):
            if entry.deadline <= now and not place.overran:
                logger.error(
                    "message %s ran past its timeout: ending process %s",
                    entry.fence.id,
                    place.pid,
                    extra={"event": "handler_timed_out", "message_id": entry.fence.id},
                )
                place.overran = True
                self._signal(place, signal.SIGKILL)

    def _watch_memory(self, place: Child) -> None:
        if self._max_rss is None or place.recycling or self._deadline is not None:
            return
        rss = resident_bytes(place.pid)
        if rss > self._max_rss * MEGABYTE:
            logger.info(
                "worker %s has %d MB: draining and replacing it",
                place.worker,
                rss // MEGABYTE,
                extra={"event": "worker_recycled", "worker": place.worker},
            )
            place.recycling = True
            self._signal(place, signal.SIGTERM)

    def _pass_on(self) -> None:
        """Hand what dead processes held to a child that lives; it says when that is settled."""
        alive = [place for place in self._children if place.link is not None]
        if not alive:
            return
        for worker, dead in list(self._orphaned.items()):
            place = max(alive, key=lambda place: place.started_at if place.failures else 0.0)
            with contextlib.suppress(OSError):
                assert place.link is not None
                place.link.sendall(child_process.encode(dead))
                place.recovering[worker] = self._orphaned.pop(worker)

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

    def _hear(self, place: Child) -> bool:
        """Read what a child said; return whether it may have said more."""
        assert place.link is not None
        try:
            words = place.link.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            words = b""
        if not words:
            self._hang_up(place)
        *lines, place.heard = (place.heard + words).split(b"\n")
        for line in lines:
            if line in (GOODBYE, GAVE_UP):
                place.last_word = line
            else:
                place.recovering.pop(line.decode(), None)
        return bool(words)

    def _hang_up(self, place: Child) -> None:
        if place.link is not None:
            place.link.close()
            place.link = None

    def _signal(self, place: Child, number: int) -> None:
        if place.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, number)

    def _kill_all(self) -> None:
        for place in self._children:
            if place.pid:
                self._signal(place, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(place.pid, 0)
                place.pid = 0
            place.finished = True

    def _is_live(self) -> bool:
        return all(place.pid or place.finished for place in self._children)

    def _is_ready(self) -> bool:
        return self._deadline is None and self._is_live()


def resident_bytes(pid: int) -> int:
    """Return how much memory process `pid` has; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
