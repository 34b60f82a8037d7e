"""The actions on messages: their permissions, the states they apply to, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django_mq import queues
from django_mq.states import MessageState


@dataclass(frozen=True, slots=True)
class MessageAction:
    """One action on messages."""

    name: str
    #: A permission of the app django_mq.
    permission: str
    run: Callable[..., queues.Changed]
    states: frozenset[MessageState]
    label: str
    question: str
    #: For the admin log.
    past: str
    #: The action cannot be undone, so it needs confirmation.
    removes: bool = False


_DEAD = frozenset((MessageState.DEAD,))
_WAITING = frozenset(MessageState) - _DEAD - {MessageState.LEASED, MessageState.RUNNING}
_MAY_RUN = _WAITING - {MessageState.BLOCKED, MessageState.EXPIRED}

# fmt: off
REQUEUE = MessageAction(
    "requeue", "requeue_message", queues.requeue, _DEAD,
    "Requeue", "Requeue these dead letters?", "Requeued",
)
RUN_NOW = MessageAction(
    "run_now", "run_message", queues.run_now, _MAY_RUN,
    "Run now", "Run these messages now?", "Made to run now",
)
CANCEL = MessageAction(
    "cancel", "cancel_message", queues.cancel, _WAITING,
    "Cancel", "Cancel these messages?", "Cancelled", removes=True,
)
DISCARD = MessageAction(
    "discard", "discard_message", queues.discard, _DEAD,
    "Discard", "Discard these dead letters?", "Discarded", removes=True,
)
# fmt: on
#: By name. `ReadOnlyAdmin.offered()` makes the buttons, `MessageActionsAdmin` performs the actions.
MESSAGE_ACTIONS = {each.name: each for each in (REQUEUE, RUN_NOW, CANCEL, DISCARD)}
#: Actions with the URLs of their buttons.
OfferedActions = list[tuple[MessageAction, str]]
