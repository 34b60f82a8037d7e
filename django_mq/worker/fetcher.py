"""Decide when to claim, from which lanes, and how much: no more than can be run here soon."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from django_mq.routing import Pattern
from django_mq.store import looking
from django_mq.worker.marks import REST_AFTER_FULL_SCAN, LaneName, Marks

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow
    from django_mq.store import Cursor
    from django_mq.worker.claiming import Claims, Terms, Took
    from django_mq.worker.ownership import Ownership

#: After a ring or a claim that took something, look once more so many seconds later before
#: sleeping: makes the producers' coalesced rings lossless.
LOOK_AGAIN = 0.025
#: A lane in which nothing was seen for so many seconds is not asked for any more.
FORGET_LANE = 60.0


class Fetcher:
    """Claims for one process; whoever runs the loop calls `fetch()`.

    `terms(queue)` says how a queue is claimed, `room(kind)` how many messages there is room
    for now; `take` gets the rows that were claimed, and whether they had lapsed; `closed` is
    told, after each look that saw some, the queues of which nothing that waits is to start,
    and those that back off.
    """

    def __init__(
        self,
        *,
        patterns: Sequence[str],
        terms: Callable[[str], Terms],
        room: Callable[[str], int],
        take: Callable[[Cursor, list[ClaimedRow], bool], None],
        closed: Callable[[Collection[str], Collection[str]], None],
        claims: Claims,
        ownership: Ownership,
        poll: float,
    ) -> None:
        self._patterns = [Pattern(text) for text in patterns]
        self._terms = terms
        self._room = room
        self._take = take
        self._closed = closed
        self._claims = claims
        self._ownership = ownership
        self._poll = poll
        self._marks = Marks(full_every=1.0)
        self._seen_at: dict[LaneName, float] = {}
        self._lanes: list[LaneName] = []
        self._leased: list[str] = []
        self._turn = 0
        self._fixed = [(text, 0) for text in patterns if "*" not in text and "#" not in text]
        self._rung = self._postponed = False
        self._hopeful = True
        self._must_look = True
        self._look_at = 0.0
        self._look_again_at = 0.0
        self._lapsed_at = 0.0
        self._more_lapsed = False
        self._again_at = float("inf")
        self._due_at = float("inf")
        self._full = False
        self.empty = False
        #: When the last claim was asked for, by `monotonic()`.
        self.asked_at = 0.0
        #: Queues in which something was due at the last look.
        self.due: set[str] = set()

    def rang(self) -> None:
        """A message was committed somewhere: claim now, and once more a little later."""
        self.freed()
        self._rung = True
        self._again_at = monotonic() + LOOK_AGAIN

    def freed(self) -> None:
        """This process gave rows back, or they became due: they may lie before the marks."""
        self.empty = False
        self._marks.want_full()
        self._must_look = self._hopeful = True

    def moved(self) -> None:
        """What was first of its line is done here: what comes next may be claimed."""
        self.empty = False
        self._marks.want_full()
        self._hopeful = True

    @property
    def hurries(self) -> bool:
        """Whether the next `fetch()` only claims: somebody waits, all else comes after it.

        Once: the rings of many producers do not end.
        """
        return self._rung and not self._postponed

    def fetch(self, cursor: Cursor) -> float:
        """Claim what there is room for; return how many seconds to sleep before the next call."""
        hurries, rung = self.hurries, self._rung
        self._rung, self._postponed = False, hurries
        if rung:
            sleep = self._claim(cursor)
            if hurries:
                return sleep
        self._ownership.tend(cursor)
        now = monotonic()
        if now >= self._look_at:
            self._hopeful |= self._look(cursor)
        if self._more_lapsed or now >= self._lapsed_at:
            # Twice as often with a backlog: a lapsed row still waits for what is in hand. Else
            # with the next look, so that who is idle wakes up once a poll.
            next_at = now + (self._poll / 2 if self._hopeful else self._poll)
            self._lapsed_at = min(next_at, self._look_at)
            self._claim_lapsed(cursor)
        if now >= self._due_at:
            self._due_at = float("inf")
            self._hopeful = self._must_look = True
        if now >= self._again_at:
            self._again_at = float("inf")
            self.freed()
        if self._hopeful:
            return self._claim(cursor)
        return self._sleep(cursor)

    def _claim(self, cursor: Cursor) -> float:
        full = self._marks.full_is_due()
        self._hopeful = False  # an executor may set it again while the statement runs
        self._full = False
        took, cramped, more, further, busy = 0, False, False, False, False
        full_kinds: set[str] = set()
        for terms, lanes in self._groups():
            if full_kinds and ("both" in (terms.kind, *full_kinds) or terms.kind in full_kinds):
                cramped = True  # what is preferred may have more, and that goes first
                continue
            room = min(self._room(terms.kind), self._claims.most(lanes[0][0], terms))
            if room <= 0:
                cramped = True
                continue
            taken = self._claim_from(cursor, lanes, terms, room, full=full)
            rows = taken.claim.rows
            took += len(rows)
            self._full |= taken.full  # whoever of us ends one of its messages pokes the loop
            further |= taken.claim.further
            busy |= taken.busy
            if len(rows) == room or sum(len(row.payload) for row in rows) > (
                terms.batch_bytes // 2
            ):
                more = True
                full_kinds.add(terms.kind)
        if further:
            self.empty = False
            self._hopeful = True
            return 0.0
        if took:
            self.empty = False
            self._hopeful |= more or cramped
            self._again_at = monotonic() + LOOK_AGAIN  # until then there is nothing to look for
            return 0.0 if more else self._until_next()
        if busy:
            self._again_at = min(self._again_at, monotonic() + LOOK_AGAIN)
        if cramped:
            self._hopeful = True  # whoever makes room pokes the loop
            wait = min(self._due_at, self._again_at) - monotonic()
            return max(0.0, min(self._poll, wait, self._ownership.turn_in()))
        if not full:
            self._hopeful = True
            self._marks.want_full()
            return min(self._marks.full_in(), self._poll)
        return self._sleep(cursor)

    def _claim_from(
        self, cursor: Cursor, lanes: list[LaneName], terms: Terms, room: int, *, full: bool
    ) -> Took:
        self.asked_at, began = monotonic(), perf_counter()
        plain = not self._claims.way(lanes[0][0], terms)  # else what is freed lies before the marks
        marked = [self._marks.lane(*lane, full=full or not plain) for lane in lanes]
        took = self._claims.take(cursor, marked, terms, limit=room)
        if plain:
            self._marks.scanned(took.claim.marks, perf_counter() - began, full=full)
        if took.claim.rows:
            self._take(cursor, took.claim.rows, False)
        return took

    def _claim_lapsed(self, cursor: Cursor) -> None:
        self._more_lapsed = False
        for terms, queues in self._leased_groups():
            room = min(self._room(terms.kind), terms.batch_size)
            if room <= 0:
                self._more_lapsed = True  # perhaps: whoever makes room pokes the loop
                continue
            lapsed = self._claims.take_over(cursor, queues, terms, limit=room)
            if lapsed.taken or lapsed.dead:  # there may be more
                self._more_lapsed = True
                self._lapsed_at = 0.0
            if lapsed.taken:
                self.empty = False
                self._take(cursor, lapsed.taken, True)

    def _look(self, cursor: Cursor) -> bool:
        """See which lanes there are and what is due next; say whether something new is due."""
        began = monotonic()
        seen = looking.look(cursor)
        new_keys = self._claims.saw(seen)
        now = monotonic()
        self._look_again_at = now + REST_AFTER_FULL_SCAN * (now - began)
        self._look_at = max(began + self._poll, self._look_again_at)
        self._must_look = False
        mine = [each for each in seen if self._preference(each.queue) is not None]
        self._leased = [each.queue for each in mine if each.kind == "leased"]
        lanes = [(each.queue, each.priority) for each in mine if each.kind == "lane"]
        self.due = {each.queue for each in mine if each.due}
        new_due = new_keys or bool(self.due)
        self._seen_at.update(dict.fromkeys(lanes, now))
        self._seen_at = {lane: at for lane, at in self._seen_at.items() if now - at < FORGET_LANE}
        known = {**dict.fromkeys(self._fixed), **dict.fromkeys(self._seen_at)}
        self._lanes = sorted(known)
        self._marks.keep(known)
        waits = [each.next_in for each in mine if each.next_in and each.next_in > 0]
        self._due_at = now + min(waits, default=float("inf"))
        for queue in self._ownership.owned.difference(self._leased, (lane[0] for lane in lanes)):
            self._ownership.caught_up(queue)
        if self._claims.closed or self._claims.easing:
            self._closed(self._claims.closed, self._claims.easing)
        return new_due

    def _sleep(self, cursor: Cursor) -> float:
        if self._must_look and monotonic() >= self._look_again_at:
            before = set(self._lanes)
            due = self._look(cursor)
            if due or not before.issuperset(self._lanes):
                self._hopeful = True  # what came since the claim, or a lane it did not know of
                return 0.0
        self.empty = not (self._hopeful or self._more_lapsed or self._must_look or self._full)
        return self._until_next()

    def _until_next(self) -> float:
        """Seconds until there is a reason to do something again."""
        until = min(self._look_at, self._lapsed_at, self._due_at, self._again_at)
        if self._must_look and self._again_at == float("inf"):
            until = min(until, self._look_again_at)
        return max(0.0, min(until - monotonic(), self._ownership.turn_in()))

    def _preference(self, queue: str) -> int | None:
        for place, pattern in enumerate(self._patterns):
            if pattern.matches(queue):
                return place
        return None

    def _in_order(self) -> list[LaneName]:
        """Return the lanes by preference, then priority; those alike take turns to be first."""
        if len(self._lanes) < 2:
            return self._lanes
        self._turn += 1
        turn = self._turn % max(1, len(self._lanes))
        rotated = self._lanes[turn:] + self._lanes[:turn]
        return sorted(rotated, key=lambda lane: (self._preference(lane[0]), -lane[1]))

    def _groups(self) -> Iterator[tuple[Terms, list[LaneName]]]:
        """Yield neighbouring lanes that one claim can serve: their order is the preference."""
        for (terms, _), lanes in groupby(self._in_order(), self._group):
            yield terms, list(lanes)

    def _group(self, lane: LaneName) -> tuple[Terms, str]:
        terms = self._terms(lane[0])
        return terms, self._claims.way(lane[0], terms)

    def _leased_groups(self) -> Iterator[tuple[Terms, list[str]]]:
        groups: dict[tuple[Terms, str], list[str]] = {}
        for queue in self._leased:
            terms = self._terms(queue)
            if not terms.ordered or queue in self._ownership.owned:
                way = self._claims.lapsed_way(queue, terms)
                groups.setdefault((terms, way), []).append(queue)
        for (terms, _), queues in groups.items():
            yield terms, queues
