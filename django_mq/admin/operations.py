"""The operations on messages: their permissions, the states they apply to, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_mq import queues
from django_mq.states import MessageState

_IN_FLIGHT = (MessageState.LEASED, MessageState.RUNNING)
_WAITING = frozenset(MessageState) - {MessageState.DEAD, *_IN_FLIGHT}

Text = str | Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on messages."""

    name: str
    #: A permission of the app django_mq.
    permission: str
    run: Callable[..., queues.Changed]
    states: frozenset[MessageState]
    #: It cannot be undone, so it needs confirmation.
    removes: bool
    label: Text
    question: Text
    #: For the admin log; not translated, since users of other languages read it.
    past: str


REQUEUE = Operation(
    name="requeue",
    permission="requeue_message",
    run=queues.requeue,
    states=frozenset((MessageState.DEAD,)),
    removes=False,
    label=_("Requeue"),
    question=_("Requeue these dead letters?"),
    past="Requeued",
)
RUN_NOW = Operation(
    name="run_now",
    permission="run_message",
    run=queues.run_now,
    states=_WAITING - {MessageState.BLOCKED, MessageState.EXPIRED},
    removes=False,
    label=_("Run now"),
    question=_("Run these messages now?"),
    past="Made to run now",
)
CANCEL = Operation(
    name="cancel",
    permission="cancel_message",
    run=queues.cancel,
    states=_WAITING,
    removes=True,
    label=_("Cancel"),
    question=_("Cancel these messages?"),
    past="Cancelled",
)
DISCARD = Operation(
    name="discard",
    permission="discard_message",
    run=queues.discard,
    states=frozenset((MessageState.DEAD,)),
    removes=True,
    label=_("Discard"),
    question=_("Discard these dead letters?"),
    past="Discarded",
)
OPERATIONS = {each.name: each for each in (REQUEUE, RUN_NOW, CANCEL, DISCARD)}
