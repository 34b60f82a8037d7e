"""One queue as a row, for its own page and for the list of queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from django_mq import queues
from django_mq.admin.heads import HeadsAdmin
from django_mq.admin.state_counts import shown_state
from django_mq.admin.texts import badge, clock
from django_mq.messages import worker_of
from django_mq.models import QueuedMessage, QueueState
from django_mq.policy.durations import span
from django_mq.policy.message_filter import IN_FLIGHT
from django_mq.states import MessageState

#: The columns of counts, in the order of a message's life.
COLUMNS = (
    ("processable", "processable"),
    (IN_FLIGHT, "in flight"),
    ("delayed", "delayed"),
    ("retrying", "retrying"),
    ("blocked", "blocked"),
    ("held", "held"),
    ("expired", "expired"),
    ("dead", "dead"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One count, with a link to its messages unless it is "0"."""

    name: str
    label: str
    text: str
    url: str
    #: The limit of the count; empty for none.
    limit: str = ""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue, as the list of queues and the queue's own page show it."""

    counts: queues.QueueCounts
    url: str
    cells: Sequence[Cell]
    workers: Sequence[queues.WorkerProcess]
    #: The page of the message behind which the oldest blocked one waits.
    head_url: str = ""
    #: The blocking message that an operator should know about, and its page.
    first: int | None = None
    first_url: str = ""

    @property
    def is_blocked(self) -> bool:
        """Return whether all waiting messages of the queue are behind a blocking message."""
        counts = self.counts
        return self.first is not None and (counts.ordered or counts.depth == counts.blocked)

    @property
    def needs_operator(self) -> bool:
        """Return whether messages wait behind a dead one, until an operator settles that."""
        return self.first is not None and self.first == self.counts.dead_head

    @property
    def badge(self) -> Any:
        """Return the queue's state, or the reason why its messages do not run."""
        if self.counts.paused:
            return badge(MessageState.PAUSED)
        if self.counts.backoff_level:
            return badge(MessageState.RETRYING, "backing off")
        if self.counts.max_in_flight == 0:
            return badge(MessageState.PAUSED, "held back")
        if self.is_blocked:
            colour = MessageState.DEAD if self.needs_operator else MessageState.BLOCKED
            return badge(colour, MessageState.BLOCKED.label)
        if not self.counts.depth:
            return badge("idle", "empty")
        if not self.workers:
            return badge(MessageState.HELD, "no worker")
        if any(each.quiet for each in self.workers) and not any(
            each.claims for each in self.workers
        ):
            return badge(MessageState.HELD, "workers quiet")
        if self.needs_operator:
            return badge(MessageState.DEAD, "partly blocked")
        if self.counts.held == self.counts.depth:
            return badge(MessageState.HELD)
        return badge(MessageState.PROCESSABLE, "active")

    @property
    def note(self) -> str:
        """Return when the state ends, the blocking message, or how many workers serve the queue."""
        counts = self.counts
        if counts.paused:
            until = counts.paused_until
            return f"until {clock(until)}" if until else "until resumed"
        if counts.backoff_level:
            level = f"level {counts.backoff_level}"
            if counts.backoff_until is None:
                return f"{level}, {'probing' if counts.probe_by else 'probe due'}"
            return f"until {clock(counts.backoff_until)}, {level}"
        if counts.max_in_flight == 0:
            return "its limit is 0"
        if self.names_first:
            return f"behind {'dead ' if self.needs_operator else ''}#{self.first}"
        count = len(self.workers)
        if not count and counts.depth:
            return "start mq_worker"
        return f"{count} worker{'' if count == 1 else 's'}"

    @property
    def names_first(self) -> bool:
        """Return whether the note is about the `first` message."""
        return self.is_blocked or (self.needs_operator and bool(self.workers))

    @property
    def owner(self) -> str:
        """Return the worker that owns this ordered queue: host and process, or its id."""
        return self._named(self.counts.owner)

    @property
    def probe(self) -> str:
        """Return the worker that runs the probe of this queue."""
        return self._named(self.counts.probe_by)

    def _named(self, claimer: str | None) -> str:
        id = worker_of(claimer)
        for worker in self.workers:
            if worker.id == id:
                return f"{worker.host}, process {worker.pid}"
        return id

    @property
    def oldest(self) -> str:
        return "" if self.counts.oldest is None else span(self.counts.oldest)


class QueueRowsAdmin(HeadsAdmin):
    """Builds the rows, with links to the pages that the user may see."""

    def rows(
        self,
        request: HttpRequest,
        found: Iterable[queues.QueueCounts],
        workers: Iterable[queues.WorkerProcess] | None = None,
    ) -> list[QueueRow]:
        """Return the rows of queues; `workers` are read if the caller has not."""
        known = queues.workers(using=self.alias) if workers is None else workers
        alive = [each for each in known if each.alive]
        linked = self.may_see_messages(request)
        rows = []
        for counts in found:
            first = _first(counts)
            rows.append(
                QueueRow(
                    counts,
                    self.url(QueueState, "change", counts.queue),
                    [self._cell(counts, name, label, linked) for name, label in COLUMNS],
                    [worker for worker in alive if worker.serves(counts.queue)],
                    self.message_url(request, counts.head) if counts.head is not None else "",
                    first,
                    self.message_url(request, first) if first is not None else "",
                )
            )
        return rows

    def _cell(self, counts: queues.QueueCounts, name: str, label: str, linked: bool) -> Cell:
        text = counts.shown(name)
        state = shown_state(counts, name)
        url = ""
        if linked and text != "0":
            url = self.url(QueuedMessage, "changelist", queue=counts.queue, state=state)
        maximum = counts.max_in_flight if name == IN_FLIGHT else None
        return Cell(name, label, text, url, "" if maximum is None else f"{maximum:,}")


def _first(counts: queues.QueueCounts) -> int | None:
    """Return the blocking message to show, unless a pause, backoff or limit stops the queue.

    It is the head of an ordered queue, else a dead head: other heads proceed by themselves.
    """
    if counts.paused or counts.backoff_level or counts.max_in_flight == 0:
        return None
    return counts.head if counts.ordered else counts.dead_head
