"""What a broadcast does when its unique id is taken: policy, without a clock or a database."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.messages import CopyOutcome, OnDuplicate


class State(Enum):
    """What is known of a unique id: facts, never stored as such.

    WAITING: its message has not been claimed, or will be again. IN_FLIGHT: a worker has it
    (lapsed or not), or it waits to be tried again and another one is put aside behind it.
    QUIET: it was handled not long ago. FREE: anything else, a dead message too.
    """

    FREE = "free"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    QUIET = "quiet"


def state_of(*, alive: bool, leased: bool, aside: bool, quiet: bool) -> State:
    """Name the state of an id: the message that has it comes before its quiet time.

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
        return State.IN_FLIGHT if leased or aside else State.WAITING
    return State.QUIET if quiet else State.FREE


class Action(Enum):
    """What is written: ADD a row, REPLACE what the waiting row says, PUT_ASIDE for later."""

    NOTHING = "nothing"
    ADD = "add"
    REPLACE = "replace"
    PUT_ASIDE = "put aside"


class Answer(NamedTuple):
    """What the broadcaster is told of one copy; `refused`: DuplicateMessage is raised."""

    outcome: CopyOutcome
    reason: str = ""
    refused: bool = False


class Step(NamedTuple):
    """What one message does; `sets_due` when its due time counts, not the one that is stored."""

    action: Action
    answer: Answer
    sets_due: bool = True


def decide(state: State, on_duplicate: OnDuplicate) -> Step:
    """Say what becomes of a message whose unique id is in `state`.

    >>> for state in State:
    ...     for option in ("skip", "raise", "update", "debounce", "requeue"):
    ...         step = decide(state, option)
    ...         told = "DuplicateMessage" if step.answer.refused else step.answer.outcome
    ...         print(f"{state.value:10}{option:10}{step.action.value:11}{told:17}"
    ...               f"{step.answer.reason}".rstrip())
    free      skip      add        added
    free      raise     add        added
    free      update    add        added
    free      debounce  add        added
    free      requeue   add        added
    waiting   skip      nothing    duplicate        waiting
    waiting   raise     nothing    DuplicateMessage waiting
    waiting   update    replace    updated
    waiting   debounce  replace    debounced
    waiting   requeue   nothing    duplicate        waiting
    in_flight skip      nothing    duplicate        in_flight
    in_flight raise     nothing    DuplicateMessage in_flight
    in_flight update    nothing    duplicate        in_flight
    in_flight debounce  nothing    duplicate        in_flight
    in_flight requeue   put aside  requeued
    quiet     skip      nothing    duplicate        quiet
    quiet     raise     nothing    DuplicateMessage quiet
    quiet     update    nothing    duplicate        quiet
    quiet     debounce  nothing    duplicate        quiet
    quiet     requeue   add        requeued
    """
    if state is State.FREE:
        return Step(Action.ADD, Answer("added"))
    if on_duplicate == "requeue" and state is State.IN_FLIGHT:
        return Step(Action.PUT_ASIDE, Answer("requeued"))
    if on_duplicate == "requeue" and state is State.QUIET:
        return Step(Action.ADD, Answer("requeued"))
    if on_duplicate == "update" and state is State.WAITING:
        return Step(Action.REPLACE, Answer("updated"), sets_due=False)
    if on_duplicate == "debounce" and state is State.WAITING:
        return Step(Action.REPLACE, Answer("debounced"))
    return Step(Action.NOTHING, Answer("duplicate", state.value, on_duplicate == "raise"))


class Plan(NamedTuple):
    """What the messages of one id do together, and what each is told.

    `content` and `due` are the places of those whose content and due time are written; `due` is
    None when the stored one stays.
    """

    action: Action
    content: int
    due: int | None
    answers: tuple[Answer, ...]


def plan(state: State, on_duplicate: Sequence[OnDuplicate]) -> Plan:
    """Say what becomes of the messages of one call that share an id: each sees those before it.

    One write does for all of them, so a call takes each lock once, in order.

    >>> found = plan(State.FREE, ["skip", "update", "skip", "debounce"])
    >>> found.action.value, found.content, found.due
    ('add', 3, 3)
    >>> [answer.outcome for answer in found.answers]
    ['added', 'updated', 'duplicate', 'debounced']
    >>> plan(State.FREE, ["skip", "update"])[:3]
    (<Action.ADD: 'add'>, 1, 0)
    >>> plan(State.IN_FLIGHT, ["requeue", "requeue"])[:3]
    (<Action.PUT_ASIDE: 'put aside'>, 1, 1)
    """
    action, content, due = Action.NOTHING, 0, None
    answers = []
    for place, option in enumerate(on_duplicate):
        step = decide(state, option)
        answers.append(step.answer)
        if step.action is Action.NOTHING:
            continue
        if action is Action.NOTHING:
            action = step.action
        content = place
        if step.sets_due:
            due = place
        if step.action is Action.ADD:
            state = State.WAITING
    return Plan(action, content, due, tuple(answers))
