"""Ordered queues: which of them this worker owns, for as long as it says so often enough."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from time import monotonic
from typing import TYPE_CHECKING

from psycopg.errors import InsufficientPrivilege

from django_mq.signals import announce_queue, queue_assigned, queue_caught_up, queue_unassigned
from django_mq.store import lines

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: Seconds for which a queue is owned. Whoever freezes for as long has lost it, and what it had
#: claimed of it.
LEASE = 6.0
#: Seconds between two turns: the lease is renewed, and queues that nobody owns are taken.
TURN = 1.5
#: Messages that one statement puts into a line.
PIECE = 1000


class Ownership:
    """The ordered queues of one worker process; used by the thread that claims.

    `queues` are those that it may own; `now_owned` is called when one became ours. While the
    process is `busy` with what may take long it takes none.
    """

    def __init__(
        self,
        worker: str,
        queues: Iterable[str],
        *,
        now_owned: Callable[[], None],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker = worker
        self._queues = sorted(queues)
        self._now_owned = now_owned
        self._busy = busy
        self._was_busy = False
        self._turn_at = 0.0
        self._adopt_at: dict[str, float] = {}
        self._catching_up: set[str] = set()
        self._before: dict[str, str] = {}
        self.owned: set[str] = set()

    def tend(self, cursor: Cursor) -> None:
        """Renew what is owned, and take what nobody owns: when it is time."""
        now = monotonic()
        waits = now < self._turn_at and not (self._was_busy and not self._busy())
        if waits or not self._queues:
            return
        self._turn_at = now + TURN
        self._was_busy = self._busy()
        for queue in self._queues:
            if self._was_busy and queue not in self.owned:
                continue
            ours = lines.own(cursor, queue=queue, worker=self._worker, lease=LEASE)
            if ours is None:
                if queue in self.owned:
                    self._unassigned([queue])
            elif queue not in self.owned:
                self._assigned(queue, before=ours.before)
        for queue in self.owned:
            self._adopt(cursor, queue)
            if (before := self._before.get(queue)) is not None:
                self._end_frozen(cursor, queue, before)

    def turn_in(self) -> float:
        """Seconds until `tend()` has something to do."""
        return max(0.0, self._turn_at - monotonic()) if self._queues else float("inf")

    def caught_up(self, queue: str) -> None:
        """Nothing of `queue` is left: said once after it was assigned."""
        if queue in self._catching_up:
            self._catching_up.discard(queue)
            self._announce(
                queue_caught_up, queue, "is empty for the first time since it was assigned"
            )

    def let_go(self, cursor: Cursor, queues: Collection[str] | None = None) -> None:
        """Give up `queues`, or all: others may have time for them. After the last handler."""
        if self.owned:
            lines.disown(
                cursor, worker=self._worker, queues=None if queues is None else sorted(queues)
            )
            self._unassigned(sorted(self.owned if queues is None else self.owned & set(queues)))

    def _assigned(self, queue: str, *, before: str | None) -> None:
        self.owned.add(queue)
        if before not in (None, self._worker):
            self._before[queue] = before
        self._catching_up.add(queue)
        self._adopt_at[queue] = 0.0
        self._announce(queue_assigned, queue, "is assigned")
        self._now_owned()

    def _unassigned(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self.owned.discard(queue)
            self._before.pop(queue, None)
            self._catching_up.discard(queue)
            self._announce(queue_unassigned, queue, "is no longer assigned")

    def _announce(self, signal: Signal, queue: str, text: str) -> None:
        announce_queue(signal, queue, f"{text} to worker {self._worker}", worker=self._worker)

    def _end_frozen(self, cursor: Cursor, queue: str, before: str) -> None:
        """The owner before us let its lease lapse, so none of its threads gets to run.

        A transaction that it left open would hold up the line until the server ends it. Without
        the right to do so (the role is another one) the line waits that long.
        """
        try:
            for id in lines.end_frozen(cursor, queue=queue, worker=before):
                logger.warning(
                    "worker %s, which owned queue %s, is frozen: ended its transaction with"
                    " message %s",
                    before,
                    queue,
                    id,
                    extra={"event": "owner_frozen", "queue": queue},
                )
        except InsufficientPrivilege as error:
            logger.warning(
                "worker %s, which owned queue %s, is frozen, and its transaction cannot be"
                " ended: %s",
                before,
                queue,
                error,
                extra={"event": "owner_frozen", "queue": queue},
            )
            del self._before[queue]

    def _adopt(self, cursor: Cursor, queue: str) -> None:
        """Put what waits beside the line into it: looking takes a tenth of the time at most."""
        began = monotonic()
        if began >= self._adopt_at[queue]:
            adopted = lines.adopt(cursor, queue=queue, limit=PIECE)
            now = monotonic()
            self._adopt_at[queue] = now + (0.0 if adopted == PIECE else 9 * (now - began))
            if adopted:
                self._now_owned()
