"""One place for a child process: who has it now, what it runs, and what it says."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.worker.child import GAVE_UP, GOODBYE, encode
from django_mq.worker.leases import DeadWorker

if TYPE_CHECKING:
    from django_mq.worker.board import Board

logger = logging.getLogger("django_mq")

#: The first restart is at once, the next after 1 s, doubling; a child that lived so long is well.
LONGEST_BRAKE, WELL_AFTER = 60.0, 60.0
MEGABYTE = 1024 * 1024
#: Seconds that a process has to take a message from its supervisor.
PATIENCE = 0.5


@dataclass(slots=True)
class Place:
    """A place on the board of the supervisor, and the process that has it now.

    `recycling`: it is to be replaced for its memory; `overran`: it was ended, for a handler that
    ran past its time. `recovering` is what it was asked to settle and has not yet.
    """

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

    def prepare(self) -> None:
        """Make it ready for the next process, which gets a new id."""
        self.board.wipe()
        self.worker = secrets.token_hex(8)
        self.heard = self.last_word = b""
        self.recycling = self.overran = False

    def taken_by(self, pid: int, link: socket.socket) -> None:
        """A process was started here."""
        self.pid, self.link, self.started_at = pid, link, monotonic()

    def signal(self, number: int) -> None:
        """Send the process a signal, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self, *, wait: bool) -> int | None:
        """Return the status of the process if it ended, and hear all that it said before."""
        pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        if not pid:
            return None
        while self.hear():
            pass
        self.hang_up()
        self.pid = 0
        return status

    def kill(self) -> None:
        """End the process now, and take leave of the place."""
        if self.pid:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        self.finished = True

    def pass_on(self, dead: DeadWorker) -> bool:
        """Ask the process to settle what `dead` held; False when it cannot be reached."""
        if self.link is None:
            return False
        try:
            self.link.settimeout(PATIENCE)  # a frozen process must not freeze its supervisor
            self.link.sendall(encode(dead))
            self.link.settimeout(None)
        except OSError:
            return False
        self.recovering[dead.worker] = dead
        return True

    def hear(self) -> bool:
        """Read what the process said; return whether it may have said more."""
        if self.link is None:
            return False
        try:
            words = self.link.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            words = b""
        if not words:
            self.hang_up()
        *lines, self.heard = (self.heard + words).split(b"\n")
        for line in lines:
            if line in (GOODBYE, GAVE_UP):
                self.last_word = line
            else:
                self.recovering.pop(line.decode(), None)
        return bool(words)

    def hang_up(self) -> None:
        """Close the link; a process that still lives drains."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def end_overrun(self) -> None:
        """Kill the process if a handler of it ran past its time."""
        now = monotonic()
        for entry in self.board.read(self.worker):
            if entry.deadline <= now and not self.overran:
                logger.error(
                    "message %s ran past its timeout: ending process %s",
                    entry.fence.id,
                    self.pid,
                    extra={"event": "handler_timed_out", "message_id": entry.fence.id},
                )
                self.overran = True
                self.signal(signal.SIGKILL)

    def end_large(self, megabytes: int) -> None:
        """Have the process drain if it has more memory than that; it is replaced then."""
        rss = resident_bytes(self.pid)
        if not self.recycling and rss > megabytes * MEGABYTE:
            logger.info(
                "worker %s has %d MB: draining and replacing it",
                self.worker,
                rss // MEGABYTE,
                extra={"event": "worker_recycled", "worker": self.worker},
            )
            self.recycling = True
            self.signal(signal.SIGTERM)

    def what_it_held(self, reason: str) -> DeadWorker:
        """Return what is charged for the end of the process: what ran, as the board has it.

        If it was ended for a timeout, its other atomic messages are not: they were undone.
        """
        now = monotonic()
        dead = DeadWorker(worker=self.worker, reason=reason)
        for entry in self.board.read(self.worker):
            if self.overran and entry.deadline <= now:
                dead.timed_out.append(entry.fence)
            elif not self.overran or not entry.atomic:
                dead.lost.append(entry.fence)
        return dead

    def brake(self) -> float:
        """Return after how many seconds a process that died here is replaced."""
        if self.overran:
            return 0.0  # it was ended here; timeouts come no faster than they last
        if monotonic() - self.started_at >= WELL_AFTER:
            self.failures = 0
        self.failures += 1
        return 0.0 if self.failures == 1 else min(2.0 ** (self.failures - 2), LONGEST_BRAKE)


def resident_bytes(pid: int) -> int:
    """Return how much memory process `pid` has; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
