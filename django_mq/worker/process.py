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
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from django_mq import __version__, handlers
from django_mq.messages import ClaimedRow, Delivery
from django_mq.outcomes import EXHAUSTED, DeadLettered, Failure
from django_mq.signals import announce_worker, worker_started, worker_stopped
from django_mq.store import Cursor, doorbell, recover, settle
from django_mq.worker import chores, reporting
from django_mq.worker.aio import AsyncRunner
from django_mq.worker.appetite import Appetite
from django_mq.worker.board import Places
from django_mq.worker.calling import is_conflict
from django_mq.worker.database import LOST, Outage, Statements
from django_mq.worker.ending import Ended, Settled
from django_mq.worker.executor import Executor
from django_mq.worker.fetcher import Fetcher, Terms
from django_mq.worker.hand import Hand, Task
from django_mq.worker.leases import Keeper
from django_mq.worker.listener import Listener
from django_mq.worker.policies import policies
from django_mq.worker.sorting import Sorter
from django_mq.worker.wakeup import Deadline, Wakeup

if TYPE_CHECKING:
    from django_mq.worker import Worker

logger = logging.getLogger("django_mq")

#: Batches that wait in hand at most, so that claiming and running overlap; and that a slice of
#: short handlers may have, so that a commit is for many.
MOST_BATCHES = 4
#: How often a drain tries to release a row that somebody has locked for a moment.
RELEASE_TRIES = 4
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
        self._unsorted: deque[ClaimedRow] = deque()
        self._in_doubt = self._worked = False
        self._taken = 0
        batch = worker.batch_size or settings.batch_size
        most = batch * MOST_BATCHES
        self.appetite = Appetite(least=worker.threads, most=most, batch=batch)
        self.hand = Hand(batch=batch, most=most, on_room=self.wakeup.poke)
        self.board = worker.board()
        self.sorter = Sorter(settings)
        self.statements = Statements(worker.alias)
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
                lease=self._lease,
                most=most,
            )
            for number in range(worker.threads)
        ]
        self.runner = AsyncRunner(
            alias=worker.alias,
            hand=self.hand,
            board=self.board,
            first_place=worker.threads * batch,
            slots=worker.async_slots,
            lease=self._lease,
            outage=self.outage,
            policy=policy,
            settled=self._settled,
            on_room=self.wakeup.poke,
        )
        self.keeper = Keeper(
            alias=worker.alias,
            hand=self.hand,
            lease=self._lease,
            shortest_lease=min(
                [settings.lease, *(options.lease for options in settings.queues.values())]
            ),
            outage=self.outage,
            beat=self._beat,
            chores=self._chores,
            chores_every=chores.EVERY,
            policy=policy,
            freed=self._freed,
        )
        self.listener = self._make_listener()
        self.fetcher = Fetcher(
            patterns=worker.queues,
            terms=self._terms,
            room=self._room,
            take=self._take,
            buried=self._buried,
            claimer=lambda: f"{self.id}:{next(self._claims)}",
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
        if self._in_doubt:
            self._release_unanswered(cursor)
        if self._unsorted:
            self._sort(cursor)
        if self.hand.waiting() and self.hand.stuck():
            self._give_back(cursor)
        if self.wakeup.take_ring():
            self.fetcher.rang()
        sleep = self.fetcher.fetch(cursor)
        self._worked = True
        self.outage.over()
        return sleep

    def _give_back(self, cursor: Cursor) -> None:
        """Every executor is busy for long: siblings may have time for what waits here."""
        self.appetite.lose()
        tasks = self.hand.give_back()
        self.board.add_taken(-len(tasks))
        if self._left is not None:
            self._left += len(tasks)
        self._release(tasks)
        doorbell.ring(cursor)

    def _release_unanswered(self, cursor: Cursor) -> None:
        """A claim may have been committed whose answer was lost: nobody has its rows in hand."""
        known = [fence.id for _, fence in self.hand.fences()]
        if recover.release_all_but(cursor, worker=self.id, running=known):
            self.fetcher.freed()
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
        if self.listener:
            self.listener.stop()
        self._release(self.hand.close())
        self.runner.end(deadline.left())
        for executor in self.executors:
            executor.join(_a_little(deadline))
        if self.runner.is_alive():
            self.runner.join(_a_little(deadline))
        threads = (*self.executors, self.runner)
        done = not (self.runner.cut_off or any(thread.is_alive() for thread in threads))
        if done:
            self.keeper.finish_recovering(LAST_RECOVERY)
        self._giving_up.set()
        self._release(self.hand.close())
        self.keeper.end()
        self.keeper.join(5.0)
        self.statements.close()
        announce_worker(
            worker_stopped,
            self.id,
            f"worker {self.id} stopped"
            + ("" if done else f": {len(self.board.running())} message(s) still ran"),
            drained=done,
        )
        return done

    def _release(self, tasks: list[Task]) -> None:
        fences = [task.delivery.fence for task in tasks]
        fences += [Delivery(row).fence for row in self._unsorted]
        self._unsorted.clear()
        # First: a renewal that is under way has their rows locked for a moment, a later one not.
        self.hand.settled([fence.id for fence in fences])
        tries = RELEASE_TRIES
        try:
            while fences and tries:
                cursor = self.statements.cursor()
                released = settle.release(cursor, fences)
                left = settle.still_ours(cursor, fences) if len(released) < len(fences) else ()
                fences = [fence for fence in fences if fence.id in left]
                tries -= 1
                if fences:
                    self.outage.wait_quietly()
        except LOST:
            self.statements.close()
        if fences:
            logger.warning("could not release %s message(s): their leases lapse", len(fences))

    # ---- what the parts ask of each other

    def _take(self, cursor: Cursor, rows: list[ClaimedRow], lapsed: bool) -> None:
        self.hand.hold((row.queue, Delivery(row).fence) for row in rows)
        self.board.add_taken(len(rows))
        if self._left is not None:
            self._left = max(0, self._left - len(rows))
        self._taken += len(rows)
        self._unsorted.extend(rows)
        self._sort(cursor, first=lapsed)
        self.appetite.fed(len(rows))

    def _sort(self, cursor: Cursor, *, first: bool = False) -> None:
        """Give what was claimed to its handlers; the rest waits if the database is lost.

        What is to be `first` goes before everything that is in hand.
        """
        tasks: list[Task] = []
        others: list[int] = []
        try:
            while self._unsorted:
                row = self._unsorted[0]
                try:
                    found = self.sorter.sort(cursor, [row])
                except LOST:
                    raise
                except Exception:  # the lease lapses, and the attempt counts
                    logger.exception(
                        "message %s cannot be sorted", row.id, extra={"event": "sorting_failed"}
                    )
                    found = []
                self._unsorted.popleft()
                tasks += found
                if not found:
                    others.append(row.id)
        finally:
            if others:
                self.hand.settled(others)
                self.fetcher.freed()
            self._hand_out(tasks, first)

    def _hand_out(self, tasks: list[Task], first: bool) -> None:
        coroutines = [
            task for task in tasks if task.handler.is_async and not task.delivery._row.suspect
        ]
        if coroutines:
            if not self.runner.is_alive():
                self.runner.start()
            self.runner.submit(coroutines)
        started = {task.delivery.id for task in coroutines}
        waiting = [task for task in tasks if task.delivery.id not in started]
        if first:
            self.hand.put_back(waiting)
        else:
            self.hand.put(waiting)

    def _settled(self, ids: list[int], any_back: bool) -> None:
        if any_back:
            self._freed()
        self.hand.settled(ids)

    def _freed(self) -> None:
        self.fetcher.freed()
        self.wakeup.poke()

    def _buried(self, rows: list[ClaimedRow]) -> None:
        failure = Failure("WorkerVanished", "the lease lapsed")
        for row in rows:
            outcome = DeadLettered(EXHAUSTED, failure)
            reporting.one_ended(Ended(Delivery(row), Settled.FAILED, outcome=outcome))

    def _lease(self, queue: str) -> float:
        return self.settings.queue(queue).lease

    def _terms(self, queue: str) -> Terms:
        options = self.settings.queue(queue)
        return Terms(
            kind=_kind_of(queue, self.settings),
            lease=options.lease,
            batch_size=self.worker.batch_size or options.batch_size,
            batch_bytes=options.batch_bytes,
        )

    def _room(self, kind: str) -> int:
        rooms = []
        if kind != "async":
            rooms.append(self._room_in_hand())
        if kind != "sync":
            rooms.append(0 if self.hand.exclusive() else self.runner.room())
        if self._left is not None:
            rooms.append(self._left)
        return min(rooms)

    def _room_in_hand(self) -> int:
        if self.hand.stuck():
            return 0
        self.hand.tell_below(self.appetite.least)
        return self.appetite.room(self.hand.waiting())

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
        chores.run(cursor, self.settings)


def _a_little(deadline: Deadline) -> float | None:
    """Seconds to wait for a thread that may have nothing to do: it ends in no time."""
    left = deadline.left()
    return None if left is None else max(left, 0.5)


def _named(queues: Sequence[str]) -> str:
    return "all queues" if "#" in queues else f"queues {', '.join(queues)}"


def _kind_of(queue: str, settings: Any) -> str:
    """Return what the handlers of `queue` need: `sync` (threads), `async` (slots) or `both`."""
    kinds = {
        each.is_async
        for each in handlers.all_handlers()
        if queue in handlers.allowed_queues(each, settings)
    }
    if kinds == {True}:
        return "async"
    return "both" if True in kinds else "sync"
