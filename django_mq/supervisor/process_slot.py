"""One slot for a child process: which process has it, what that runs, and what it reports."""

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

from django_mq.supervisor.child import FAILED, GAVE_UP, GOODBYE, encode
from django_mq.worker.recovery import DeadWorker

if TYPE_CHECKING:
    from django_mq.executor.scoreboard import Scoreboard

logger = logging.getLogger("django_mq")

#: Seconds until a process that died before it worked is replaced: at first, then doubling, at most.
FIRST_BRAKE, LONGEST_BRAKE = 1.0, 60.0
#: Seconds after which a process counts as working, even if there was nothing to run.
WELL_AFTER = 60.0
MEGABYTE = 1024 * 1024
#: Seconds that a process has to read a line from its supervisor.
PATIENCE = 0.5


@dataclass(slots=True)
class ProcessSlot:
    """A slot of the supervisor, and the process that has it now.

    - `recycling`: the process is to be replaced, for its memory.
    - `overran`: it was killed for a handler that ran past its timeout.
    - `failures`: how many processes in a row ended here before they worked.
    - `failure`: the error that ended the process, if it named one.
    - `recovering`: the dead workers that it was asked to settle and has not yet.
    """

    scoreboard: Scoreboard
    worker: str = ""
    pid: int = 0
    link: socket.socket | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    failures: int = 0
    failure: str = ""
    heard: bytes = b""
    last_word: bytes = b""
    recycling: bool = False
    overran: bool = False
    finished: bool = False
    recovering: dict[str, DeadWorker] = field(default_factory=dict)

    def prepare(self) -> None:
        """Get ready for the next process, which has a new id."""
        self.scoreboard.wipe()
        self.worker = secrets.token_hex(8)
        self.started_at = monotonic()
        self.failure = ""
        self.heard = self.last_word = b""
        self.recycling = self.overran = False

    def assign(self, pid: int, link: socket.socket) -> None:
        """Give the slot to a process that was just started."""
        self.pid, self.link = pid, link

    def signal(self, number: int) -> None:
        """Send the process a signal, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self, *, wait: bool) -> int | None:
        """Return the status of the process if it ended, after reading all that it reported."""
        pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        if not pid:
            return None
        while self.hear():
            pass
        self.close_link()
        self.pid = 0
        if self._worked():
            self.failures = 0
        return status

    def kill(self) -> None:
        """Kill the process; the slot gets no other one."""
        if self.pid:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        self.finished = True

    def send(self, dead: DeadWorker) -> bool:
        """Ask the process to settle what `dead` held; return False if it cannot be reached."""
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
        """Read what the process reported; return whether there may be more."""
        if self.link is None:
            return False
        try:
            words = self.link.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            words = b""
        if not words:
            self.close_link()
        *lines, self.heard = (self.heard + words).split(b"\n")
        for line in lines:
            if line in (GOODBYE, GAVE_UP):
                self.last_word = line
            elif line.startswith(FAILED):
                self.failure = line.removeprefix(FAILED).decode(errors="replace")
            else:
                self.recovering.pop(line.decode(), None)
        return bool(words)

    def close_link(self) -> None:
        """Close the link; a process that is still alive drains."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def kill_overrun(self) -> None:
        """Kill the process if one of its handlers ran past its timeout."""
        now = monotonic()
        for entry in self.scoreboard.read(self.worker):
            if entry.deadline <= now and not self.overran:
                logger.error(
                    "message %s ran past its timeout: ending process %s",
                    entry.fence.id,
                    self.pid,
                    extra={"event": "handler_timed_out", "message_id": entry.fence.id},
                )
                self.overran = True
                self.signal(signal.SIGKILL)

    def is_live(self, *, draining: bool) -> bool:
        """Say whether the process runs and, unless it drains, its loop and its renewal move."""
        if not self.pid:
            return self.finished
        return draining or self.recycling or not self.scoreboard.still()

    def recycle_large(self, megabytes: int) -> None:
        """Drain the process, to be replaced, if it has more memory than `megabytes`."""
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

    def charges(self, reason: str) -> DeadWorker:
        """Return the running messages, which lose an attempt by the death of the process.

        After a kill for a timeout its other atomic messages lose none: they were rolled back.
        """
        now = monotonic()
        dead = DeadWorker(worker=self.worker, reason=reason)
        for entry in self.scoreboard.read(self.worker):
            if self.overran and entry.deadline <= now:
                dead.timed_out.append(entry.fence)
            elif not self.overran or not entry.atomic:
                dead.lost.append(entry.fence)
        return dead

    def brake(self) -> float:
        """Return after how many seconds to replace the process that ended here.

        At once if it worked. Then either its start was not the cause, or a message loses an
        attempt by its death, and the retry policy of that message is the brake.
        """
        if self._worked():
            return 0.0
        self.failures += 1
        # The exponent is bounded too: a float would overflow after 17 hours of restarts.
        return min(FIRST_BRAKE * 2.0 ** min(self.failures - 1, 10), LONGEST_BRAKE)

    def _worked(self) -> bool:
        return self.scoreboard.used() or monotonic() - self.started_at >= WELL_AFTER


def resident_bytes(pid: int) -> int:
    """Return the resident memory of process `pid`; 0 where the system does not provide it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
