"""Decide when to take over messages whose leases have lapsed, and how many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from django_mq.store import Cursor
from django_mq.worker.claims import ClaimRouter
from django_mq.worker.intake import Intake
from django_mq.worker.ordered_queues import OrderedQueues
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.take_over import LapsedRouter
from django_mq.worker.watermarks import Watermarks

#: Seconds after its start for which a process takes over no suspects while other messages are due.
#: A suspect may end the whole host: if each new worker began with it, it would run nothing else.
SUSPECTS_AFTER = 10.0


@dataclass(slots=True)
class TakenOver:
    """The result of one look for lapsed leases.

    `taken`: some were claimed. `freed`: some were released or died, so the messages behind them in
    their lines may be due.
    """

    taken: bool = False
    freed: bool = False


class LapsedFetcher:
    """Takes over lapsed messages for one process. The thread that runs the loop calls `fetch()`."""

    def __init__(
        self,
        *,
        options: Callable[[str], ClaimOptions],
        intake: Intake,
        claims: ClaimRouter,
        ordered_queues: OrderedQueues,
    ) -> None:
        self._options = options
        self._intake = intake
        self._claims = claims
        self._router = LapsedRouter(claims)
        self._ordered_queues = ordered_queues
        self._queues: list[str] = []
        self._marks: Watermarks[str] = Watermarks()
        self._rows_behind = False
        self._suspects_at = monotonic() + SUSPECTS_AFTER
        #: Whether the last look left out suspects, if there were any.
        self.left_out = False
        #: Whether there may be more than the last look took.
        self.more = False
        #: The time of `monotonic()` at which to look again.
        self.due_at = 0.0
        #: The time of `monotonic()` until which looks are put off.
        self.postponed_until = 0.0

    def update(self, queues: Sequence[str]) -> None:
        """Look in these queues from now on: those with leased messages."""
        self._queues = list(queues)
        self._marks.keep(queues)

    def postpone(self, until: float) -> None:
        """Do not look before `until`, a time of `monotonic()`."""
        self.more = self.left_out = False
        self.due_at = self.postponed_until = until

    def fetch(self, cursor: Cursor, *, next_at: float, others_due: bool) -> TakenOver:
        """Take over what there is room for; look again at `next_at`, or sooner if there is more.

        `others_due`: messages may be due whose leases have not lapsed.
        """
        self.more, self.due_at = False, next_at
        done, found, begun = TakenOver(), False, False
        young = monotonic() < self._suspects_at
        self.left_out = others_due and young and bool(self._queues)
        # Marks would pass over the suspects that are left out.
        full = self.left_out or self._marks.full_is_due()
        for options, queues in self._groups():
            room = min(self._intake.room(options.kind), options.batch_size)
            if room <= 0:
                self.more = True  # perhaps: the thread that makes room pokes the loop
                continue
            if not begun:  # once: another full scan may be requested during the first statement
                self._marks.begin_scan(full=full)
                begun = True
            began = self._claims.clock()
            marks = {queue: self._marks.mark(queue, full=full) for queue in queues}
            lapsed = self._router.take_over(
                cursor, queues, options, limit=room, marks=marks, suspects=not self.left_out
            )
            seconds = self._claims.clock() - began
            if not self.left_out:
                self._marks.record_scan(lapsed.marks, seconds, full=full, rest_key=options)
            found |= bool(lapsed.marks)
            done.freed |= bool(lapsed.released or lapsed.dead)
            if lapsed.taken:
                done.taken = True
                self._intake.take(cursor, lapsed.taken, taken_over=True)
        if found:  # there may be more
            self.more = self._rows_behind = True
            self.due_at = 0.0
        elif full:
            self._rows_behind = False
        elif self._rows_behind:  # the lock on a skipped row may be free now
            self.more = True
            self._marks.request_full()
            self.due_at = min(self.due_at, monotonic() + self._marks.full_in())
        return done

    def _groups(self) -> Iterator[tuple[ClaimOptions, list[str]]]:
        groups: dict[tuple[ClaimOptions, str], list[str]] = {}
        for queue in self._queues:
            options = self._options(queue)
            if not options.ordered or queue in self._ordered_queues.owned:
                group = self._router.statement_group(queue, options)
                groups.setdefault((options, group), []).append(queue)
        for (options, _), queues in groups.items():
            yield options, queues
