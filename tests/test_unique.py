"""Unique ids as policy: every state against every option, and several messages at once."""

from __future__ import annotations

from typing import get_args

import pytest

from django_mq.messages import OnDuplicate
from django_mq.unique import Action, Answer, State, decide, plan, state_of

OPTIONS = get_args(OnDuplicate)


def test_every_state_has_an_answer_to_every_option() -> None:
    """CAR-5: what was done, or why not."""
    for state in State:
        for option in OPTIONS:
            step = decide(state, option)
            assert (step.action is Action.NOTHING) == (step.answer.outcome == "duplicate")
            assert step.answer.reason == (state.value if step.answer.outcome == "duplicate" else "")
            assert step.answer.refused == (option == "raise" and state is not State.FREE)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ("", State.FREE),
        ("alive", State.WAITING),
        ("alive quiet", State.WAITING),
        ("alive leased", State.IN_FLIGHT),
        ("alive leased aside quiet", State.IN_FLIGHT),
        ("alive aside", State.IN_FLIGHT),
        ("quiet", State.QUIET),
        ("leased", State.FREE),
    ],
)
def test_states_follow_from_facts(facts: str, state: State) -> None:
    """CAR-1, CAR-2, CAR-3: nothing is stored but facts, and the message comes first."""
    true = facts.split()
    found = state_of(
        alive="alive" in true, leased="leased" in true, aside="aside" in true, quiet="quiet" in true
    )
    assert found is state


@pytest.mark.parametrize(
    ("state", "options", "action", "content", "due", "outcomes"),
    [
        (State.FREE, "skip", Action.ADD, 0, 0, "added"),
        (State.FREE, "skip skip", Action.ADD, 0, 0, "added duplicate"),
        (State.FREE, "requeue requeue", Action.ADD, 0, 0, "added duplicate"),
        (State.FREE, "skip update", Action.ADD, 1, 0, "added updated"),
        (State.FREE, "skip debounce update", Action.ADD, 2, 1, "added debounced updated"),
        (State.WAITING, "skip", Action.NOTHING, 0, None, "duplicate"),
        (State.WAITING, "update", Action.REPLACE, 0, None, "updated"),
        (State.WAITING, "debounce update", Action.REPLACE, 1, 0, "debounced updated"),
        (
            State.WAITING,
            "update skip debounce",
            Action.REPLACE,
            2,
            2,
            "updated duplicate debounced",
        ),
        (State.IN_FLIGHT, "requeue skip", Action.PUT_ASIDE, 0, 0, "requeued duplicate"),
        (State.IN_FLIGHT, "requeue requeue", Action.PUT_ASIDE, 1, 1, "requeued requeued"),
        (State.QUIET, "skip requeue", Action.ADD, 1, 1, "duplicate requeued"),
        (State.QUIET, "requeue update", Action.ADD, 1, 0, "requeued updated"),
    ],
)
def test_the_messages_of_one_id_are_one_write(
    state: State,
    options: str,
    action: Action,
    content: int,
    due: int | None,
    outcomes: str,
) -> None:
    """The later sees the earlier."""
    found = plan(state, options.split())  # type: ignore[arg-type]
    assert (found.action, found.content, found.due) == (action, content, due)
    assert " ".join(answer.outcome for answer in found.answers) == outcomes


def test_a_later_one_that_raises_is_refused() -> None:
    assert plan(State.FREE, ["raise", "raise"]).answers == (
        Answer("added"),
        Answer("duplicate", "waiting", refused=True),
    )
