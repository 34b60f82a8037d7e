"""The number of messages in each state, for the overview and the list of messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from django.db import connections, transaction
from django.http import HttpRequest

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import TookTooLong, reporting_timeouts
from django_mq.policy.message_filter import IN_FLIGHT
from django_mq.policy.rounding import counted
from django_mq.queues.message_counts import read_many_counts
from django_mq.states import MessageState

#: The maximum number of queues that a page counts.
MAX_QUEUES = 200
#: The share of the usual time for counts: the page also has rows to read.
TIME_SHARE = 0.2
#: Messages in these states are shown as paused while their queue is paused or backs off.
_PAUSED_INSTEAD = ("processable", "delayed", "retrying")
_COUNTS = (*(state.value for state in MessageState if state != MessageState.PAUSED), IN_FLIGHT)


def shown_state(counts: queues.QueueCounts, name: str) -> str:
    """Return the displayed state of the messages that `name` counts in this queue."""
    is_stopped = counts.paused or counts.backoff_until is not None
    return MessageState.PAUSED.value if is_stopped and name in _PAUSED_INSTEAD else name


def summed(parts: Iterable[tuple[queues.QueueCounts, str]], *, more: bool = False) -> str:
    """Return the sum of the named counts as text; an estimate, with `≈`, if one was capped.

    Set `more` if some queues were not counted.
    """
    parts = list(parts)
    return counted(
        sum(getattr(counts, name) for counts, name in parts),
        sum(counts.about(name) for counts, name in parts),
        stopped=more or any(counts.is_capped(name) for counts, name in parts),
    )


def by_state(found: Collection[queues.QueueCounts], *, more: bool = False) -> dict[str, str]:
    """Return the counts of `found` by state, and of messages in flight, as text."""
    parts: dict[str, list[tuple[queues.QueueCounts, str]]]
    parts = {state: [] for state in (*_COUNTS, MessageState.PAUSED.value)}
    for counts in found:
        for name in _COUNTS:
            parts[shown_state(counts, name)].append((counts, name))
    return {state: summed(each, more=more) for state, each in parts.items()}


class StateCountsAdmin(ReadOnlyAdmin):
    """Counts the messages of a list's queue, or of all queues that the user may see."""

    def state_counts(self, request: HttpRequest) -> dict[str, str]:
        """Return the counts by state as text; none if the database takes too long.

        Call it last, within a page's time limits: the transaction reads in index order afterwards.
        """
        asked = request.GET.get("queue") or request.GET.get("queue__exact")
        if asked:
            seen = [asked] if self.may_see(request, asked) else []
        else:
            seen = self.seen_queues(request)
        try:
            with (
                reporting_timeouts(),
                transaction.atomic(using=self.alias),
                connections[self.alias].cursor() as cursor,
            ):
                found, _most = read_many_counts(cursor, seen[:MAX_QUEUES], share=TIME_SHARE)
        except TookTooLong:
            return {}
        return by_state(found.values(), more=len(seen) > MAX_QUEUES)
