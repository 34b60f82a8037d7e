"""Decide what a broadcast does if its unique id is taken. Uses no clock and no database."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple

OnDuplicate = Literal["skip", "raise", "update", "debounce", "replace", "requeue", "rerun"]
CopyOutcome = Literal["added", "updated", "debounced", "requeued", "duplicate"]


class UniqueState(Enum):
    """The state of a unique id, derived from rows and never stored.

    WAITING: its message waits for a claim. IN_FLIGHT: its message is leased (lapsed or not), or
    waits for a retry while another message is put aside behind it. QUIET: its message succeeded and
    `unique_for` has not passed. FREE: anything else, including a dead message.
    """

    FREE = "free"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    QUIET = "quiet"


def state_of(*, alive: bool, leased: bool, aside: bool, quiet: bool) -> UniqueState:
    """Return the state of an id; a live message takes precedence over a quiet time.

    >>> state_of(alive=True, leased=False, aside=False, quiet=True).value
    'waiting'
    >>> state_of(alive=True, leased=False, aside=True, quiet=False).value
    'in_flight'
    >>> state_of(alive=False, leased=False, aside=False, quiet=True).value
    'quiet'
    >>> state_of(alive=False, leased=False, aside=False, quiet=False).value
    'free'
    """
    if alive:
        return UniqueState.IN_FLIGHT if leased or aside else UniqueState.WAITING
    return UniqueState.QUIET if quiet else UniqueState.FREE


class Action(Enum):
    """The write: ADD a row, CHANGE the waiting row, or PUT_ASIDE for later."""

    NOTHING = "nothing"
    ADD = "add"
    CHANGE = "change"
    PUT_ASIDE = "put aside"


class PlannedReceipt(NamedTuple):
    """The outcome of one copy for the producer; if `refused`, DuplicateMessage is raised."""

    outcome: CopyOutcome
    reason: str = ""
    refused: bool = False


class Decision(NamedTuple):
    """The effect of one message; on a waiting row it sets the content, the due time, or both."""

    action: Action
    receipt: PlannedReceipt
    sets_content: bool = True
    sets_due: bool = True


#: The options that change a waiting row.
_CHANGES: dict[str, Decision] = {
    "update": Decision(Action.CHANGE, PlannedReceipt("updated"), sets_due=False),
    "debounce": Decision(Action.CHANGE, PlannedReceipt("debounced"), sets_content=False),
    "replace": Decision(Action.CHANGE, PlannedReceipt("updated")),
    "rerun": Decision(Action.CHANGE, PlannedReceipt("updated"), sets_due=False),
}


def decide(state: UniqueState, on_duplicate: OnDuplicate) -> Decision:
    """Return the effect of a message whose unique id is in `state`.

    A requeued message is put aside while the id is in flight, and added while it is quiet. For each
    option, the table shows the outcome if the id is free, waiting, in flight, and quiet:

    >>> for option in ("skip", "raise", *_CHANGES, "requeue"):
    ...     receipts = [decide(state, option).receipt for state in UniqueState]
    ...     told = ["error" if each.refused else each.outcome for each in receipts]
    ...     print(f"{option:9}", *(f"{each:10}" for each in told[:-1]), told[-1])
    skip      added      duplicate  duplicate  duplicate
    raise     added      error      error      error
    update    added      updated    duplicate  duplicate
    debounce  added      debounced  duplicate  duplicate
    replace   added      updated    duplicate  duplicate
    rerun     added      updated    requeued   requeued
    requeue   added      duplicate  requeued   requeued
    """
    if state is UniqueState.FREE:
        return Decision(Action.ADD, PlannedReceipt("added"))
    if on_duplicate in ("requeue", "rerun") and state is UniqueState.IN_FLIGHT:
        return Decision(Action.PUT_ASIDE, PlannedReceipt("requeued"))
    if on_duplicate in ("requeue", "rerun") and state is UniqueState.QUIET:
        return Decision(Action.ADD, PlannedReceipt("requeued"))
    if on_duplicate in _CHANGES and state is UniqueState.WAITING:
        return _CHANGES[on_duplicate]
    return Decision(
        Action.NOTHING, PlannedReceipt("duplicate", state.value, on_duplicate == "raise")
    )


class Plan(NamedTuple):
    """The combined effect of the messages of one id, and the receipt of each.

    `content` is the index of the message whose content is written; None if the stored one stays.
    `dues` are the indexes of all messages that set the due time, in order.
    """

    action: Action
    content: int | None
    dues: tuple[int, ...]
    receipts: tuple[PlannedReceipt, ...]

    @property
    def due(self) -> int | None:
        """The index of the message whose due time is written; None if the stored one stays."""
        return self.dues[-1] if self.dues else None


def plan(state: UniqueState, on_duplicate: Sequence[OnDuplicate]) -> Plan:
    """Return the effect of the messages of one call that share an id; each sees the ones before it.

    One write serves them all, so a call takes each lock once, in order.

    >>> found = plan(UniqueState.FREE, ["skip", "update", "skip", "debounce"])
    >>> found.action.value, found.content, found.due
    ('add', 1, 3)
    >>> [receipt.outcome for receipt in found.receipts]
    ['added', 'updated', 'duplicate', 'debounced']
    >>> plan(UniqueState.FREE, ["skip", "update"])[:3]
    (<Action.ADD: 'add'>, 1, (0,))
    >>> plan(UniqueState.WAITING, ["debounce"])[:3]
    (<Action.CHANGE: 'change'>, None, (0,))
    >>> plan(UniqueState.IN_FLIGHT, ["requeue", "rerun"])[:3]
    (<Action.PUT_ASIDE: 'put aside'>, 1, (0, 1))
    """
    action = Action.NOTHING
    content: int | None = None
    dues = []
    receipts = []
    for index, option in enumerate(on_duplicate):
        decision = decide(state, option)
        receipts.append(decision.receipt)
        if decision.action is Action.NOTHING:
            continue
        if action is Action.NOTHING:
            action = decision.action
        if decision.sets_content:
            content = index
        if decision.sets_due:
            dues.append(index)
        if decision.action is Action.ADD:
            state = UniqueState.WAITING
    return Plan(action, content, tuple(dues), tuple(receipts))
