"""Which statement claims from which queue: with keys or without, in line, through a gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from django_mq.store import claim, gates, keys, lines, queue_backoff
from django_mq.store.claim import NOTHING, Claim

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.store.claim import Lane
    from django_mq.store.looking import Seen

#: A queue in which no key was seen for so many seconds is claimed from the plain way again.
FORGET_KEYS = 60.0


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


class Took(NamedTuple):
    """What a claim took. `full`: the queue has as many in flight as it may; more may wait."""

    claim: Claim
    full: bool = False


class Claims:
    """Claims for worker process `worker`; knows which queues are special, from each look.

    `claimer` makes the name of the next claim; `owned` are the ordered queues that are ours,
    `holding` says whether something of a queue is in hand.
    `probing` is told the queue and the claimer of a claim that is its queue's probe.
    """

    def __init__(
        self,
        *,
        worker: str,
        claimer: Callable[[], str],
        owned: Collection[str],
        holding: Callable[[str], bool],
        probing: Callable[[str, str], None],
    ) -> None:
        self._worker = worker
        self._claimer = claimer
        self._owned = owned
        self._holding = holding
        self._probing = probing
        self._gated: set[str] = set()
        self._keyed: dict[str, float] = {}
        #: Queues of which nothing is to run now: paused, or backing off.
        self.closed: set[str] = set()

    def saw(self, seen: Sequence[Seen]) -> bool:
        """Learn from a look; say whether a queue turned out to have keys."""
        now = monotonic()
        self._gated = {each.queue for each in seen if each.kind in ("limited", "easing")}
        self.closed = {each.queue for each in seen if each.kind in ("closed", "easing")}
        keyed = dict.fromkeys((each.queue for each in seen if each.kind == "keyed"), now)
        new = not self._keyed.keys() >= keyed.keys()
        kept = {queue: at for queue, at in self._keyed.items() if now - at < FORGET_KEYS}
        self._keyed = {**kept, **keyed}
        return new

    def way(self, queue: str, terms: Terms) -> str:
        """Return what queues that one claim can serve have in common, besides their terms."""
        if terms.ordered or terms.limit is not None or queue in self._gated:
            return f"alone {queue}"
        return "keyed" if queue in self._keyed else ""

    def take(self, cursor: Cursor, lanes: Sequence[Lane], terms: Terms, *, limit: int) -> Took:
        """Claim up to `limit` messages of `lanes`, which have the same terms and way."""
        queue = lanes[0].queue
        way = self.way(queue, terms)
        if not way:
            return Took(
                claim.claim(
                    cursor,
                    lanes=lanes,
                    claimer=self._claimer(),
                    lease=terms.lease,
                    limit=limit,
                    max_bytes=terms.batch_bytes,
                )
            )
        if terms.ordered and (queue not in self._owned or self._holding(queue)):
            return Took(NOTHING)
        with cursor.connection.transaction():
            if terms.limit is None and queue not in self._gated:
                return Took(self._take_locked(cursor, lanes, terms, self._claimer(), limit))
            return self._take_gated(cursor, lanes, terms, limit)

    def _take_gated(self, cursor: Cursor, lanes: Sequence[Lane], terms: Terms, limit: int) -> Took:
        queue, claimer = lanes[0].queue, self._claimer()
        gate = gates.enter(cursor, queue=queue, limit=terms.limit)
        if gate.room == 0:
            return Took(NOTHING, full=bool(gate.most))
        limit = limit if gate.room is None else min(limit, gate.room)
        if gate.level == 0:
            taken = self._take_locked(cursor, lanes, terms, claimer, limit, admitted=True)
            return Took(taken, full=limit == gate.room)
        if not queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=terms.lease):
            return Took(NOTHING)
        taken = self._take_locked(cursor, lanes, terms, claimer, 1, admitted=True)
        if taken.rows:
            self._probing(queue, claimer)
        else:
            queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)
        return Took(taken)

    def _take_locked(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        terms: Terms,
        claimer: str,
        limit: int,
        *,
        admitted: bool = False,
    ) -> Claim:
        queue = lanes[0].queue
        if terms.ordered:
            rows = lines.claim(
                cursor,
                queue=queue,
                worker=self._worker,
                claimer=claimer,
                lease=terms.lease,
                limit=limit,
                max_bytes=terms.batch_bytes,
                skip_dead=terms.skip_dead,
                admitted=admitted,
            )
            return Claim(rows, {})
        if queue in self._keyed:
            return keys.claim(
                cursor,
                lanes=lanes,
                claimer=claimer,
                lease=terms.lease,
                limit=limit,
                max_bytes=terms.batch_bytes,
                skip_dead=terms.skip_dead,
                admitted=admitted,
            )
        return claim.claim(
            cursor,
            lanes=lanes,
            claimer=claimer,
            lease=terms.lease,
            limit=limit,
            max_bytes=terms.batch_bytes,
            admitted=admitted,
        )
