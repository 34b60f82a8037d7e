"""Which statement claims from which queue: with keys or without, in line, through a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from django_mq.store import claim, gates, keyed, lapsed, lines, queue_backoff
from django_mq.store.claim import NOTHING, Claim
from django_mq.worker.takeover import say_dead, take_over

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.store.claim import Lane
    from django_mq.store.lapsed import Lapsed
    from django_mq.store.looking import Seen
    from django_mq.worker.shut import Shut

#: So many claims are made at once, if there is room for them.
TOGETHER = 4
#: A queue in which no key was seen for so many seconds is claimed from the plain way again.
FORGET_KEYS = 60.0


class Asked(TypedDict):
    """What every claim is asked with, whatever its statement."""

    claimer: str
    lease: float
    limit: int
    max_bytes: int
    admitted: bool


class Terms(NamedTuple):
    """On which terms the messages of a queue are claimed.

    `kind` names the executors they need: room is counted for each kind. `limit`: so many may
    be in flight over the fleet, unless decided otherwise while running.
    """

    kind: str
    lease: float
    batch_size: int
    batch_bytes: int
    ordered: bool = False
    skip_dead: bool = False
    limit: int | None = None

    def asked(self, claimer: str, limit: int, *, admitted: bool = False) -> Asked:
        """Return what a claim on these terms is asked with, for up to `limit` messages."""
        return {
            "claimer": claimer,
            "lease": self.lease,
            "limit": limit,
            "max_bytes": self.batch_bytes,
            "admitted": admitted,
        }


class Took(NamedTuple):
    """What a claim took. `full`: the queue has as many in flight as it may; more may wait.

    `busy`: somebody else is claiming from it at this moment.
    """

    claim: Claim
    full: bool = False
    busy: bool = False


class Claims:
    """Claims for worker process `worker`; knows which queues are special, from each look.

    `claimer` makes the name of the next claim; `owned` are the ordered queues that are ours,
    `holding` says whether something of a queue is in hand.
    `probing` is told the queue and the claimer of a claim that is its queue's probe. What is
    `shut` would be given back at once: it is not claimed.
    """

    def __init__(
        self,
        *,
        worker: str,
        claimer: Callable[[], str],
        owned: Collection[str],
        holding: Callable[[str], bool],
        probing: Callable[[str, str], None],
        shut: Shut,
    ) -> None:
        self._worker = worker
        self._claimer = claimer
        self._owned = owned
        self._holding = holding
        self._probing = probing
        self._shut = shut
        self._gated: set[str] = set()
        self._limits: dict[str, int] = {}
        self._keyed: dict[str, float] = {}
        # So many messages like those that were claimed last have as many bytes as a claim may.
        self._fits = 0
        #: Queues that were claimed from with a limit of messages in flight.
        self.limited: set[str] = set()
        #: Queues of which nothing that waits in hand is to start: paused, or allowed fewer
        #: messages in flight than before.
        self.closed: set[str] = set()
        #: Queues that back off.
        self.easing: set[str] = set()

    def saw(self, seen: Sequence[Seen]) -> bool:
        """Learn from a look; say whether a queue turned out to have keys."""
        now = monotonic()
        before, self._limits = (
            self._limits,
            {each.queue: each.priority for each in seen if each.kind == "limited"},
        )
        self.easing = {each.queue for each in seen if each.kind == "easing"}
        self.closed = {each.queue for each in seen if each.kind == "closed"}
        for queue, most in self._limits.items():
            if most == 0 or most < before.get(queue, math.inf):
                self.closed.add(queue)
        self._gated = {*self._limits, *self.easing}
        self.limited -= before.keys() - self._limits.keys()
        keyed = dict.fromkeys((each.queue for each in seen if each.kind == "keyed"), now)
        new = not self._keyed.keys() >= keyed.keys()
        kept = {queue: at for queue, at in self._keyed.items() if now - at < FORGET_KEYS}
        self._keyed = {**kept, **keyed}
        return new

    def way(self, queue: str, terms: Terms) -> str:
        """Return what queues that one claim can serve have in common, besides their terms."""
        if terms.ordered or self._is_gated(queue, terms):
            return f"alone {queue}"
        return "keyed" if queue in self._keyed else ""

    def lapsed_way(self, queue: str, terms: Terms) -> str:
        """Return what queues that one take-over can serve have in common, besides their terms."""
        return f"alone {queue}" if self._is_gated(queue, terms) else ""

    def most(self, queue: str, terms: Terms) -> int:
        """Return how many messages of `queue` can be taken at once."""
        if self.way(queue, terms):
            return terms.batch_size
        # All of it is read before it is cut by its bytes: no more than lately fitted in.
        return max(terms.batch_size, min(TOGETHER * terms.batch_size, self._fits))

    def take(self, cursor: Cursor, lanes: Sequence[Lane], terms: Terms, *, limit: int) -> Took:
        """Claim up to `limit` messages of `lanes`, which have the same terms and way.

        No single claim takes more than their batch size: more are several claims at once, which
        keep apart from those of others, unless all begin at the front of their lanes.
        """
        if self._shut:
            lanes = [lane for lane in lanes if not self._shut.whole(lane.queue)]
            if not lanes:
                return Took(NOTHING)
        queue = lanes[0].queue
        way = self.way(queue, terms)
        if not way:
            asked = terms.asked(self._claimer(), limit)
            further = [self._claimer() for _ in range((limit - 1) // terms.batch_size)]
            apart = bool(further) and any(lane.id for lane in lanes)
            taken = claim.claim(cursor, lanes=lanes, further=further, apart=apart, **asked)
            if size := sum(len(row.payload) for row in taken.rows):
                self._fits = terms.batch_bytes * len(taken.rows) // size
            return Took(taken)
        if terms.ordered and (queue not in self._owned or self._holding(queue)):
            return Took(NOTHING)
        with cursor.connection.transaction():
            if not self._is_gated(queue, terms):
                asked = terms.asked(self._claimer(), limit)
                return Took(self._take_locked(cursor, lanes, terms, asked))
            return self._take_gated(cursor, lanes, terms, limit)

    def take_over(
        self, cursor: Cursor, queues: Sequence[str], terms: Terms, *, limit: int
    ) -> Lapsed:
        """Take over up to `limit` lapsed messages of `queues`, which have the same terms and way.

        One that lapsed in a queue that backs off is its probe: nothing else may be left to try.
        """
        if self._shut:
            queues = [queue for queue in queues if not self._shut.whole(queue)]
            if not queues:
                return lapsed.NOTHING
        if not self._is_gated(queues[0], terms):
            asked = terms.asked(self._claimer(), limit)
            found = take_over(cursor, queues=queues, skip_dead=terms.skip_dead, **asked)
        else:
            with cursor.connection.transaction():
                found = self._take_over_gated(cursor, queues[0], terms, limit)
        say_dead(found)
        return found

    def _is_gated(self, queue: str, terms: Terms) -> bool:
        return terms.limit is not None or queue in self._gated

    def _take_gated(self, cursor: Cursor, lanes: Sequence[Lane], terms: Terms, limit: int) -> Took:
        queue, claimer = lanes[0].queue, self._claimer()
        gate = gates.enter(cursor, queue=queue, limit=terms.limit)
        if gate is None:
            return Took(NOTHING, busy=True)
        if gate.most is not None:
            self.limited.add(queue)
        if gate.room == 0:
            return Took(NOTHING, full=bool(gate.most))
        limit = limit if gate.room is None else min(limit, gate.room)
        if gate.level == 0:
            asked = terms.asked(claimer, limit, admitted=True)
            taken = self._take_locked(cursor, lanes, terms, asked)
            return Took(taken, full=len(taken.rows) == gate.room)
        if not queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=terms.lease):
            return Took(NOTHING)
        asked = terms.asked(claimer, 1, admitted=True)
        taken = self._take_locked(cursor, lanes, terms, asked)
        self._started(cursor, queue, claimer, probes=bool(taken.rows))
        return Took(taken)

    def _take_over_gated(self, cursor: Cursor, queue: str, terms: Terms, limit: int) -> Lapsed:
        claimer = self._claimer()
        gate = gates.enter(cursor, queue=queue, limit=terms.limit)
        if gate is None or gate.most == 0 or not lapsed.any_lapsed(cursor, queue=queue):
            return lapsed.NOTHING
        if gate.level == 0:
            asked = terms.asked(claimer, limit, admitted=True)
            return take_over(cursor, queues=[queue], skip_dead=terms.skip_dead, **asked)
        if not queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=terms.lease):
            return lapsed.NOTHING
        asked = terms.asked(claimer, 1, admitted=True)
        found = take_over(cursor, queues=[queue], skip_dead=terms.skip_dead, **asked)
        self._started(cursor, queue, claimer, probes=bool(found.taken))
        return found

    def _started(self, cursor: Cursor, queue: str, claimer: str, *, probes: bool) -> None:
        """Tell of the probe that was started; without a message that `probes` there is none."""
        if probes:
            self._probing(queue, claimer)
        else:
            queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)

    def _take_locked(
        self, cursor: Cursor, lanes: Sequence[Lane], terms: Terms, asked: Asked
    ) -> Claim:
        queue, skip_dead = lanes[0].queue, terms.skip_dead
        if terms.ordered:
            rows = lines.claim(
                cursor, queue=queue, worker=self._worker, skip_dead=skip_dead, **asked
            )
            return Claim(rows, {})
        if queue in self._keyed:
            return keyed.claim(cursor, lanes=lanes, skip_dead=skip_dead, **asked)
        return claim.claim(cursor, lanes=lanes, **asked)
