"""Which statement claims or takes over from which queue: plain, with keys, ordered, behind a gate.

From a queue that backs off it claims the probe alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from django_mq.executor.statements import within_transaction
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.store import (
    Cursor,
    claim,
    claim_keyed,
    claim_lapsed,
    ordered_queues,
    queue_backoff,
    queue_limits,
)
from django_mq.store.claim import BEGINNING, NOTHING, Claim, Lane
from django_mq.store.claim_lapsed import Lapsed, Mark
from django_mq.store.look import LookRow
from django_mq.worker.claim_options import ClaimArguments, ClaimOptions
from django_mq.worker.take_over import announce_dead, take_over

#: How many batches one statement claims, if there is room for them.
TOGETHER = 4
#: Seconds after a key was last seen in a queue until the plain claim serves it again.
FORGET_KEYS = 60.0


class ClaimResult(NamedTuple):
    """The result of a claim.

    `at_limit`: the queue has as many messages in flight as it may, and more may wait.
    `contended`: another session is claiming from the queue at this moment.
    """

    claim: Claim
    at_limit: bool = False
    contended: bool = False


class ClaimRouter:
    """Claims for worker process `worker` with the statement that each queue needs.

    Each look says which queues have keys, a limit or a backoff. `claimer()` makes the name of the
    next claim; `owned` are the ordered queues that this process owns; `has_any(queue)` says whether
    it has an unsettled message of the queue; `probing(queue, claimer)` is called for a claim that
    is the probe of its queue. Nothing is claimed from `stopped` queues: it would be released at
    once.
    """

    def __init__(
        self,
        *,
        worker: str,
        claimer: Callable[[], str],
        owned: Collection[str],
        has_any: Callable[[str], bool],
        probing: Callable[[str, str], None],
        stopped: StoppedQueues,
    ) -> None:
        self._worker = worker
        self._claimer = claimer
        self._owned = owned
        self._has_any = has_any
        self._probing = probing
        self._stopped = stopped
        self._gated: set[str] = set()
        self._limits: dict[str, int] = {}
        self._keyed: dict[str, float] = {}
        # How many messages of the last claim's average size `batch_bytes` has room for.
        self._fits = 0
        #: Queues that were claimed from with a limit of messages in flight.
        self.limited: set[str] = set()
        #: Queues whose waiting messages must not start here: the queue is paused, or its limit
        #: in flight was lowered.
        self.withdrawn: set[str] = set()
        self.backing_off: set[str] = set()

    def learn(self, seen: Sequence[LookRow]) -> bool:
        """Learn from a look; return whether a queue turned out to have keys."""
        now = monotonic()
        before, self._limits = (
            self._limits,
            {each.queue: each.number for each in seen if each.kind == "limited"},
        )
        self.backing_off = {each.queue for each in seen if each.kind == "backing_off"}
        self.withdrawn = {each.queue for each in seen if each.kind == "paused"}
        for queue, limit in self._limits.items():
            if limit == 0 or limit < before.get(queue, math.inf):
                self.withdrawn.add(queue)
        self._gated = {*self._limits, *self.backing_off}
        self.limited -= before.keys() - self._limits.keys()
        keyed = dict.fromkeys((each.queue for each in seen if each.kind == "keyed"), now)
        new = not self._keyed.keys() >= keyed.keys()
        kept = {queue: at for queue, at in self._keyed.items() if now - at < FORGET_KEYS}
        self._keyed = {**kept, **keyed}
        return new

    def statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return a text that is equal for queues that one claim can serve, given equal options.

        Empty for the plain claim.
        """
        if options.ordered or self._is_gated(queue, options):
            return f"alone {queue}"
        return "keyed" if queue in self._keyed else ""

    def lapsed_statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return the same as `statement_group()`, for a claim of lapsed messages."""
        return f"alone {queue}" if self._is_gated(queue, options) else ""

    def most_per_claim(self, queue: str, options: ClaimOptions) -> int:
        """Return the maximum number of messages of `queue` to claim with one statement."""
        if self._is_gated(queue, options):
            return options.batch_size
        # The statement reads all rows before `batch_bytes` cuts them, so claim no more than
        # recently fitted.
        return max(options.batch_size, min(TOGETHER * options.batch_size, self._fits))

    def claim(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        *,
        limit: int,
        with_marks: bool = False,
    ) -> ClaimResult:
        """Claim up to `limit` messages of `lanes`, which have the same options and statement group.

        One claimer gets no more than a batch: a larger limit makes several claims in one
        statement. From a queue with keys, it returns marks only if asked.
        """
        if self._stopped:
            lanes = [lane for lane in lanes if not self._stopped.is_all_stopped(lane.queue)]
            if not lanes:
                return ClaimResult(NOTHING)
        queue = lanes[0].queue
        if not self.statement_group(queue, options):
            return self._weighed(options, self._claim_plain(cursor, lanes, options, limit))
        if options.ordered and (queue not in self._owned or self._has_any(queue)):
            return ClaimResult(NOTHING)
        with within_transaction(cursor):
            if not self._is_gated(queue, options):
                arguments = options.arguments(self._claimer(), limit)
                taken = self._claim_locked(
                    cursor,
                    lanes,
                    options,
                    arguments,
                    self._more_claimers(options, limit),
                    with_marks,
                )
                return self._weighed(options, taken)
            return self._claim_gated(cursor, lanes, options, limit)

    def take_over(
        self,
        cursor: Cursor,
        queues: Sequence[str],
        options: ClaimOptions,
        *,
        limit: int,
        marks: Mapping[str, Mark],
    ) -> Lapsed:
        """Take over up to `limit` lapsed messages of `queues`, which make up one statement group.

        The scan of a queue begins behind its mark, if it has one. A lapsed message of a queue that
        backs off becomes its probe: there may be no other.
        """
        if self._stopped:
            queues = [queue for queue in queues if not self._stopped.is_all_stopped(queue)]
            if not queues:
                return claim_lapsed.NOTHING
        if not self._is_gated(queues[0], options):
            arguments = options.arguments(self._claimer(), limit)
            found = take_over(
                cursor, queues=queues, skip_dead=options.skip_dead, marks=marks, **arguments
            )
        else:
            with within_transaction(cursor):
                found = self._take_over_gated(cursor, queues[0], options, limit, marks)
        announce_dead(found)
        return found

    def _is_gated(self, queue: str, options: ClaimOptions) -> bool:
        return options.max_in_flight is not None or queue in self._gated

    def _claim_plain(
        self, cursor: Cursor, lanes: Sequence[Lane], options: ClaimOptions, limit: int
    ) -> Claim:
        arguments = options.arguments(self._claimer(), limit)
        more_claimers = self._more_claimers(options, limit)
        return claim.claim(cursor, lanes=lanes, more_claimers=more_claimers, **arguments)

    def _more_claimers(self, options: ClaimOptions, limit: int) -> list[str]:
        """Name the claims that a claim of `limit` messages makes beside its first."""
        return [self._claimer() for _ in range((limit - 1) // options.batch_size)]

    def _weighed(self, options: ClaimOptions, taken: Claim) -> ClaimResult:
        """Learn from `taken` how large messages are."""
        if size := sum(len(row.payload) for row in taken.rows):
            self._fits = options.batch_bytes * len(taken.rows) // size
        return ClaimResult(taken)

    def _claim_gated(
        self, cursor: Cursor, lanes: Sequence[Lane], options: ClaimOptions, limit: int
    ) -> ClaimResult:
        queue, claimer = lanes[0].queue, self._claimer()
        gate = queue_limits.enter(cursor, queue=queue, limit=options.max_in_flight)
        if gate is None:
            return ClaimResult(NOTHING, contended=True)
        if gate.max_in_flight is not None:
            self.limited.add(queue)
        if gate.room == 0:
            return ClaimResult(NOTHING, at_limit=bool(gate.max_in_flight))
        limit = limit if gate.room is None else min(limit, gate.room)
        if gate.level == 0:
            arguments = options.arguments(claimer, limit, admitted=True)
            taken = self._claim_locked(cursor, lanes, options, arguments)
            return ClaimResult(taken, at_limit=len(taken.rows) == gate.room)
        if not queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=options.lease):
            return ClaimResult(NOTHING)
        arguments = options.arguments(claimer, 1, admitted=True)
        taken = self._claim_locked(cursor, lanes, options, arguments)
        self._end_probe_claim(cursor, queue, claimer, found=bool(taken.rows))
        return ClaimResult(taken)

    def _take_over_gated(
        self,
        cursor: Cursor,
        queue: str,
        options: ClaimOptions,
        limit: int,
        marks: Mapping[str, Mark],
    ) -> Lapsed:
        claimer, mark = self._claimer(), marks.get(queue, BEGINNING)
        gate = queue_limits.enter(cursor, queue=queue, limit=options.max_in_flight)
        if (
            gate is None
            or gate.max_in_flight == 0
            or not claim_lapsed.any_lapsed(cursor, queue=queue, mark=mark)
        ):
            return claim_lapsed.NOTHING
        take = partial(take_over, cursor, queues=[queue], skip_dead=options.skip_dead, marks=marks)
        if gate.level == 0:
            return take(**options.arguments(claimer, limit, admitted=True))
        if not queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=options.lease):
            return claim_lapsed.NOTHING
        found = take(**options.arguments(claimer, 1, admitted=True))
        self._end_probe_claim(cursor, queue, claimer, found=bool(found.taken))
        return found

    def _end_probe_claim(self, cursor: Cursor, queue: str, claimer: str, *, found: bool) -> None:
        """Announce the probe if its claim found a message; else cancel it."""
        if found:
            self._probing(queue, claimer)
        else:
            queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)

    def _claim_locked(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        arguments: ClaimArguments,
        more_claimers: Sequence[str] = (),
        with_marks: bool = False,
    ) -> Claim:
        queue, skip_dead = lanes[0].queue, options.skip_dead
        if options.ordered:
            who = self._worker
            rows = ordered_queues.claim(
                cursor,
                queue=queue,
                worker=who,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                **arguments,
            )
            return Claim(rows, {})
        if queue in self._keyed:
            return claim_keyed.claim(
                cursor,
                lanes=lanes,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                with_marks=with_marks,
                **arguments,
            )
        return claim.claim(cursor, lanes=lanes, **arguments)
