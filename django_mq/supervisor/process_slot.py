"""One slot for a child process: the process, its running messages and its reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
from dataclasses import dataclass, field
from time import monotonic

from django_mq.executor.scoreboard import Entry, Scoreboard
from django_mq.messages import Fence
from django_mq.policy.outcomes import cut_short
from django_mq.policy.stack import running_in
from django_mq.supervisor.link_lines import (
    DECLARED,
    FAILED,
    FINISHED,
    ORDER,
    SIGNALLED,
    STOP,
    TOTALS,
    UNFINISHED,
    encode_dead,
)
from django_mq.supervisor.memory import MEGABYTE, resident_bytes
from django_mq.supervisor.send_buffer import SendBuffer
from django_mq.supervisor.slot_totals import SlotTotals
from django_mq.supervisor.stack_file import StackFile
from django_mq.worker.orders import LEAVE, QUIET
from django_mq.worker.recovery import DeadWorker

logger = logging.getLogger("django_mq")

#: Seconds before a process that died before it worked is replaced: the first wait, which then
#: doubles, and the longest.
RESTART_DELAY, MAX_RESTART_DELAY = 1.0, 60.0
#: Seconds after which a process counts as working, even if there was nothing to run.
WORKING_AFTER = 60.0


@dataclass(slots=True)
class ProcessSlot:
    """A slot of the supervisor, and the process that has it now.

    - `recycling`: the process drains, because of its memory or a signal, and is to be replaced.
    - `too_large`: it is recycled because of its memory.
    - `quiet`: an operator told it to claim nothing; so does the next process.
    - `leaving`: an operator told it to stop; the slot gets no new one.
    - `overran`: it is being ended for a handler that ran past its timeout, after it has written the
      stacks of its handlers to `stacks`; `killed_because`: the message for which it was sent
      SIGKILL, and why; empty if it was not.
    - `stopped`: by fence, the operator who stopped a message, and when its process is ended for it.
    - `declared`: a process has stored the schedules of the code, so that the next one does not.
    - `failures`: how many processes in a row ended here before they worked.
    - `failure`: the error that ended the process, if it reported one.
    - `totals`: the totals of the handlers of all its processes.
    - `recovering`: the dead workers that it was asked to settle but has not settled yet.
    - `to_send`: the requests that its link has not taken yet.
    """

    scoreboard: Scoreboard
    worker: str = ""
    pid: int = 0
    link: socket.socket | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    failures: int = 0
    failure: str = ""
    received: bytes = b""
    last_line: bytes = b""
    recycling: bool = False
    too_large: bool = False
    quiet: bool = False
    leaving: bool = False
    overran: bool = False
    stopped: dict[Fence, tuple[str, float]] = field(default_factory=dict)
    killed_because: str = ""
    finished: bool = False
    declared: bool = False
    recovering: dict[str, DeadWorker] = field(default_factory=dict)
    totals: SlotTotals = field(default_factory=SlotTotals)
    stacks: StackFile = field(default_factory=StackFile)
    to_send: SendBuffer = field(default_factory=SendBuffer)

    @property
    def failure_class(self) -> str:
        """The class of `failure`, without its text, which may name hosts or quote rows."""
        return self.failure.partition(":")[0]

    def prepare(self) -> None:
        """Prepare for the next process, which has a new id."""
        self.scoreboard.wipe()
        self.totals.next_process()
        self.stacks.wipe()
        self.worker = secrets.token_hex(8)
        self.started_at = monotonic()
        self.failure = ""
        self.received = self.last_line = b""
        self.recycling = self.too_large = self.overran = False
        self.killed_because = ""
        self.stopped.clear()

    def assign(self, pid: int, link: socket.socket) -> None:
        """Give the slot to a process that was just started."""
        self.pid, self.link = pid, link

    def signal(self, number: int) -> None:
        """Send the process a signal, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self, *, wait: bool) -> int | None:
        """Return the status of the process if it has ended, after reading all its reports."""
        pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        if not pid:
            return None
        while self.read_link():
            pass
        self.close_link()
        self.pid = 0
        if self._worked():
            self.failures = 0
        return status

    def kill(self) -> None:
        """Kill the process; the slot gets no new one."""
        if self.pid:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        self.finished = True

    def send(self, dead: DeadWorker) -> bool:
        """Ask the process to settle the messages of `dead`; return False if it is unreachable."""
        if self.link is None or not self.to_send.accepts():
            return False
        self.recovering[dead.worker] = dead
        self.to_send.add(encode_dead(dead))
        self.to_send.send(self.link)
        return True

    def read_link(self) -> bool:
        """Read reports of the process; return whether there may be more."""
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
        *lines, self.received = (self.received + words).split(b"\n")
        for line in lines:
            if line in (FINISHED, UNFINISHED):
                self.last_line = line
            elif line == SIGNALLED:
                self.recycling = True
            elif line == DECLARED:
                self.declared = True
            elif line.startswith(TOTALS):
                self.totals.take(line.removeprefix(TOTALS))
            elif line.startswith(STOP):
                fence, by, after = json.loads(line.removeprefix(STOP))
                self.stopped[Fence(*fence)] = (by, monotonic() + after)
            elif line.startswith(ORDER):
                order = line.removeprefix(ORDER).decode()
                self.leaving, self.quiet = order == LEAVE, order == QUIET
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
            self.to_send = SendBuffer()

    def kill_overrun(self) -> None:
        """Kill the process if one of its handlers ran past its timeout, once its stacks are known.

        If the handler ends at the last moment, the process lives.
        """
        if self.killed_because:
            return
        now = monotonic()
        late = [each for each in self.scoreboard.read(self.worker) if self._is_late(each, now)]
        if not late:
            self.overran = False
        elif not self.overran:
            self.overran = True
            self.stacks.ask(self.pid, now)
        elif self.stacks.answered(late[0].thread, now):
            self._report_overrun(late[0], now)
            self.signal(signal.SIGKILL)

    def _report_overrun(self, late: Entry, now: float) -> None:
        # Queue and handler, which the failed attempt's line has, would cost each start here.
        fence, ran = late.fence, now - late.began if late.began else 0.0
        by, _ = self.stopped.get(fence, (None, 0.0))
        end = "ran past its timeout" if by is None else f"was {cut_short(by)}"
        self.killed_because = f"message {fence.id} {end}"
        logger.log(
            logging.ERROR if by is None else logging.WARNING,
            "message %s, attempt %s: %s: ending process %s",
            fence.id,
            fence.attempt,
            cut_short(by, ran),
            self.pid,
            extra={
                "event": "handler_timed_out" if by is None else "handler_stopped",
                "message_id": fence.id,
                "attempt": fence.attempt,
                "duration": ran,
            },
        )

    def _is_late(self, entry: Entry, now: float) -> bool:
        return min(entry.deadline, self.stopped.get(entry.fence, ("", entry.deadline))[1]) <= now

    def recycle_large(self, megabytes: int) -> None:
        """Drain the process, so that it is replaced, if it uses more than `megabytes` of memory."""
        rss = resident_bytes(self.pid)
        if not (self.recycling or self.leaving) and rss > megabytes * MEGABYTE:
            logger.info(
                "worker %s uses %d MB, more than MAX_RSS: draining and replacing it",
                self.worker,
                rss // MEGABYTE,
                extra={"event": "worker_recycled", "worker": self.worker},
            )
            self.recycling = self.too_large = True
            self.signal(signal.SIGTERM)

    def dead_worker(self, reason: str, *, planned: bool) -> DeadWorker:
        """Return the running messages that lose an attempt by the death of the process.

        After a kill for a timeout, other atomic messages do not lose one: they were rolled back.
        If only stopped messages were late, that death was `planned`, too.
        """
        now = monotonic()
        dead = DeadWorker(worker=self.worker, reason=reason, planned=planned, died_at=now)
        stacks = self.stacks.read() if self.overran else {}
        for entry in self.scoreboard.read(self.worker):
            id = entry.fence.id
            if entry.began:
                dead.ran[id] = now - entry.began
            if self.overran and self._is_late(entry, now):
                dead.timed_out.append(entry.fence)
                if entry.fence in self.stopped:
                    dead.stopped[id] = self.stopped[entry.fence][0]
                dead.stacks[id] = running_in(stacks, entry.thread)
            elif not self.overran or not entry.atomic:
                dead.lost.append(entry.fence)
        if dead.timed_out:
            dead.planned |= len(dead.stopped) == len(dead.timed_out)
        return dead

    def restart_delay(self) -> float:
        """Return the seconds after which to replace the process that ended here.

        Zero if it worked: then its start was not the cause. Or a message loses an attempt by its
        death, and the retry policy of that message is the brake.
        """
        if self._worked():
            return 0.0
        self.failures += 1
        # The exponent is bounded, too: a float would overflow after 17 hours of restarts.
        return min(RESTART_DELAY * 2.0 ** min(self.failures - 1, 10), MAX_RESTART_DELAY)

    def _worked(self) -> bool:
        return self.scoreboard.used() or monotonic() - self.started_at >= WORKING_AFTER
