"""Choose the statement that claims from a queue: plain, keyed, ordered, or behind a gate.

From a queue that backs off it claims only the probe.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from time import perf_counter

from django_mq.executor.statements import within_transaction
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.policy.line_limits import UNLIMITED
from django_mq.policy.line_marks import LineMarks
from django_mq.store import (
    Cursor,
    claim,
    claim_keyed,
    gates,
    ordered_queues,
    queue_backoff,
    refused_rows,
)
from django_mq.store.claim import NOTHING, Claim, Lane
from django_mq.store.claim_keyed import LineLimits
from django_mq.store.gates import Gate
from django_mq.worker.claim_round import ClaimResult
from django_mq.worker.claim_sizes import ClaimSizes
from django_mq.worker.queue_facts import QueueFacts
from django_mq.worker.queue_options import ClaimArguments, ClaimOptions, nonatomic_names
from django_mq.worker.refused_rows import RefusedRows

#: The maximum number of batches that one statement claims.
MAX_BATCHES = 4
#: The statement groups of queues without and with keys. Each other group is one queue, which is
#: claimed alone.
PLAIN, KEYED = "plain", "keyed"
#: A claim that had no reason, or no right, to look for messages.
NOT_SCANNED = ClaimResult(NOTHING, scanned=False)


class ClaimRouter:
    """Claims for worker process `worker` with the statement that each queue needs.

    `facts` are from the last poll. `owned` are the ordered queues that this process owns, with the
    marks of their lines, which claims move. `has_any(queue)` says whether it has an unsettled
    message of the queue; `probing(queue, claimer)` is called for a claim that is the probe of its
    queue; `line_limits` limits what a claim takes of each key, `ordered_limit(queue)` what it
    takes of an ordered queue. Nothing is claimed from `stopped_queues`: it would be released at
    once.
    """

    def __init__(
        self,
        *,
        worker: str,
        owned: MutableMapping[str, LineMarks],
        stopped_queues: StoppedQueues,
        has_any: Callable[[str], bool] = lambda queue: False,
        probing: Callable[[str, str], None] = lambda queue, claimer: None,
        line_limits: LineLimits = claim_keyed.without_limits,
        ordered_limit: Callable[[str], int] = lambda queue: UNLIMITED,
    ) -> None:
        self._worker = worker
        self._numbers = count(1)
        self._owned = owned
        self._has_any = has_any
        self.stopped_queues = stopped_queues
        self.facts = QueueFacts()
        self._probing = probing
        self._line_limits = line_limits
        self._ordered_limit = ordered_limit
        self._sizes = ClaimSizes()
        self.refused = RefusedRows()
        self._nonatomic = nonatomic_names()
        #: The names of the claims in this round of the loop.
        self.of_round: list[str] = []

    def begin_round(self) -> None:
        """Forget the names of earlier claims: each was answered, or its loss was recorded."""
        self.of_round.clear()

    def next_claimer(self) -> str:
        """Return the name of the next claim, which its rows carry."""
        self.of_round.append(f"{self._worker}:{next(self._numbers)}")
        return self.of_round[-1]

    def clock(self) -> float:
        """Return the seconds of a clock that times scans: it stands still during searches."""
        return perf_counter() - self.refused.searched_for

    def statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return a text that is equal for queues which one claim can serve, given equal options."""
        if options.ordered or self.facts.is_gated(queue, options):
            return f"alone {queue}"
        return KEYED if self.facts.has_keys(queue) else PLAIN

    def max_per_claim(self, queue: str, options: ClaimOptions) -> int:
        """Return the maximum number of messages of `queue` to claim with one statement."""
        batches = 1 if self.facts.is_gated(queue, options) else MAX_BATCHES
        return min(batches * options.batch_size, self._sizes.fitting(queue, options))

    def claim(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        *,
        limit: int,
        from_marks: bool = False,
        park: bool = True,
    ) -> ClaimResult:
        """Claim up to `limit` messages of `lanes`, which have the same options and statement group.

        A claimer gets at most a batch: a larger limit makes several claims in one statement. With
        `from_marks` all scans begin at marks; only then, a queue with keys returns new ones. With
        `park`, a queue with keys parks the messages that it cannot take.
        """
        if self.stopped_queues:
            lanes = [lane for lane in lanes if not self.stopped_queues.is_all_stopped(lane.queue)]
            if not lanes:
                return NOT_SCANNED
        waiting = partial(
            refused_rows.waiting,
            cursor,
            lanes=lanes,
            limit=max(limit, claim_keyed.WINDOW),
            admitted=self.facts.is_gated(lanes[0].queue, options),
        )
        take = partial(self._claim, cursor, lanes, options, limit, from_marks, park)
        return self.refused.claim_without_refused(cursor, take, waiting)

    def _claim(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        limit: int,
        from_marks: bool,
        park: bool,
    ) -> ClaimResult:
        queue = lanes[0].queue
        if options.ordered and (queue not in self._owned or self._has_any(queue)):
            return NOT_SCANNED
        if options.ordered:
            limit = min(limit, self._ordered_limit(queue))
        is_plain = self.statement_group(queue, options) == PLAIN
        with nullcontext() if is_plain else within_transaction(cursor):
            take = partial(self._claim_lanes, cursor, lanes, options, from_marks, park)
            if self.facts.is_gated(queue, options):
                return self._claim_gated(cursor, queue, options, limit, from_marks, take)
            arguments = self.arguments(options, self.next_claimer(), limit)
            more = [self.next_claimer() for _ in range((limit - 1) // options.batch_size)]
            return self._measured(queue, options, take(arguments, more))

    def arguments(
        self, options: ClaimOptions, claimer: str, limit: int, *, admitted: bool = False
    ) -> ClaimArguments:
        """Return the arguments that all statements share."""
        return {
            "claimer": claimer,
            "lease": options.lease,
            "limit": limit,
            "max_bytes": options.batch_bytes,
            "admitted": admitted,
            "excluded": self.refused.ids(),
            "nonatomic": self._nonatomic,
        }

    def _measured(self, queue: str, options: ClaimOptions, taken: Claim) -> ClaimResult:
        """Record from `taken` how many messages like these one statement should claim."""
        size = self._sizes.record(queue, options, taken.rows)
        return ClaimResult(taken, size=size)

    def _claim_gated(
        self,
        cursor: Cursor,
        queue: str,
        options: ClaimOptions,
        limit: int,
        from_marks: bool,
        take: Callable[[ClaimArguments], Claim],
    ) -> ClaimResult:
        claimer = self.next_claimer()
        gate = self.enter_gate(cursor, queue, options, from_mark=from_marks)
        if gate is None:
            return NOT_SCANNED._replace(contended=True)
        if gate.max_in_flight is not None:
            self.facts.limited.add(queue)
        if gate.room == 0:
            return ClaimResult(NOTHING, at_limit=bool(gate.max_in_flight))
        limit = limit if gate.room is None else min(limit, gate.room)
        if gate.level == 0:
            taken = take(self.arguments(options, claimer, limit, admitted=True))
            claimed = self._measured(queue, options, taken)
            return claimed._replace(at_limit=len(taken.rows) == gate.room)
        if not self.start_probe(cursor, queue, claimer, options):
            return NOT_SCANNED
        taken = take(self.arguments(options, claimer, 1, admitted=True))
        self.end_probe_claim(cursor, queue, claimer, found=bool(taken.rows))
        return self._measured(queue, options, taken)

    def enter_gate(
        self, cursor: Cursor, queue: str, options: ClaimOptions, *, from_mark: bool = False
    ) -> Gate | None:
        """Take the gate of `queue` until the commit; return None while another session has it.

        `from_mark` counts the messages in flight from where the last count found the first one.
        """
        marks = self.facts.lease_marks
        begin = {"lease_mark": marks[queue]} if from_mark and queue in marks else {}
        gate = gates.enter(cursor, queue=queue, limit=options.max_in_flight, **begin)
        if gate is not None and gate.lease_mark is not None:
            marks[queue] = gate.lease_mark
        return gate

    def start_probe(self, cursor: Cursor, queue: str, claimer: str, options: ClaimOptions) -> bool:
        """Let the claim `claimer` be the probe of `queue`; return False if it is too early."""
        return queue_backoff.start_probe(cursor, queue=queue, claimer=claimer, lease=options.lease)

    def end_probe_claim(self, cursor: Cursor, queue: str, claimer: str, *, found: bool) -> None:
        """Announce the probe if its claim found a message; else cancel it."""
        if found:
            self._probing(queue, claimer)
        else:
            queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)

    def _claim_lanes(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        from_marks: bool,
        park: bool,
        arguments: ClaimArguments,
        more_claimers: Sequence[str] = (),
    ) -> Claim:
        queue, skip_dead = lanes[0].queue, options.skip_dead
        if options.ordered:
            rows, self._owned[queue] = ordered_queues.claim(
                cursor,
                queue=queue,
                worker=self._worker,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                marks=self._owned[queue],
                from_front=not from_marks,
                **arguments,
            )
            return Claim(rows, {})
        if self.facts.has_keys(queue):
            return claim_keyed.claim(
                cursor,
                lanes=lanes,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                with_marks=from_marks,
                park=park,
                line_limits=self._line_limits,
                **arguments,
            )
        return claim.claim(cursor, lanes=lanes, more_claimers=more_claimers, **arguments)
