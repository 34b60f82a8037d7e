"""The side connection: leases are renewed, the heart beats, dead siblings' messages are settled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from django_mq.messages import Delivery
from django_mq.outcomes import TimedOut, WorkerLost
from django_mq.store import leases as store
from django_mq.store import lines, queue_backoff, recover, settle
from django_mq.worker import consequences, reporting, timings
from django_mq.worker.database import LOST, Outage, Statements
from django_mq.worker.ending import Ended, end, failed_row

if TYPE_CHECKING:
    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow, Fence
    from django_mq.worker.hand import Hand

logger = logging.getLogger("django_mq")

#: Seconds between two heartbeats.
BEAT = 10.0
#: Seconds between two looks at what a dead process left: its backends hold locks for a moment.
RECOVERY_PAUSE = 0.25
#: So long, in seconds, a claim of a process that is dead may still commit: the server had it.
LATE_CLAIM = 1.0


@dataclass(slots=True)
class DeadWorker:
    """A worker process that ended, and the messages that are charged for it.

    `timed_out` ran past their time; `lost` were running when the process died.
    """

    worker: str
    reason: str
    timed_out: list[Fence] = field(default_factory=list)
    lost: list[Fence] = field(default_factory=list)
    told_at: float = field(default_factory=monotonic)


class Keeper(threading.Thread):
    """Keeps what this process holds: a thread with a connection of its own.

    `beat` gives the heartbeat's words, `chores` is called with the cursor now and then; `probes`
    are queue and claimer of the probes that run here.
    """

    def __init__(
        self,
        *,
        alias: str,
        hand: Hand,
        lease: Callable[[str], float],
        shortest_lease: float,
        outage: Outage,
        beat: Callable[[], dict[str, Any]],
        chores: Callable[[Any], None],
        chores_every: float,
        policy: Callable[[ClaimedRow], RetryPolicy],
        freed: Callable[[], None],
        probes: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        super().__init__(name="mq-keeper", daemon=True)
        self._statements_alias = alias
        self._hand = hand
        self._lease = lease
        self._shortest_lease = shortest_lease
        self._outage = outage
        self._beat = beat
        self._chores = chores
        self._chores_every = chores_every
        self._policy = policy
        self._freed = freed
        self._probes = probes
        self._lock = threading.Condition()
        self._dead: list[tuple[DeadWorker, Callable[[], None]]] = []
        self._wake = threading.Event()
        self._ending = False

    def recover(self, dead: DeadWorker, done: Callable[[], None]) -> None:
        """Settle, soon, what `dead` held, then call `done`: from any thread."""
        with self._lock:
            self._dead.append((dead, done))
        self._wake.set()

    def recovering(self) -> bool:
        """Say whether something that a dead process held is not settled yet."""
        return bool(self._dead)

    def finish_recovering(self, seconds: float) -> None:
        """Wait until it is settled, for so many seconds at most."""
        with self._lock:
            self._lock.wait_for(lambda: not self._dead, seconds)

    def end(self) -> None:
        """Strike this worker from the list and end the thread."""
        self._ending = True
        self._wake.set()

    def run(self) -> None:
        self._statements = Statements(self._statements_alias)
        due = {self._renew: 0.0, self._say_alive: 0.0, self._do_chores: 0.0}
        every = {
            self._renew: self._shortest_lease / 3,
            self._say_alive: BEAT,
            self._do_chores: self._chores_every,
        }
        try:
            while not self._ending:
                try:
                    self._recover_all()
                    for step, at in due.items():
                        if monotonic() >= at:
                            self._try(step)
                            due[step] = monotonic() + every[step]
                    self._outage.over()
                except LOST as error:
                    self._statements.close()
                    self._outage.wait(error)
                    continue
                wait = RECOVERY_PAUSE if self._dead else min(due.values()) - monotonic()
                self._wake.wait(max(0.0, wait))
                self._wake.clear()
            self._leave()
        finally:
            self._statements.close()

    def _try(self, step: Callable[[], None]) -> None:
        """Do `step`; what it raises, unless the database is lost, must not stop the renewals."""
        try:
            step()
        except LOST:
            raise
        except Exception:
            logger.exception("keeper failed", extra={"event": "keeper_failed"})
            self._statements.close()

    def _renew(self) -> None:
        by_lease: dict[float, list[Fence]] = {}
        for queue, fence in self._hand.fences():
            by_lease.setdefault(self._lease(queue), []).append(fence)
        for lease, fences in by_lease.items():
            store.renew(self._statements.cursor(), fences, lease=lease)
        for queue, claimer in self._probes():
            queue_backoff.renew_probe(
                self._statements.cursor(), queue=queue, claimer=claimer, lease=self._lease(queue)
            )

    def _say_alive(self) -> None:
        words = self._beat()
        counted = timings.of(words["worker"])
        store.beat(
            self._statements.cursor(), **words, timings=counted.snapshot() if counted else {}
        )

    def _do_chores(self) -> None:
        self._chores(self._statements.cursor())

    def _leave(self) -> None:
        try:
            store.leave(self._statements.cursor(), worker=self._beat()["worker"])
        except LOST:
            logger.debug("could not take leave: the database is away")

    def _recover_all(self) -> None:
        with self._lock:
            dead = list(self._dead)
        for each in dead:
            try:
                settled = self._recover(each[0])
            except LOST:
                raise
            except Exception:
                logger.exception(
                    "could not settle what worker %s held: its leases lapse",
                    each[0].worker,
                    extra={"event": "keeper_failed"},
                )
                self._statements.close()
                settled = True
            if settled:
                each[1]()
                with self._lock:
                    self._dead.remove(each)
                    self._lock.notify_all()

    def _recover(self, dead: DeadWorker) -> bool:
        """Settle what can be settled now; say whether nothing is left."""
        cursor = self._statements.cursor()
        charged = [*dead.timed_out, *dead.lost]
        freed = recover.release_all_but(
            cursor, worker=dead.worker, running=[fence.id for fence in charged]
        )
        ended = self._charge(dead, dead.timed_out, TimedOut("the handler ran past its timeout"))
        ended += self._charge(dead, dead.lost, WorkerLost(dead.reason))
        for each in ended:
            reporting.one_ended(each)
        probed = queue_backoff.drop_probes_of(cursor, worker=dead.worker)
        lines.disown(cursor, worker=dead.worker)
        if freed or ended or probed:
            self._freed()
        if recover.anything_left(cursor, worker=dead.worker):
            return False
        if monotonic() - dead.told_at < LATE_CLAIM:
            return False
        store.leave(cursor, worker=dead.worker)
        return True

    def _charge(self, dead: DeadWorker, fences: list[Fence], error: Exception) -> list[Ended]:
        if not fences:
            return []
        suspect = isinstance(error, WorkerLost)
        ended: list[Ended] = []
        cursor = self._statements.cursor()
        with self._statements.transaction():
            for row in recover.lock_running(cursor, fences):
                delivery = Delivery(row)
                each = end(delivery, self._policy(row), error, seconds=0.0)
                failed = failed_row(each, suspect=suspect)
                settle.fail(cursor, [failed] if failed else [])
                ended.append(each)
            consequences.follow(cursor, ended)
        return ended
