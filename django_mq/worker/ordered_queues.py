"""The ordered queues that this worker owns, by a lease that it keeps renewing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from itertools import filterfalse
from time import monotonic

from psycopg.errors import InsufficientPrivilege

from django_mq.policy.line_marks import FRONT, LineMarks
from django_mq.signals import (
    LoggedSignal,
    announce_queue,
    queue_assigned,
    queue_caught_up,
    queue_unassigned,
)
from django_mq.store import Cursor, adopt, frozen_owner, ordered_queues, poll
from django_mq.worker.watermarks import Rest

logger = logging.getLogger("django_mq")

#: Seconds for which a queue is owned. A process that freezes for longer loses the queue, and the
#: messages that it had claimed from it.
LEASE_SECONDS = 6.0
#: Seconds between two turns. Each renews the leases, and takes queues that have no owner.
TURN_SECONDS = 1.5
#: The number of messages that a turn examines to find messages that are not in the line yet.
ADOPT_WINDOW = 5000


class OrderedQueues:
    """The ordered queues of one worker process; used by the thread that claims.

    `queues` are the queues that it may own; `on_owned` is called for each new one. The process
    takes no queue for which it is `busy` with something that may take long, and none while it
    drains. A worker is frozen if it has written no heartbeat for `silent` seconds.
    """

    def __init__(
        self,
        worker: str,
        queues: Iterable[str],
        *,
        on_owned: Callable[[], None],
        busy: Callable[[str], bool],
        silent: float = LEASE_SECONDS,
    ) -> None:
        self._worker = worker
        self._queues = sorted(queues)
        self._on_owned = on_owned
        self._busy = busy
        #: Seconds without a heartbeat after which a worker does not live.
        self.silent = silent
        self._passed_over: set[str] = set()
        self._turn_at = 0.0
        self._adopt_at: dict[str, float] = {}
        self._adopt_rests: dict[str, Rest] = {}
        self._adopt_after: dict[str, adopt.AdoptResume | None] = {}
        self._catching_up: set[str] = set()
        self._previous_owners: dict[str, str] = {}
        #: The owned queues, each with where its line begins.
        self.owned: dict[str, LineMarks] = {}
        #: Whether the worker drains.
        self.draining = False

    def maintain(self, cursor: Cursor) -> None:
        """If a turn is due, renew the owned queues, and take queues that have no owner."""
        now = monotonic()
        if now < self._turn_at and not any(map(self._may_take, self._passed_over)):
            return
        self._turn_at = now + TURN_SECONDS
        self._passed_over = set(filterfalse(self._may_take, self._queues)) - self.owned.keys()
        for queue in self._queues:
            if queue in self._passed_over:
                continue
            ours = ordered_queues.own(cursor, queue=queue, worker=self._worker, lease=LEASE_SECONDS)
            if ours is None:
                if queue in self.owned:
                    self._remove([queue])
                continue
            if queue in self.owned and ours.previous_owner != self._worker:
                self._remove([queue])  # another worker had it meanwhile
            if queue not in self.owned:
                self._add(queue, previous_owner=ours.previous_owner)
        for queue in self.owned:
            self._adopt(cursor, queue)
            if (previous_owner := self._previous_owners.get(queue)) is not None:
                self._end_frozen(cursor, queue, previous_owner)

    def stuck(self, due: Collection[str]) -> set[str]:
        """Return the owned queues among `due` whose messages cannot start here soon."""
        return {queue for queue in self.owned if queue in due and self._busy(queue)}

    def any_moves(
        self, cursor: Cursor, due: Collection[str], skipping: Callable[[str], bool]
    ) -> bool:
        """Return whether one of the `due` queues is making progress, here or at its owner."""
        queues = [queue for queue in self._queues if queue in due]
        return bool(queues) and poll.any_line_moves(
            cursor, queues=queues, skipping=list(filter(skipping, queues)), soon=LEASE_SECONDS
        )

    def forget_marks(self) -> None:
        """Let the next claim of each line begin at the front."""
        self.owned.update(dict.fromkeys(self.owned, FRONT))

    def next_turn_in(self) -> float:
        """Return the seconds until `maintain()` has something to do."""
        return max(0.0, self._turn_at - monotonic()) if self._queues else float("inf")

    def caught_up(self, queue: str) -> None:
        """Announce, once per assignment, that `queue` is empty."""
        if queue in self._catching_up:
            self._catching_up.discard(queue)
            self._announce(
                queue_caught_up, queue, "is empty for the first time since it was assigned"
            )

    def disown(self, cursor: Cursor, queues: Collection[str] | None = None) -> None:
        """Give up `queues` (None: all) to siblings; call it once none of their handlers runs."""
        if self.owned:
            ordered_queues.disown(
                cursor, worker=self._worker, queues=None if queues is None else sorted(queues)
            )
            left = sorted(self.owned if queues is None else self.owned.keys() & set(queues))
            self._passed_over.update(left)  # take them as soon as possible, not at the next turn
            self._remove(left)

    def hand_over(self, cursor: Cursor, queue: str, *, to: str) -> None:
        """Give `queue` to the worker `to`; call it once none of its handlers runs here."""
        if ordered_queues.hand_over(
            cursor, queue=queue, worker=self._worker, to=to, lease=LEASE_SECONDS
        ):
            self._remove([queue])

    def _may_take(self, queue: str) -> bool:
        return not (self.draining or self._busy(queue))

    def _add(self, queue: str, *, previous_owner: str | None) -> None:
        self.owned[queue] = FRONT
        if previous_owner not in (None, self._worker):
            self._previous_owners[queue] = previous_owner
        self._catching_up.add(queue)
        self._adopt_at[queue] = 0.0
        self._adopt_rests[queue] = Rest()
        self._adopt_after[queue] = None
        self._announce(queue_assigned, queue, "is assigned")
        self._on_owned()

    def _remove(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self.owned.pop(queue, None)
            self._previous_owners.pop(queue, None)
            self._catching_up.discard(queue)
            self._announce(queue_unassigned, queue, "is no longer assigned")

    def _announce(self, signal: LoggedSignal, queue: str, text: str) -> None:
        announce_queue(signal, queue, f"{text} to worker {self._worker}", worker=self._worker)

    def _end_frozen(self, cursor: Cursor, queue: str, previous_owner: str) -> None:
        """End the transactions that the previous owner left open, if it is frozen.

        It is frozen if its heartbeats have stopped, too. Then an open transaction would hold up the
        line until the server ends it. The line does have to wait for that if another role owns the
        session, or behind a transaction pooler, where sessions are shared. If the owner lives, the
        line waits for its handler.
        """
        extra = {"event": "owner_frozen", "queue": queue}
        try:
            for id in frozen_owner.end(
                cursor, queue=queue, worker=previous_owner, silent=self.silent
            ):
                logger.warning(
                    "worker %s, which owned queue %s, is frozen: ended its transaction with"
                    " message %s",
                    previous_owner,
                    queue,
                    id,
                    extra=extra,
                )
        except InsufficientPrivilege as error:
            logger.warning(
                "worker %s, which owned queue %s, is frozen, and its transaction cannot be"
                " ended: %s",
                previous_owner,
                queue,
                error,
                extra=extra,
            )
            del self._previous_owners[queue]

    def _adopt(self, cursor: Cursor, queue: str) -> None:
        """Move messages of `queue` that are not in its line into it, ADOPT_WINDOW per turn.

        The next turn continues where this one stopped. This takes at most a tenth of the time.
        """
        began = monotonic()
        if began >= self._adopt_at[queue]:
            after = self._adopt_after.get(queue)
            adopted = adopt.adopt(cursor, queue=queue, limit=ADOPT_WINDOW, after=after)
            now = monotonic()
            self._adopt_after[queue] = adopted.resume
            self._adopt_at[queue] = now + self._adopt_rests[queue].after(now - began)
            if adopted.rows:
                self.owned[queue] = FRONT  # they may belong before the mark
                self._on_owned()
