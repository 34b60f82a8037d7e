"""One queue in one line, as its own page and the list of queues show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_mq import queues
from django_mq.admin.filters import IN_FLIGHT
from django_mq.admin.heads import HeadsAdmin
from django_mq.admin.texts import badge, moment, span
from django_mq.models import QueuedMessage, QueueState
from django_mq.states import MessageState

#: The columns of counts, in the order of a message's life.
COLUMNS: tuple[tuple[str, Any], ...] = (
    ("processable", _("processable")),
    (IN_FLIGHT, _("in flight")),
    ("delayed", _("delayed")),
    ("retrying", _("retrying")),
    ("blocked", _("blocked")),
    ("held", _("held")),
    ("expired", _("expired")),
    ("dead", _("dead")),
)
#: A pause or a backoff of the queue is the state of these messages, where one message is asked.
_PAUSED_INSTEAD = ("processable", "delayed", "retrying")


@dataclass(frozen=True, slots=True)
class Cell:
    """One count: nothing to look at when `text` is "0"."""

    name: str
    label: Any
    text: str
    url: str
    #: How many there may be at most; empty where there is no limit.
    most: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One queue, as both pages show it."""

    counts: queues.QueueCounts
    url: str
    cells: Sequence[Cell]
    workers: Sequence[queues.Worker]
    #: The page of the message that the oldest blocked one waits behind.
    head_url: str = ""
    #: The message that others wait behind and somebody should know of, and its page.
    first: int | None = None
    first_url: str = ""

    @property
    def stands(self) -> bool:
        """Return whether nothing of the queue goes on before its `first` message does."""
        counts = self.counts
        return self.first is not None and (counts.ordered or counts.depth == counts.blocked)

    @property
    def needs_somebody(self) -> bool:
        """Return whether messages wait behind a dead one: they do not go on by themselves."""
        return self.first is not None and self.first == self.counts.dead_head

    @property
    def badge(self) -> Any:
        """Return what keeps the queue from being worked off, if anything does."""
        if self.counts.paused:
            return badge(MessageState.PAUSED)
        if self.counts.backoff_level:
            return badge(MessageState.RETRYING, gettext("backing off"))
        if self.counts.max_in_flight == 0:
            return badge(MessageState.PAUSED, gettext("held back"))
        if self.stands:
            colour = MessageState.DEAD if self.needs_somebody else MessageState.BLOCKED
            return badge(colour, MessageState.BLOCKED.label)
        if not self.counts.depth:
            return badge("idle", gettext("empty"))
        if not self.workers:
            return badge(MessageState.HELD, gettext("no worker"))
        if self.needs_somebody:
            return badge(MessageState.DEAD, gettext("partly blocked"))
        return badge(MessageState.PROCESSABLE, gettext("active"))

    @property
    def note(self) -> str:
        """Return until when that is so, behind which message, or how many workers there are."""
        counts = self.counts
        if counts.paused:
            until = counts.paused_until
            return gettext("until %s") % _clock(until) if until else gettext("until resumed")
        if counts.backoff_level:
            if counts.backoff_until is None:
                probes, due = gettext("level %d, a message probes"), gettext("level %d, probe due")
                return (probes if counts.probe_by else due) % counts.backoff_level
            note = gettext("until %(at)s, level %(level)d")
            return note % {"at": _clock(counts.backoff_until), "level": counts.backoff_level}
        if counts.max_in_flight == 0:
            return gettext("its limit is 0")
        if self.names_first:
            dead, other = gettext("behind dead #%d"), gettext("behind #%d")
            return (dead if self.needs_somebody else other) % self.first
        count = len(self.workers)
        return ngettext("%(count)d worker", "%(count)d workers", count) % {"count": count}

    @property
    def names_first(self) -> bool:
        """Return whether the note is about the `first` message."""
        return self.stands or (self.needs_somebody and bool(self.workers))

    @property
    def owner(self) -> str:
        """Return which worker has this ordered queue now: host and process, or its id."""
        return self._named(self.counts.owner)

    @property
    def probe(self) -> str:
        """Return which worker runs the probe of this queue."""
        return self._named(self.counts.probe_by)

    def _named(self, claimer: str | None) -> str:
        id = (claimer or "").partition(":")[0]
        for worker in self.workers:
            if worker.id == id:
                return gettext("%(host)s, process %(pid)d") % {
                    "host": worker.host,
                    "pid": worker.pid,
                }
        return id

    @property
    def oldest(self) -> str:
        return "" if self.counts.oldest is None else span(self.counts.oldest)


class QueueLinesAdmin(HeadsAdmin):
    """Lines, with links to what the user may see."""

    def lines(self, request: HttpRequest, found: Iterable[queues.QueueCounts]) -> list[Line]:
        alive = [each for each in queues.workers(using=self.alias) if each.alive]
        linked = self.may_see_messages(request)
        lines = []
        for counts in found:
            first = _first(counts)
            lines.append(
                Line(
                    counts,
                    self.url(QueueState, "change", counts.queue),
                    [self._cell(counts, name, label, linked) for name, label in COLUMNS],
                    [worker for worker in alive if worker.serves(counts.queue)],
                    self.message_url(request, counts.head) if counts.head is not None else "",
                    first,
                    self.message_url(request, first) if first is not None else "",
                )
            )
        return lines

    def _cell(self, counts: queues.QueueCounts, name: str, label: Any, linked: bool) -> Cell:
        text = counts.shown(name)
        stopped = counts.paused or counts.backoff_until is not None
        state = MessageState.PAUSED.value if stopped and name in _PAUSED_INSTEAD else name
        address = ""
        if linked and text != "0":
            address = self.url(QueuedMessage, "changelist", queue=counts.queue, state=state)
        most = counts.max_in_flight if name == IN_FLIGHT else None
        return Cell(name, label, text, address, "" if most is None else f"{most:,}")


def _first(counts: queues.QueueCounts) -> int | None:
    """Return the message that others wait behind, where nothing else holds the queue.

    In an ordered queue its first, else a dead one: other heads go on by themselves.
    """
    if counts.paused or counts.backoff_level or counts.max_in_flight == 0:
        return None
    return counts.head if counts.ordered else counts.dead_head


def _clock(at: datetime) -> str:
    """Return the time of day if it is today, else the moment."""
    local = timezone.localtime(at) if timezone.is_aware(at) else at
    return f"{local:%H:%M:%S}" if local.date() == timezone.localdate() else moment(at)
