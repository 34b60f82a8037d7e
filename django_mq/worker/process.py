"""One run of a worker: the parts, what they ask of each other, and the loop.

The loop fetches, then sleeps on the wakeup. Executors and the async runner take from the hand
what the fetcher put there; the keeper renews leases on the side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from django_mq import __version__
from django_mq.messages import ClaimedRow
from django_mq.signals import announce_worker, worker_started, worker_stopped
from django_mq.store import Cursor, doorbell, queue_backoff, recover
from django_mq.worker import chores
from django_mq.worker.aio import AsyncRunner
from django_mq.worker.appetite import Appetite
from django_mq.worker.board import Places
from django_mq.worker.calling import is_conflict
from django_mq.worker.claiming import Claims
from django_mq.worker.database import LOST, Outage, Statements
from django_mq.worker.ending import DONE, Ended, any_back
from django_mq.worker.executor import Executor
from django_mq.worker.fetcher import Fetcher
from django_mq.worker.hand import Hand
from django_mq.worker.intake import Intake
from django_mq.worker.leases import Keeper
from django_mq.worker.listener import Listener
from django_mq.worker.ownership import Ownership
from django_mq.worker.policies import policies
from django_mq.worker.queue_backoff import QueueBackoffs
from django_mq.worker.sorting import Sorter, line_of
from django_mq.worker.tasks import Task
from django_mq.worker.terms import QueueTerms
from django_mq.worker.vacuuming import Vacuuming
from django_mq.worker.wakeup import Deadline, Wakeup

if TYPE_CHECKING:
    from django_mq.worker import Worker

logger = logging.getLogger("django_mq")

#: Batches that a slice of short handlers may have, so that a commit is for many. Twice as many
#: wait in hand at most: what is claimed at once while a slice runs, and what runs next.
SLICE_BATCHES = 4
#: Seconds until a level is written again whose row somebody had locked.
WRITE_AGAIN = 0.25
#: Seconds between two looks, in a drain, at the lines of what still runs.
LINES_EVERY = 0.5
#: Seconds at the end in which what a dead sibling held is still settled.
LAST_RECOVERY = 5.0


class Process:
    """The parts of one run, and the loop."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.settings = settings = worker.settings
        self.id = worker._given_id or secrets.token_hex(8)
        self.wakeup = Wakeup()
        self._giving_up = threading.Event()
        self.outage = Outage(self._giving_up)
        self._claims = count(1)
        self._left = worker.max_messages
        self._deadline = Deadline(worker.max_seconds)
        self._in_doubt = self._worked = self._draining = False
        self._taken = 0
        batch = worker.batch_size or settings.batch_size
        most = batch * SLICE_BATCHES
        self.appetite = Appetite(least=worker.threads, most=2 * most, batch=batch)
        self.hand = Hand(batch=batch, most=most, on_room=self.wakeup.poke)
        self.board = worker.board()
        self.statements = Statements(worker.alias)
        self.backoffs = QueueBackoffs(settings, shut=self.hand.shut)
        self.terms = terms = QueueTerms(settings, batch_size=worker.batch_size)
        self.ownership = Ownership(
            self.id,
            terms.ordered(worker.queues),
            now_owned=lambda: self.fetcher.freed(),
            busy=lambda: self._draining or self.hand.stuck(),
        )
        policy = policies(settings)
        self.executors = [
            Executor(
                number,
                alias=worker.alias,
                hand=self.hand,
                places=Places(self.board, number * batch, batch),
                outage=self.outage,
                policy=policy,
                settled=self._settled,
                slice_seconds=settings.slice_seconds,
                lease=terms.lease,
                shortest_lease=terms.shortest_lease(),
                most=most,
                easing=self.backoffs.queues,
            )
            for number in range(worker.threads)
        ]
        self.runner = AsyncRunner(
            alias=worker.alias,
            hand=self.hand,
            board=self.board,
            first_place=worker.threads * batch,
            slots=worker.async_slots,
            lease=terms.lease,
            outage=self.outage,
            policy=policy,
            settled=self._settled,
            on_room=self.wakeup.poke,
        )
        self.vacuuming = Vacuuming(worker.alias)
        self.keeper = Keeper(
            alias=worker.alias,
            hand=self.hand,
            lease=terms.lease,
            shortest_lease=terms.shortest_lease(),
            outage=self.outage,
            beat=self._beat,
            chores=self._chores,
            chores_every=chores.EVERY,
            policy=policy,
            freed=self._freed,
            probes=self.backoffs.probes,
        )
        self.intake = Intake(
            sorter=Sorter(settings),
            hand=self.hand,
            runner=self.runner,
            backoffs=self.backoffs,
            statements=self.statements,
            outage=self.outage,
            freed=lambda: self.fetcher.freed(),
            uncount=self._uncount,
        )
        self.claims = Claims(
            worker=self.id,
            claimer=self._claimer,
            owned=self.ownership.owned,
            holding=self.hand.holds,
            probing=self.backoffs.probe_started,
            shut=self.hand.shut_queues,
        )
        self.listener = self._make_listener()
        self.fetcher = Fetcher(
            patterns=worker.queues,
            terms=terms.of,
            room=self._room,
            take=self._take,
            closed=self._close,
            claims=self.claims,
            ownership=self.ownership,
            poll=settings.poll_interval,
        )

    # ---- the loop

    def run(self, until_empty: bool) -> bool:
        if not self.worker._given_id:  # a supervised process waits for its database
            self.statements.cursor()
        self._start()
        try:
            self._loop(until_empty)
        finally:
            done = self._drain()
        return done

    def _loop(self, until_empty: bool) -> None:
        looked_after = -1
        while not self.worker._stopping.is_set() and not self._deadline.passed():
            try:
                sleep = self._fetch()
            except Exception as error:
                lost = isinstance(error, LOST)
                if not (lost or self._worked):
                    raise  # the tables are not there, or not ours: say so instead of trying
                if not lost:
                    logger.exception("worker loop failed", extra={"event": "loop_failed"})
                self.statements.close()
                self._in_doubt = True
                self.fetcher.freed()  # what it was about to claim is still due
                if not is_conflict(error):
                    self.outage.wait(error)
                continue
            done = self._left == 0 or (until_empty and self.fetcher.empty)
            if done and self.hand.idle() and not self.keeper.recovering():
                if looked_after == self._taken or self._left == 0:
                    return
                looked_after = self._taken  # the last handlers may have broadcast: look once more
                self.fetcher.freed()
                continue
            left = self._deadline.left()
            self.wakeup.sleep(sleep if left is None else min(sleep, left))

    def _fetch(self) -> float:
        cursor = self.statements.cursor()
        if self.wakeup.take_ring():
            self.fetcher.rang()
        if self._in_doubt or self.backoffs.noted() or not self._hurries():
            self._look_after_hand(cursor)
        sleep = self.fetcher.fetch(cursor)
        self._worked = True
        self.outage.over()
        return min(sleep, WRITE_AGAIN) if self.backoffs.noted() else sleep

    def _hurries(self) -> bool:
        """Say whether somebody waits for a claim, and nothing here comes before it."""
        return self.fetcher.hurries and self.hand.idle()

    def _look_after_hand(self, cursor: Cursor) -> None:
        """Before a claim: start what may start by now, give back what must not or cannot soon."""
        if self._in_doubt:
            self._release_unanswered(cursor)
        self.intake.sort(cursor)
        due_lines = self.ownership.owned & self.fetcher.due
        if (due_lines or self.hand.waiting()) and self.hand.stuck():
            self._give_back(cursor, due_lines)
        elif self.appetite.glutted(self.hand.waiting()):
            self._give_back(cursor, ())
        if self.backoffs.noted():
            self.backoffs.write(cursor)
            if not self.backoffs.noted():
                self.fetcher.freed()  # with another level there is another time to wait for
        if given_back := self.hand.take_given_back():
            self._return(given_back)
        self.intake.go_on()

    def _give_back(self, cursor: Cursor, lines: Collection[str]) -> None:
        """What waits here waits for long: siblings may have time for it."""
        waiting = self.hand.give_back()
        if waiting:
            self.appetite.lose()
            self._return(waiting)
        lines = {*lines, *(task.delivery.queue for task in waiting)} & self.ownership.owned
        free = [queue for queue in lines if not self.hand.holds(queue)]
        if free:
            self.ownership.let_go(cursor, free)
        if waiting or free:
            doorbell.ring(cursor)

    def _return(self, tasks: list[Task]) -> None:
        """Give back to their queues what was taken and did not start."""
        self._uncount(len(tasks))
        self.intake.release(tasks)
        self.fetcher.freed()

    def _uncount(self, count: int) -> None:
        """So many that were taken go back."""
        self.board.add_taken(-count)
        if self._left is not None:
            self._left += count

    def _release_unanswered(self, cursor: Cursor) -> None:
        """A claim may have been committed whose answer was lost: nobody has its rows in hand."""
        known = [fence for _, fence in self.hand.fences()]
        if recover.release_all_but(cursor, worker=self.id, running=[f.id for f in known]):
            self.fetcher.freed()
        if self.backoffs.active:
            claimers = {fence.claimed_by for fence in known}
            queue_backoff.drop_probes_of(cursor, worker=self.id, but=claimers)
        self._in_doubt = False

    def _start(self) -> None:
        self.keeper.start()
        self.take_recoveries()
        if self.listener:
            self.listener.start()
        for executor in self.executors:
            executor.start()
        announce_worker(
            worker_started,
            self.id,
            f"worker {self.id} started: {_named(self.worker.queues)},"
            f" {self.worker.threads} thread(s), process {os.getpid()}",
            queues=self.worker.queues,
        )

    def take_recoveries(self) -> None:
        """Hand the keeper what it is to settle: from any thread."""
        with contextlib.suppress(IndexError):
            while True:
                self.keeper.recover(*self.worker._to_recover.pop())

    def _drain(self) -> bool:
        """End what runs, give back what did not start, say goodbye."""
        deadline = Deadline(self.worker.drain_seconds)
        self._draining = True
        if self.listener:
            self.listener.stop()
        self.intake.release(self.hand.close())
        self.runner.end(deadline.left())
        for executor in self.executors:
            self._wait_for(executor, _a_little(deadline))
        if self.runner.is_alive():
            self._wait_for(self.runner, _a_little(deadline))
        threads = (*self.executors, self.runner)
        done = not (self.runner.cut_off or any(thread.is_alive() for thread in threads))
        if done:
            self.keeper.finish_recovering(LAST_RECOVERY)
        self._giving_up.set()
        self.intake.release(self.hand.close())
        self._let_go()
        self.keeper.end()
        self.keeper.join(5.0)
        self.vacuuming.end()
        self.statements.close()
        announce_worker(
            worker_stopped,
            self.id,
            f"worker {self.id} stopped"
            + ("" if done else f": {len(self.board.running())} message(s) still ran"),
            drained=done,
        )
        return done

    def _wait_for(self, thread: threading.Thread, seconds: float | None) -> None:
        deadline = Deadline(seconds)
        while thread.is_alive() and not deadline.passed():
            self._keep_lines()
            left = deadline.left()
            thread.join(LINES_EVERY if left is None else min(left, LINES_EVERY))

    def _keep_lines(self) -> None:
        """Keep the lines of what still runs: their next owner would end it. Give up the others."""
        if not self.ownership.owned:
            return
        try:
            cursor = self.statements.cursor()
            if free := [queue for queue in self.ownership.owned if not self.hand.holds(queue)]:
                self.ownership.let_go(cursor, free)
            self.ownership.tend(cursor)
        except LOST:
            self.statements.close()

    def _let_go(self) -> None:
        """Give up the ordered queues, and write down the last that is known of backoffs."""
        try:
            cursor = self.statements.cursor()
            self.backoffs.write(cursor)
            self.ownership.let_go(cursor)
        except LOST:
            self.statements.close()

    # ---- what the parts ask of each other

    def _take(self, cursor: Cursor, rows: list[ClaimedRow], lapsed: bool) -> None:
        self.board.add_taken(len(rows))
        if self._left is not None:
            self._left = max(0, self._left - len(rows))
        self._taken += len(rows)
        self.appetite.fed(len(rows))
        self.intake.take(cursor, rows, first=lapsed, asked_at=self.fetcher.asked_at)

    def _close(self, closed: Collection[str], easing: Collection[str]) -> None:
        """Give back what waits of these queues; of those that back off, all but their probes."""
        self.hand.drop(closed, keeping=())
        self.hand.drop(easing, keeping={claimer for _, claimer in self.backoffs.probes()})

    def _settled(self, ended: Sequence[Ended]) -> None:
        """These are no longer in hand: from any thread, after their commit."""
        rows = [each.delivery._row for each in ended]
        limited = self.claims.limited
        moved = bool(limited) and any(row.queue in limited for row in rows)
        lined = [
            each
            for each in ended
            if each.delivery._row.key is not None or each.delivery._row.ordered
        ]
        for each in lined:
            moved = True
            if each.settled not in DONE and (line := line_of(each.delivery._row)):
                self.hand.break_line(line)
        if self.backoffs.active and self.backoffs.note(ended):
            self.wakeup.poke()
        self.hand.settled([row.id for row in rows])
        if any_back(ended):
            self._freed()
        elif moved:
            self.fetcher.moved()
            self.wakeup.poke()

    def _freed(self) -> None:
        self.fetcher.freed()
        self.wakeup.poke()

    def _claimer(self) -> str:
        return f"{self.id}:{next(self._claims)}"

    def _room(self, kind: str) -> int:
        rooms = []
        if kind != "async":
            rooms.append(self._room_in_hand())
        if kind != "sync":
            slots = self.runner.room() - self.hand.coroutines()
            rooms.append(0 if self.hand.exclusive() else slots)
        if self._left is not None:
            rooms.append(self._left)
        return min(rooms)

    def _room_in_hand(self) -> int:
        if self.hand.stuck():
            return 0
        room = self.appetite.room(self.hand.waiting())
        if not room:  # only who waits for room is told of it: it wakes up the loop
            self.hand.tell_below(self.appetite.least)
            room = self.appetite.room(self.hand.waiting())  # some may be gone meanwhile
        return room

    def _make_listener(self) -> Listener | None:
        wakeup = self.settings.wakeup
        if wakeup == "poll":
            return None
        return Listener(self.worker.alias if wakeup == "notify" else wakeup, self.wakeup)

    def _beat(self) -> dict[str, Any]:
        listener = self.listener
        return {
            "worker": self.id,
            "queues": self.worker.queues,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "wakeup": "poll" if not listener else "notify" if listener.healthy() else "degraded",
            "draining": self.worker._stopping.is_set(),
            "running": self.board.running(),
        }

    def _chores(self, cursor: Cursor) -> None:
        if chores.run(cursor, self.settings):
            self.vacuuming.tend(cursor)


def _a_little(deadline: Deadline) -> float | None:
    """Seconds to wait for a thread that may have nothing to do: it ends in no time."""
    left = deadline.left()
    return None if left is None else max(left, 0.5)


def _named(queues: Sequence[str]) -> str:
    return "all queues" if "#" in queues else f"queues {', '.join(queues)}"
