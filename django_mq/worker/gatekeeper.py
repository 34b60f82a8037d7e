"""Enter the gates of queues, and make a claim the probe of a queue that backs off."""

from __future__ import annotations

from collections.abc import Callable

from django_mq.store import Cursor, gates, queue_backoff
from django_mq.store.gates import Gate
from django_mq.worker.queue_facts import QueueFacts
from django_mq.worker.queue_options import ClaimOptions


class Gatekeeper:
    """For the queues that back off or have a limit of messages in flight.

    `probing(queue, claimer)` is called for a claim that is the probe of its queue.
    """

    def __init__(self, facts: QueueFacts, probing: Callable[[str, str], None]) -> None:
        self._facts = facts
        self._probing = probing

    def enter(
        self, cursor: Cursor, queue: str, options: ClaimOptions, *, from_mark: bool = False
    ) -> Gate | None:
        """Take the gate of `queue` until the commit; return None while another session has it.

        `from_mark` counts the messages in flight from where the last count found the first one.
        """
        marks = self._facts.lease_marks
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
