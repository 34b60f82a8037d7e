"""Suspects: messages that run while nothing else runs in their process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from django_mq.messages import worker_of
from django_mq.models import QueuedMessage
from django_mq.states import MessageState

#: In these states, `suspect` says how the next attempt will run.
_WAITS = (
    *(MessageState.BLOCKED, MessageState.HELD, MessageState.PAUSED),
    *(MessageState.RETRYING, MessageState.DELAYED, MessageState.PROCESSABLE),
)
#: How `last_error` begins after a lease lapsed: the worker that took over the message has stored
#: that the next one is to suspect it, but runs it beside others.
_VANISHED = "WorkerVanished"


def suspicion(message: QueuedMessage) -> str:
    """Say why a message that was read with its state waits to run alone; empty if it does not."""
    state = message.state
    leased = state is MessageState.LEASED and not message.last_error.startswith(_VANISHED)
    if not (message.suspect and (leased or state in _WAITS)):
        return ""
    return (
        "It is a suspect (its process died while it ran, or its lease lapsed), so it waits until"
        " nothing else runs in the process that claims it, and runs there alone"
    )


def claimed_suspects(alias: str) -> Mapping[str, Sequence[QueuedMessage]]:
    """Return the suspects that each worker has claimed: nothing else starts beside them there.

    Suspects whose lease has just lapsed are left out: their rows do not tell whether they run
    alone.
    """
    leased = QueuedMessage.objects.using(alias).filter(leased_until__isnull=False, suspect=True)
    found = leased.exclude(last_error__startswith=_VANISHED).order_by("leased_until", "pk")
    by_worker: dict[str, list[QueuedMessage]] = defaultdict(list)
    for each in found.only("handler", "claimed_by", "leased_until"):
        by_worker[worker_of(each.claimed_by)].append(each)
    return by_worker
