"""Decide when to poll, when to claim, and when to take over messages whose leases have lapsed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from time import monotonic

from django_mq.executor.last_starts import LastStarts
from django_mq.store import Cursor, poll
from django_mq.worker.claims import ClaimRouter
from django_mq.worker.due_fetcher import DueFetcher
from django_mq.worker.intake import Intake
from django_mq.worker.lanes import Lanes
from django_mq.worker.lapsed_fetcher import LapsedFetcher
from django_mq.worker.ordered_queues import OrderedQueues
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.watermarks import LaneName, Rest

#: Seconds until the next poll, after a ring or a claim that took something: it finds messages whose
#: rings were coalesced.
REPOLL_DELAY = 0.025
#: Seconds after an outage in which leases that lapsed meanwhile are not taken over: each living
#: process first reconnects and renews its own (see `lease_keeper.MAX_RETRY_WAIT`).
RENEWALS_AFTER_OUTAGE = 3.0


class Fetcher:
    """Claims for one process. The thread that runs the loop calls `fetch()`.

    Any thread may call `on_freed()` and `on_next_in_line()`; only the loop's thread calls the other
    methods. These two set fields without a lock: `empty`, `_freed_at`, `_may_be_due`, `_must_poll`,
    and the request for full scans in the watermarks. `fetch()` clears a flag before it sends the
    statement that the flag asks for, so a call during the statement asks for another one. If such a
    call and `fetch()` set `empty` at once, it may be wrong for a round: the loop looks twice before
    it ends.

    `options(queue)` returns the options of a claim. `intake` says how much room there is, and takes
    the rows. `last_starts` says when messages of each lane last started. `shuffle` puts new lanes
    in order.
    """

    def __init__(
        self,
        *,
        patterns: Sequence[str],
        options: Callable[[str], ClaimOptions],
        intake: Intake,
        claims: ClaimRouter,
        ordered_queues: OrderedQueues,
        last_starts: LastStarts,
        poll_interval: float,
        shuffle: Callable[[list[LaneName]], None] = random.shuffle,
    ) -> None:
        self._intake = intake
        self._claims = claims
        self._ordered_queues = ordered_queues
        self._last_starts = last_starts
        self._poll_interval = poll_interval
        self._lanes = Lanes(patterns, shuffle=shuffle)
        self._due = DueFetcher(options=options, intake=intake, claims=claims, lanes=self._lanes)
        self._lapsed = LapsedFetcher(
            options=options, intake=intake, claims=claims, ordered_queues=ordered_queues
        )
        self._rung = self._postponed = False
        self._may_be_due = True
        self._must_poll = True
        self._poll_at = 0.0
        self._poll_allowed_at = 0.0
        self._poll_rest = Rest()
        self._repoll_at = float("inf")
        self._due_at = float("inf")
        self._was_limited = False
        self._freed_at = self._nothing_due_at = float("-inf")
        #: Whether a look found nothing due that began after messages were last freed here. A ring
        #: alone does not change that: its message was committed later, or seen by that look.
        self.empty = False
        #: Queues in which something was due at the last poll.
        self.due_queues: set[str] = set()

    def on_ring(self) -> None:
        """Claim now, and again a little later, since a producer committed a message."""
        self._look_everywhere()
        self._rung = True
        self._repoll_at = monotonic() + REPOLL_DELAY

    def on_freed(self) -> None:
        """Poll, and claim from the start of each lane: rows were released here, or became due."""
        self._freed_at = monotonic()
        self._look_everywhere()

    def on_released(self) -> None:
        """Do as `on_freed()`, since rows were claimed and released without a start.

        Lanes that started nothing for longest come first now. By the order of claims alone, two
        lanes would fall into step with the releases: one would start everything, and what the
        other has claimed would be released each time.
        """
        self._lanes.order_by_start(self._last_starts.at)
        self.on_freed()

    def on_next_in_line(self) -> None:
        """Claim from the start of each lane.

        For when a message has ended that held up its key, its ordered queue or its limited queue.
        """
        self._freed_at = monotonic()
        self._claim_from_start()

    def _look_everywhere(self) -> None:
        self._claim_from_start()
        self._must_poll = True

    def _claim_from_start(self) -> None:
        self.empty = False
        self._due.request_full()
        self._may_be_due = True

    def postpone_lapsed(self) -> None:
        """Look for lapsed leases a little later: other processes renew theirs first."""
        self._lapsed.postpone(monotonic() + RENEWALS_AFTER_OUTAGE)

    @property
    def urgent(self) -> bool:
        """Whether the next `fetch()` only claims, because a producer rang.

        Never true twice in a row: with many producers the rings do not stop.
        """
        return self._rung and not self._postponed

    def fetch(self, cursor: Cursor) -> float:
        """Claim what there is room for; return how many seconds to sleep before the next call."""
        urgent, rung = self.urgent, self._rung
        self._rung, self._postponed = False, urgent
        if rung:
            sleep = self._claim(cursor)
            if urgent:
                return sleep
        self._ordered_queues.maintain(cursor)
        now = monotonic()
        if now >= self._poll_at:
            self._may_be_due |= self._poll(cursor)
        if self._lapsed.more or now >= self._lapsed.due_at or self._must_take_suspects:
            self._take_over(cursor, now)
        if now >= self._due_at:
            self._due_at = float("inf")
            self._may_be_due = self._must_poll = True
        if now >= self._repoll_at:
            self._repoll_at = float("inf")
            self._look_everywhere()
        if self._may_be_due:
            return self._claim(cursor)
        return self._sleep(cursor)

    def _claim(self, cursor: Cursor) -> float:
        self._may_be_due = False  # an executor may set it again while the statement runs
        claimed = self._due.fetch(cursor)
        self._was_limited = claimed.at_limit or claimed.contended
        if claimed.unfinished:
            self.empty = False
            self._may_be_due = True
            return 0.0
        if claimed.count:
            self.empty = False
            self._may_be_due |= bool(claimed.filled) or claimed.no_room
            self._repoll_at = monotonic() + REPOLL_DELAY  # there is nothing to look for until then
            return 0.0 if claimed.filled else self._until_next()
        if claimed.contended:
            self._repoll_at = min(self._repoll_at, monotonic() + REPOLL_DELAY)
        again = float("inf") if claimed.again_in is None else claimed.again_in
        if claimed.again_in is not None:
            self._may_be_due = True
            self._due.request_full()
        if claimed.no_room:
            self._may_be_due = True  # the thread that makes room pokes the loop
            wait = min(self._due_at, self._repoll_at) - monotonic()
            turn = self._ordered_queues.next_turn_in()
            return max(0.0, min(self._poll_interval, wait, turn, again))
        if claimed.again_in is not None:
            return min(again, self._sleep(cursor))
        return self._sleep(cursor)

    def _take_over(self, cursor: Cursor, now: float) -> None:
        # Twice per poll interval while there is a backlog, since a lapsed row also waits behind the
        # local queue. Otherwise together with the next poll: one wakeup per poll interval.
        next_at = now + (self._poll_interval / 2 if self._may_be_due else self._poll_interval)
        done = self._lapsed.fetch(
            cursor, next_at=min(next_at, self._poll_at), others_due=self._may_be_due
        )
        if done.freed:
            self.on_freed()
        if done.taken:
            self.empty = False

    def _poll(self, cursor: Cursor) -> bool:
        """Read the current lanes and the next due time; return whether anything new is due."""
        began = monotonic()
        self._must_poll = False  # first: another thread may set it while the statement runs
        seen = poll.poll(cursor)
        new_keys = self._claims.facts.update(seen)
        now = monotonic()
        self._poll_allowed_at = now + self._poll_rest.after(now - began)
        self._poll_at = max(began + self._poll_interval, self._poll_allowed_at)
        mine = [each for each in seen if self._lanes.preference(each.queue) is not None]
        leased = [each.queue for each in mine if each.kind == "leased"]
        self._lapsed.update(leased)
        lanes = [(each.queue, each.number) for each in mine if each.kind == "lane"]
        self.due_queues = {each.queue for each in mine if each.due}
        self._due.update(lanes, now)
        self._last_starts.keep(self._lanes.known)
        waits = [each.next_in for each in mine if each.next_in and each.next_in > 0]
        self._due_at = now + min(waits, default=float("inf"))
        owned = self._ordered_queues.owned
        for queue in owned.keys() - {*leased, *(lane[0] for lane in lanes)}:
            self._ordered_queues.caught_up(queue)
        facts = self._claims.facts
        self._intake.drop(facts.withdrawn, facts.backing_off)
        any_due = new_keys or bool(self.due_queues)
        self._nothing_due_at = float("-inf") if any_due else began
        return any_due

    @property
    def _must_take_suspects(self) -> bool:
        """Whether suspects were left out because other messages were due, and none is now."""
        return self._lapsed.left_out and not self._may_be_due

    def _sleep(self, cursor: Cursor) -> float:
        if self._must_poll and monotonic() >= self._poll_allowed_at:
            before = set(self._lanes.known)
            if self._poll(cursor) or not before.issuperset(self._lanes.known):
                self._may_be_due = True  # committed since the claim, or in a lane unknown to it
                return 0.0
        if self._must_take_suspects:
            return 0.0
        self.empty = not self._may_have_work
        return self._until_next()

    @property
    def _may_have_work(self) -> bool:
        """Whether something may have been due since the last look, or when this worker looked.

        Where rings do not stop, and looks rest because they are slow, another look is always
        wanted: a worker would not end before the rings do.
        """
        looked = self._nothing_due_at > self._freed_at
        may_be_due = not looked and (self._may_be_due or self._must_poll)
        may_lapse = self._lapsed.more or monotonic() < self._lapsed.postponed_until
        return may_be_due or may_lapse or self._was_limited

    def _until_next(self) -> float:
        """Return the seconds until there is a reason to do something again."""
        until = min(self._poll_at, self._lapsed.due_at, self._due_at, self._repoll_at)
        if self._must_poll and self._repoll_at == float("inf"):
            until = min(until, self._poll_allowed_at)
        return max(0.0, min(until - monotonic(), self._ordered_queues.next_turn_in()))
